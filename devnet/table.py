"""The demo in the terminal: one live picture of the pool, from the orchestrator's public status."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from prime_core.messages import NodeInfo, Status

_TONES = {
    "active": "green",
    "confirmed": "green",
    "executed": "red",
    "ejected": "red",
    "failed": "red",
    "quarantined": "yellow",
    "silent": "yellow",
    "shadow": "dim",
}
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """The last 60 values, each in [0, 1], as one line of bars."""
    return "".join(_BARS[min(7, max(0, int(value * 8)))] for value in values[-60:])


def picture(
    status: Status,
    names: Mapping[str, str],
    evaluations: list[tuple[int, float]],
    page: str,
    phase: str,
    seconds: float,
) -> RenderableType:
    """All that the table shows: `names` maps addresses to the demo's node names (which only the
    demo knows: the orchestrator does not know who lies); `seconds` since the start."""
    rewards = [int(batch["mean_reward_micro"]) / 1e6 for batch in status.batches]
    staleness = max((int(batch["staleness_max"]) for batch in status.batches), default=0)
    head = Table.grid(padding=(0, 2))
    head.add_row("what", Text(phase, style="bold"), "page", Text(page, style="cyan"))
    head.add_row(
        "batches",
        f"{status.step}",
        "policy",
        f"{status.latest_version if status.latest_version is not None else '–'}",
    )
    head.add_row(
        "files",
        _files(status),
        "staleness",
        f"at most {staleness}",
    )
    shares = "  ".join(
        f"{share.target}: {share.accepted} of {share.asked}{' STARVES' if share.starving else ''}"
        for share in status.targets
    )
    head.add_row("targets", shares or "–", "", "")
    head.add_row("reward", f"{rewards[-1]:.3f}" if rewards else "–", "by batch", sparkline(rewards))
    head.add_row(
        "held out",
        "  ".join(f"v{version}: {mean:.3f}" for version, mean in evaluations[-6:]) or "–",
        "",
        "",
    )
    return Panel(
        Group(head, _nodes(status.nodes, names, status.time), _transactions(status)),
        title=f"{status.name} · {int(seconds) // 60}:{int(seconds) % 60:02d}",
        border_style="blue",
    )


def _files(status: Status) -> str:
    counts = status.files
    return "  ".join(
        f"{kind} {counts.get(kind, 0)}" for kind in ("accepted", "rejected", "void", "submitted")
    )


def _nodes(nodes: tuple[NodeInfo, ...], names: Mapping[str, str], now: int) -> Table:
    table = Table(expand=True, box=None, header_style="dim")
    for column in ("node", "state", "class", "policy", "heard", "accepted", "rejected", "units"):
        table.add_column(column)
    for node in sorted(nodes, key=lambda node: names.get(node.node, node.node)):
        table.add_row(
            names.get(node.node, node.node[:10]),
            Text(node.status, style=_TONES.get(node.status, "")),
            str(node.speed_class),
            "–" if node.policy_version is None else str(node.policy_version),
            f"{max(0, now - node.last_heartbeat)} s ago" if node.last_heartbeat else "–",
            str(node.accepted),
            Text(str(node.rejected), style="red" if node.rejected else ""),
            f"{node.units:,}",
        )
    return table


def _transactions(status: Status) -> Text:
    text = Text("\n")
    for item in status.transactions[-5:]:
        tone = _TONES.get(str(item["status"]), "dim")
        text.append(f"{item['status']!s:<10}", style=tone)
        text.append(f"{item['kind']!s:<14}")
        text.append(f"{item.get('hash') or ''}\n", style="dim")
    return text
