"""`prime-node`: everything that the owner of a machine types.

Each command imports what it needs when it is called: `--help` loads neither torch, docker nor web3,
and reading stakes, rewards and slashes needs neither torch nor docker. Expected errors are one
sentence and an exit code (prime_core/errors.py).
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prime_core import tracing
from prime_core.command_line import AllowPrivate, BaseModel, FirstAnswer, Json, program, run
from prime_core.errors import UnavailableError, UntrustedError, UserError
from prime_core.logs import log_to_stderr, set_process_fields
from prime_core.times import utc
from prime_node.cli_common import (
    DryRun,
    NodeFlag,
    ReplayDevice,
    ReplayDtype,
    configured,
    print_fields,
    print_json,
)
from prime_node.cli_nodes import appeal, dispute, payout

if TYPE_CHECKING:
    from prime_node.config import Settings

app = program(
    "prime-node",
    "Joins this machine to a pool, keeps it at work, and shows what it earned.",
    {
        "wallet": ("prime_node.cli_owner:wallet_app", "The node's key."),
        "stake": ("prime_node.cli_owner:stake_app", "The owner's stake."),
        "rewards": ("prime_node.cli_owner:rewards_app", "What the node earned."),
        "node": ("prime_node.cli_nodes:node_app", "The owner's nodes."),
        "work": ("prime_node.cli_owner:work_app", "Files handed in: are they on chain?"),
        "audit": ("prime_node.cli_audit:audit_app", "Check what others were slashed or paid for."),
    },
)


@app.command()
@configured
def join(
    settings: Settings,
    runtime: Annotated[
        str | None,
        typer.Option(help="docker, or process (development: ISOLATES NOTHING)."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the worker.")] = None,
    generation_batch: Annotated[
        int | None, typer.Option(help="Rows generated at once; 0 lets the engine choose.")
    ] = None,
    lease_slots: Annotated[
        int | None,
        typer.Option(help="Most leases open at once; 0: as many as the orchestrator allows."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(help='Cards of this node: all, none, or their numbers such as "0,1".'),
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Cards that share one copy of the model; 0 chooses.")
    ] = None,
    memory_share: Annotated[
        float | None, typer.Option(help="Share of each card's memory for the engine; 0 chooses.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Longest row in tokens; 0: what the cards hold.")
    ] = None,
    shm_mb: Annotated[
        int | None, typer.Option(help="Shared memory (MiB) of the task's container; 0 chooses.")
    ] = None,
    min_price: Annotated[
        str | None,
        typer.Option(
            help='Least pay of a token, such as "0.0000004 PRIME" (a number alone is wei); runs '
            "that pay less are declined."
        ),
    ] = None,
    max_unpaid: Annotated[
        str | None,
        typer.Option(help="In PRIME, such as 50: no new lease while the pool owes the node more."),
    ] = None,
    images: Annotated[
        list[str] | None, typer.Option("--image", help="Image that may run; repeat for more.")
    ] = None,
    base_model: BaseModel = None,
    provider_wallet: Annotated[
        Path | None, typer.Option(help="Owner's keystore, if its key is on this machine.")
    ] = None,
    provider_password_file: Annotated[
        Path | None,
        typer.Option(help="File with the owner's password, if it differs from the node's."),
    ] = None,
    throttle: Annotated[
        float | None,
        typer.Option(
            help="DEVELOPMENT ONLY: makes this machine behave like one N times slower, in the "
            "hardware challenge and in generation. It earns less. Never use it on a real network."
        ),
    ] = None,
    shadow: Annotated[
        bool | None,
        typer.Option(
            "--shadow",
            help="Work without a seat: no stake, no pay; the verdicts on its files are real.",
        ),
    ] = None,
    first_answer_seconds: FirstAnswer = None,
    allow_private: AllowPrivate = None,
    worker_command: Annotated[str | None, typer.Option(hidden=True)] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Join the pool and work until SIGTERM or Ctrl-C."""
    from prime_node.agent import Agent
    from prime_node.fingerprint import use_gpus
    from prime_node.wallet import open_provider, open_wallet

    _logging(verbose)
    tracing.start("prime-node")
    settings.need_orchestrator()
    use_gpus(settings.gpus)
    if not settings.shadow:
        settings.need_rpc()  # stake and seat are known from the chain only
    signer = open_wallet(settings)
    set_process_fields(node=signer.address)
    agent = Agent(settings, signer, open_provider(settings, signer))
    agent.install_signals()
    raise typer.Exit(agent.run())


