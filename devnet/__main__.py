"""`python -m devnet up|check|lies|kinds|soak|stop`: the whole network on this machine."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from devnet.kinds import LIES
from devnet.liars import known
from devnet.plan import PERIODS, Plan, node_plans
from devnet.processes import stop_recorded
from prime_core.command_line import Json
from prime_core.deployment import Periods
from prime_core.errors import FatalError, PrimeError, UnavailableError, UserError
from prime_core.folders import make_folder
from prime_core.messages import NodeInfo, Status
from prime_core.printing import printable

ROOT = Path("var/devnet")
MARK = ".devnet-run"
"""The file by which a folder is known to be a run's, and may be emptied."""
QUICK_PERIODS = Periods(
    epoch_length=8, validity=40, slash_window=6, dispute_window=6, reward_delay=4, unbonding=80
)
"""For tests of the whole walk. A busy machine proposes slashes 30 s after the file came."""

SOAKS = {
    "demo-runs": (
        "nine whole demos from a clean checkout (an hour; --only rest|busy|one-core)",
        ("bench", "demo", "--json"),
    ),
    "fuzz": (
        "every parser of bytes from outside, and the API by its OpenAPI document (30 minutes)",
        (
            *("pytest", "-q", "--fuzz-seconds", "900", "--timeout", "1200", "tests/fuzz"),
            "tests/orchestrator/test_openapi.py::test_every_operation_answers_as_its_document_says",
        ),
    ),
    "by-hand": (
        "the pool that README.md builds by hand, 20 training steps: does it learn (10 minutes)",
        ("pytest", "-q", "-s", "tests/e2e/test_docs.py::test_the_pool_of_the_readme_learns"),
    ),
    "base": (
        "a quickstart pool on a chain like Base Sepolia: train, claim, ten requests a second (10 "
        "minutes)",
        (
            *("pytest", "-q", "-s"),
            "tests/e2e/test_quickstart.py::test_a_node_works_and_is_paid_on_a_chain_like_base_sepolia",
        ),
    ),
    "faults": (
        "a pool of 200 nodes under crashes, partitions, full disks, stepped clocks … (25 minutes)",
        ("bench", "faults", "--json"),
    ),
    "money-faults": (
        "an hour's work of one pool behind RPC endpoints that fail in every way (10 minutes)",
        (
            *("pytest", "-q", "--faults-seconds=600", "--timeout=1500"),
            "tests/money/test_money_behind_faults.py",
        ),
    ),
    "rpc-faults": (
        "the whole network behind RPC endpoints that fail in every way (10 minutes of faults)",
        (
            *("devnet", "up", "--plain", "--quick", "--steps", "3", "--nodes", "3", "--liars", "1"),
            *("--rpc-faults", "600", "--root", "var/rpc-faults"),
        ),
    ),
    "foreign-events": (
        "the same with 1,000,000 events of a stranger, and heartbeats timed (10 minutes)",
        (
            *("devnet", "up", "--plain", "--quick", "--steps", "3", "--nodes", "3", "--liars", "1"),
            *("--rpc-faults", "370", "--foreign-events", "1000000"),
            *("--root", "var/foreign-events"),
        ),
    ),
    "strangers": (
        "1,000,000 events of strangers, and other attacks on the chain layer",
        ("bench", "attacks", "--json"),
    ),
    "tests": (
        "the tests that are too long for make test-all (45 minutes)",
        ("pytest", "-rfEs", "-m", "soak", "--durations=0"),
    ),
    "lies": ("every lie on whole networks, and what came of it", ("devnet", "lies", "--json")),
}
"""Name → (what it is, the module and words that run it)."""

