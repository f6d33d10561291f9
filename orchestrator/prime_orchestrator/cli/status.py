"""`orchestrator status`: what a pool's orchestrator says of itself, over HTTP alone."""

from __future__ import annotations

from typing import Annotated

import typer

from prime_chain.amounts import prime
from prime_core.command_line import Json, command
from prime_core.messages import Status
from prime_core.printing import printable
from prime_core.settlement import is_short
from prime_core.times import utc
from prime_core.transport.client import OrchestratorClient

STEPS_SHOWN = 5

app = command()


@app.command()
def status(
    orchestrator: Annotated[str, typer.Option(help="URL of the pool's orchestrator.")],
    json_output: Json = False,
) -> None:
    """Show the pool, its nodes, its latest steps, and the share of each target length."""
    with OrchestratorClient(orchestrator) as client:
        found = client.get("/v1/status", Status)
    typer.echo(found.model_dump_json() if json_output else printable(text(found), keep="\n"))


def text(status: Status) -> str:
    """The picture as lines of text."""
    policy = "none" if status.latest_version is None else str(status.latest_version)
    unjudged = f" ({status.expired_unjudged} expired unjudged: the pool's fault)"
    files = [
        f"{count} {kind}{unjudged if kind == 'void' and status.expired_unjudged else ''}"
        for kind, count in sorted(status.files.items())
    ]
    since = "" if status.activity_since is None else f" since {utc(status.activity_since)}"
    activity = "" if status.activity == "running" else f", {status.activity.upper()}{since}"
    lines = [
        f"pool {status.pool} ({status.name}), step {status.step}, policy {policy}, "
        f"chain {'reachable' if status.chain_reachable else 'NOT REACHABLE'}{activity}",
        f"files: {', '.join(files) or 'none'}",
        *_money(status),
        "",
        f"{'node':44}{'state':13}{'class':>5}{'policy':>8}{'accepted':>10}{'rejected':>10}",
    ]
    for node in status.nodes:
        version = "-" if node.policy_version is None else str(node.policy_version)
        lines.append(
            f"{node.node:44}{node.status:13}{node.speed_class:>5}{version:>8}"
            f"{node.accepted:>10}{node.rejected:>10}"
        )
    lines += ["", f"{'step':>8}{'rows':>8}{'reward':>9}{'staleness':>11}  batch"]
    for batch in status.batches[-STEPS_SHOWN:]:
        reward = int(batch["mean_reward_micro"]) / 1e6
        lines.append(
            f"{batch['step']:>8}{batch['rows']:>8}{reward:>9.3f}{batch['staleness_max']:>11}"
            f"  {batch.get('state', '')}"
        )
    names = ("asked", "accepted", "sealed", "trained")
    totals = [max(1, sum(getattr(share, name) for share in status.targets)) for name in names]
    lines += ["", f"{'target':>8}{''.join(f'{name:>13}' for name in (*names, 'expired'))}"]
    for share in status.targets:
        counts = [getattr(share, name) for name in names]
        late = f"{share.expired:>6} ({share.expired / max(1, share.asked):4.0%})"
        alarms = f"{'  STARVES' if share.starving else ''}{'  EXPIRES' if share.expiring else ''}"
        cells = "".join(
            f"{count:>6} ({count / total:4.0%})"
            for count, total in zip(counts, totals, strict=True)
        )
        lines.append(f"{share.target:>8}{cells}{late}{alarms}")
    return "\n".join(lines)


def _money(status: Status) -> list[str]:
    """What the pool owes and holds, with a warning if it gives no lease for it."""
    if status.owed is None or status.money is None:
        return []
    owed, money = int(status.owed), int(status.money)
    lines = [f"owed: {prime(owed)}; bond and free funds: {prime(money)}"]
    if is_short(owed, money):
        lines.append("WARNING: NO LEASE IS GIVEN until funds are added: orchestrator pool fund")
    return lines