@app.command()
def plan(
    model: Annotated[Path, typer.Option(help="Model folder, or its config.json.")],
    gpus: Annotated[
        list[str] | None,
        typer.Option(help="Cards, such as 4x24GB; repeat for more sets. Default: this machine's."),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=0, help="Cards of one engine; 0 chooses.")
    ] = 0,
    length: Annotated[
        int,
        typer.Option(min=0, help="Longest row in tokens; 0: the model's, at most 32,768."),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Report whether a model fits on cards, and with which settings. It also says whether a
    validator can replay its files there. In bf16; needs no card.

    Exit status 64 if it fits on none of them.
    """
    from prime_engine.sizing import as_fields, plan_cards, plan_replay, read_shape, replay_sentence

    shape = read_shape(model)
    found, fitting = [], 0
    for cards, size in _sets(gpus or []):
        replay = plan_replay(shape, cards, size, length=length)
        more: dict[str, Any] = {"replay": asdict(replay)}
        try:
            planned = plan_cards(shape, cards, size, tensor_parallel=tensor_parallel, length=length)
        except UserError as error:
            known = {"cards": cards, "card_bytes": size, "fits": False, "why": str(error)}
            found.append(known | more)
            if not as_json:
                typer.echo(str(error))
        else:
            fitting += 1
            found.append(asdict(planned) | {"fits": True} | more)
            if not as_json:
                print_fields(str(model), as_fields(planned))
        if not as_json:
            typer.echo(replay_sentence(replay))
    if as_json:
        print_json(found)
    if not fitting:
        raise typer.Exit(UserError.exit_code)


@app.command()
@configured
def doctor(
    settings: Settings,
    runtime: Annotated[str | None, typer.Option(help="docker or process.")] = None,
    gpus: Annotated[
        str | None, typer.Option(help='Cards of this node: all, none, or numbers such as "0,1".')
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine. Every failure names its fix."""
    from prime_core.doctor import show
    from prime_node.doctor import examine

    if not show(examine(settings), as_json=as_json):
        raise typer.Exit(UnavailableError.exit_code)


@app.command()
@configured
def verify(
    settings: Settings,
    file: Annotated[Path, typer.Argument(help="A rollout file (Parquet).")],
    lease: Annotated[
        Path | None, typer.Option(help="Its signed lease (JSON); by default it is looked up.")
    ] = None,
    every_row: Annotated[
        bool, typer.Option("--every-row", help="Replay all rows, not only the run's share.")
    ] = False,
    device: ReplayDevice = "cpu",
    dtype: ReplayDtype = "float32",
    as_json: Json = False,
) -> None:
    """Judge a rollout file as a validator would. Sends nothing."""
    from prime_node.preflight import verify as preflight

    found = preflight(
        settings, file, lease_file=lease, every_row=every_row, device=device, dtype=dtype
    )
    if as_json:
        print_json(found.as_json())
    else:
        finding = found.finding
        typer.echo(f"{finding.outcome.name.lower()}: {finding.reason.name}: {finding.detail}")
        typer.echo(f"  made with {found.setup}; {len(finding.rows_drawn)} rows replayed")
        limits = finding.decimal_thresholds()
        for name, value in finding.decimal_statistics().items():
            limit = limits.get(f"file.{name}")
            typer.echo(f"  {name}: {value}" + (f" of at most {limit}" if limit else ""))
    if not found.ok:
        raise typer.Exit(UntrustedError.exit_code)


@app.command()
@configured
def status(
    settings: Settings,
    chain: Annotated[
        bool, typer.Option("--chain", help="Also read owner, stake and seat from the chain.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what the agent does and what the pool counts of its node."""
    from prime_chain.amounts import prime
    from prime_node.overview import fetch_sentence, overview

    found: dict[str, Any] = overview(settings, chain=chain)
    if as_json:
        print_json(found)
        return
    if found.get("unpaid") is not None:
        found["unpaid"] = prime(int(found["unpaid"]))
    shown = [
        (
            name.replace("_", " ").replace("heard at", "last heard at"),
            utc(value) if name.endswith("_at") and value else value,
        )
        for name, value in found.items()
        if name not in ("files", "not_accepted", "last_fetch")
    ]
    if "last_fetch" in found:
        shown += [("last fetch", fetch_sentence(found["last_fetch"]))]
    files = found.get("files") or {}
    shown += [("files", ", ".join(f"{n} {state}" for state, n in sorted(files.items())) or "none")]
    shown += [("not accepted", sentence) for sentence in found.get("not_accepted", ())]
    print_fields("prime-node", shown)


@app.command()
@configured
def leave(
    settings: Settings, node: NodeFlag = None, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Stop the agent and take the node out of the pool. Ends its sessions.

    The agent first gives its open leases back and delivers what is finished.
    With an owner's wallet it takes all nodes of the owner out, or the one of --node.
    The node leaves on chain even if the orchestrator does not answer. Then the command fails; type
    it again to end the sessions too.
    """
    from prime_core import ids
    from prime_node.cli_owner import open_link
    from prime_node.leave import leave_pool

    link = open_link(settings)
    try:
        named = ids.address(node) if node else None
        found = leave_pool(
            settings, link, named, dry_run=dry_run, tell=partial(typer.echo, err=True)
        )
        if as_json:
            print_json(found.sent)
        else:
            for act in found.sent:
                for name, value in act.items():
                    typer.echo(f"{name:>5}  {value}")
        if not (as_json or dry_run):
            typer.echo(stake_out(settings))
            back = link.client.agreed_block("latest").time + link.deployment.periods.unbonding
            typer.echo(f"unbonded now, it may be withdrawn from {utc(back)}")
    finally:
        link.close()
    if (why := found.unrevoked) is not None:
        raise UserError(
            f"the node has left the pool on chain, but its sessions were not ended: {why}",
            hint="to end them, type this again with an --orchestrator that answers, or: prime-node "
            "node revoke",
            exit_code=why.exit_code,
        )


@app.command()
@configured
def faucet(settings: Settings, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Take test tokens (test networks only). With --deployment it needs no pool."""
    from prime_node.cli_owner import of_no_pool, send_calls

    send_calls(
        of_no_pool(settings),
        lambda context: [context.link.contracts.token.faucet()],
        dry_run=dry_run,
        as_json=as_json,
    )


def _sets(texts: list[str]) -> list[tuple[int, int]]:
    """Returns (cards, bytes a card) of each set; without any, this machine's cards, each counted
    with the memory of the smallest. Raises UserError if there are none."""
    from prime_engine.sizing import card_set
    from prime_node.fingerprint import MIB, read_gpus

    if texts:
        return [card_set(text) for text in texts]
    own = read_gpus()
    if not own:
        raise UserError("this machine shows no GPU", hint="name cards: --gpus 4x24GB")
    return [(len(own), min(card.memory_mb for card in own) * MIB)]


def stake_out(settings: Settings) -> str:
    """What the owner types to have the stake back, once the node has left."""
    from prime_node.wallet import named_provider, wallet_address

    command = "prime-node stake unbond AMOUNT"
    if named_provider(settings) in (None, wallet_address(settings)):
        return f"left; to take the stake out: {command}"
    where = settings.provider_wallet or "OWNER_KEYSTORE"
    return f"left; to take the stake out, at the owner's machine: {command} --wallet {where}"


app.command("payout")(payout)
app.command("dispute")(dispute)
app.command("appeal")(appeal)


def _logging(verbose: bool) -> None:
    log_to_stderr(logging.DEBUG if verbose else logging.INFO)


def main() -> None:
    """Entry point."""
    run(app, "prime-node")


if __name__ == "__main__":
    main()