app = typer.Typer(
    help="The whole network on one machine.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip
Root = Annotated[Path, typer.Option("--root", help="Folder of the run; emptied by `up`.")]


@app.command()
def up(
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train just this many steps (default: until learned).")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes in all.")] = 5,
    liars: Annotated[
        int | None, typer.Option(min=0, help="How many of them lie (default: 2, or each --liar).")
    ] = None,
    liar: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="How one of them lies; repeat for more. See `kinds`."),
    ] = None,
    shadows: Annotated[
        int, typer.Option(min=0, help="Nodes without a seat, in addition to the others.")
    ] = 0,
    planted: Annotated[
        int, typer.Option(min=0, help="Nodes of the manager's own, honest and lying by turns.")
    ] = 0,
    validators: Annotated[
        int, typer.Option(min=1, help="How many judge; from two on, two must reject a file.")
    ] = 3,
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes a free one.")] = 0,
    runtime: Annotated[str, typer.Option(help="process (isolates nothing) or docker.")] = "process",
    image: Annotated[str, typer.Option(help="Worker image by digest, for docker.")] = "",
    rpc_faults: Annotated[
        float,
        typer.Option(min=0, help="Seconds for which RPC endpoints fail, one of three at a time."),
    ] = 0.0,
    foreign_events: Annotated[
        int, typer.Option(min=0, help="Events of a stranger that the contracts emit meanwhile.")
    ] = 0,
    quick: Annotated[bool, typer.Option(help="Short periods and small batches.")] = False,
    root: Root = ROOT,
    plain: Annotated[bool, typer.Option(help="Lines instead of the live table.")] = False,
) -> None:
    """Run the network until it has learned, check it, write the report, end everything."""
    kinds = tuple(known(kind) for kind in liar or ())
    lying = liars if liars is not None else len(kinds) or 2
    if lying >= nodes:
        raise UserError(
            f"{lying} liars among {nodes} nodes leave no honest node",
            hint="lower --liars, or raise --nodes",
        )
    if runtime not in ("process", "docker"):
        raise UserError(f"there is no runtime {runtime!r}", hint="process or docker")
    if runtime == "docker" and not image:
        raise UserError(
            "--runtime docker needs the worker's image",
            hint="--image $(.venv/bin/python deploy/build_image.py worker)",
        )
    chosen: Literal["process", "docker"] = "docker" if runtime == "docker" else "process"
    plan = Plan(
        root=root,
        steps=steps or 80,
        fixed_steps=steps is not None,
        nodes=node_plans(nodes, lying, kinds, shadows, planted),
        validators=validators,
        periods=QUICK_PERIODS if quick else PERIODS,
        port=port,
        runtime=chosen,
        image=image,
        rpc_faults=rpc_faults,
        foreign_events=foreign_events,
    )
    if quick:
        plan = plan.quick()
    stop_recorded(root / "pids.json")
    _empty(root)
    sys.exit(_run(plan, plain or not sys.stdout.isatty()))


@app.command()
def check(
    root: Root = ROOT,
    json_output: Json = False,
) -> None:
    """Derive the six findings of a run from outside; exit code 0 only if all hold."""
    from devnet.network import Network
    from devnet.observe import check as derive
    from devnet.observe import print_findings

    if (root / "pids.json").exists():
        raise UserError(f"the network of {root} still runs", hint="python -m devnet stop")
    network = Network.recorded(root)
    try:
        network.revive()
        findings, _ = derive(network)
    finally:
        network.stop()
    print_findings(findings, json_output)
    sys.exit(0 if all(finding.ok for finding in findings) else 1)


@app.command()
def kinds(
    json_output: Json = False,
) -> None:
    """How a node can lie (`up --liar KIND`), and what should come of it."""
    if json_output:
        print(json.dumps({name: lie.ends for name, lie in LIES.items()}))
        return
    for name, lie in LIES.items():
        print(f"{name:<18} {lie.ends}")


@app.command()
def lies(
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="Play it, even if it was played before; repeat for more. See `kinds`.",
        ),
    ] = None,
    together: Annotated[int, typer.Option(min=1, help="Liars in one network, at most.")] = 8,
    out: Annotated[
        Path, typer.Option(help="The record; kinds that it has of these sources are left out.")
    ] = Path("var/lies.json"),
    json_output: Json = False,
    root: Root = Path("var/lies"),
) -> None:
    """Play every lie on whole networks, audit what came; exit code 0 only if all end as listed."""
    from devnet.lies import newest
    from devnet.play import load, play_all, table

    asked = tuple(known(one) for one in kind or ())
    chosen = asked or tuple(one for one in LIES if one not in newest(load(out)["networks"]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)

    def empty() -> None:
        stop_recorded(root / "pids.json")
        _empty(root)

    found = play_all(
        chosen, out, root, together, empty, partial(print, file=sys.stderr, flush=True)
    )
    print(json.dumps(found) if json_output else table(found["networks"]))
    sys.exit(0 if found["ok"] else 1)


@app.command()
def faults(
    nodes: Annotated[int, typer.Option(min=1, help="Simulated nodes.")] = 200,
    seconds: Annotated[
        float, typer.Option(min=10, help="How long faults follow each other.")
    ] = 480,
    quiet: Annotated[float, typer.Option(min=10, help="Fault-free seconds at both ends.")] = 90,
    count: Annotated[int, typer.Option(min=1, help="Faults in that time.")] = 20,
    lasts: Annotated[float, typer.Option(min=1, help="Seconds of one fault.")] = 8,
    seed: Annotated[int, typer.Option(help="Chooses their order and targets.")] = 20,
    throttle: Annotated[float, typer.Option(min=1, help="Makes nodes that many times slower.")] = 8,
    rest: Annotated[
        float, typer.Option(min=0, help="Seconds that nodes rest between leases.")
    ] = 600,
    least_kept: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the throughput that must be left.")
    ] = 0.9,
    json_output: Json = False,
    root: Root = Path("var/faults"),
) -> None:
    """Run a pool under faults of every kind, and count what was lost; exit code 0 only if nothing
    was, and enough of the throughput is left."""
    from dataclasses import asdict

    from devnet.faults import Sizes, play

    sizes = Sizes(
        nodes, quiet, seconds, lasts, count, seed, throttle, rest, groups=max(64, nodes),
        least_kept=least_kept,
    )  # fmt: skip
    started = time.monotonic()

    def note(words: str) -> None:
        said = f"[{time.monotonic() - started:6.1f} s] {words}"
        print(said, file=sys.stderr if json_output else sys.stdout, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    stop_recorded(root / "pids.json")
    _empty(root)
    report = play(root, sizes, note)
    print(json.dumps(asdict(report)) if json_output else report.summary())
    sys.exit(0 if report.ok else 1)


@app.command(context_settings={"ignore_unknown_options": True})
def soak(
    part: Annotated[
        str | None, typer.Argument(help="Which one; without it they are listed.")
    ] = None,
    words: Annotated[list[str] | None, typer.Argument(help="Handed on to it.")] = None,
) -> None:
    """Run one of the long runs; exit code 0 only if every figure is within its bar."""
    if part is None:
        for name, (what, _) in SOAKS.items():
            print(f"{name:<14} {what}")
        return
    if part not in SOAKS:
        raise UserError(f"there is no long run {part!r}", hint=f"one of {', '.join(SOAKS)}")
    command = [sys.executable, "-m", *SOAKS[part][1], *(words or ())]
    sys.exit(subprocess.run(command, check=False).returncode)


@app.command()
def stop(root: Root = ROOT) -> None:
    """End a network that was left running."""
    ended = stop_recorded(root / "pids.json")
    print(f"ended {', '.join(ended)}" if ended else "nothing was left running")


# ── the demo's table ──────────────────────────────────────────────────────────────────────────────

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
    """Returns the table of the demo, from the orchestrator's public status: `names` maps addresses
    to the demo's node names (which only the demo knows: the orchestrator does not know who lies);
    `seconds` since the start."""
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


# ── running the demo ──────────────────────────────────────────────────────────────────────────────


def _run(plan: Plan, plain: bool) -> int:
    from devnet.network import Network
    from devnet.observe import check as derive
    from devnet.observe import print_findings
    from devnet.report import write_report
    from devnet.walk import Walk

    console = Console()
    network = Network(plan)
    started = time.monotonic()
    phase = "starting"
    live = None if plain else Live(console=console, refresh_per_second=2, screen=False)

    def note(words: str) -> None:
        nonlocal phase
        phase = words
        if plain:
            print(f"[{time.monotonic() - started:6.1f} s] {words}", flush=True)
        tick()

    def tick() -> None:
        if live is None:
            return
        try:
            status = network.status()
        except (UnavailableError, OSError, PrimeError):
            live.update(f"{phase} …")
            return
        page = network.url
        live.update(
            picture(
                status, network.names(), walk.evaluations, page, phase, time.monotonic() - started
            )
        )

    walk = Walk(network, note, tick)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started us ignoring SIGINT
        signal.signal(number, _interrupt)
    if plan.runtime == "process":
        console.print(
            "[bold yellow]--runtime process isolates nothing:[/] workers run as plain children of "
            "this user. Real nodes run tasks in containers."
        )
    try:
        if live is not None:
            live.start()
        walk.start()
        walk.learn()
        walk.bear_foreign_events()
        walk.outlast_faults()
        walk.wait_for_slashes()
        walk.settle()
        note("checking from outside")
        findings, seen = derive(network)
        write_report(network, walk.evaluations, seen, findings, time.monotonic() - started)
    finally:
        if live is not None:
            live.stop()
        network.stop()
    print_findings(findings, False)
    print(f"report: {plan.root / 'report.html'}")
    return 0 if all(finding.ok for finding in findings) and walk.heartbeats_ok else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _empty(root: Path) -> None:
    """A run starts clean. Empties only a folder that an earlier run marked as its own."""
    make_folder(root)
    if any(root.iterdir()) and not (root / MARK).exists():
        raise UserError(f"{root} holds what is not a run's", hint="name an empty folder by --root")
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    (root / MARK).touch()


def main() -> None:
    """Entry point: expected errors become one sentence and an exit code."""
    try:
        app(prog_name="devnet")
    except KeyboardInterrupt:
        print("\nended; every process is stopped", file=sys.stderr)
        sys.exit(130)
    except PrimeError as error:
        hint = f" — {error.hint}" if isinstance(error, UserError) and error.hint else ""
        kind = "the demo failed: " if isinstance(error, FatalError | UnavailableError) else ""
        print(printable(f"devnet: {kind}{error}{hint}", keep="\n"), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
