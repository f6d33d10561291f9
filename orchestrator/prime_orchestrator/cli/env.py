"""`orchestrator env`: environments that anybody contributes, from an empty folder to a run.

    new → (the author writes) → check → submit → list → show → approve | refuse

Whatever a contribution brings of code runs in the sandbox only.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from prime_core.command_line import group
from prime_core.errors import PolicyError, UserError
from prime_core.given import read_given
from prime_core.ids import Digest
from prime_envs.crowd import open_packed, pack
from prime_envs.crowd_check import Report, check
from prime_envs.crowd_template import write_template
from prime_envs.sources import checked
from prime_orchestrator.cli.env_queue import Queue, Record

app = group("Contribute, check and review environments (docs/environments.md).")

Source = Annotated[Path, typer.Argument(help="Folder of an environment, or a packed one (.jsonl).")]
QueueFolder = Annotated[Path, typer.Option("--queue", help="Folder of the review queue.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Which = Annotated[str, typer.Argument(help="Digest, or how it begins.")]
Reviewer = Annotated[str, typer.Option("--by", help="Who decides.")]
_QUEUE = Path("var/orchestrator/environments")


@app.command()
def new(folder: Annotated[Path, typer.Argument(help="Folder to make; its name names it.")]) -> None:
    """Write a small environment that passes every check, to start from."""
    name = folder.name
    if not re.fullmatch("[a-z][a-z0-9-]{1,62}", name):
        raise UserError(
            f"{name!r} is no name for an environment", hint="small letters, digits and dashes"
        )
    for path in write_template(folder, name):
        typer.echo(f"wrote {path}")
    typer.echo(f"now: edit them, then `orchestrator env check {folder}`")


@app.command(name="check")
def check_command(source: Source, json_output: AsJson = False) -> None:
    """Grade its gold answers, its wrong ones and every known trick, twice each."""
    with tempfile.TemporaryDirectory(prefix="prime-env-") as scratch:
        path, _data = _packed(source, Path(scratch))
        report = check(path)
    _show_report(report, source, json_output)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def submit(source: Source, queue: QueueFolder = _QUEUE, json_output: AsJson = False) -> None:
    """Check it, pack it into one file, and put it into the review queue."""
    with tempfile.TemporaryDirectory(prefix="prime-env-") as scratch:
        path, data = _packed(source, Path(scratch))
        report = check(path)
        if not report.ok:
            _show_report(report, source, json_output)
            raise PolicyError(f"{source} is not fit to be trained on: see its findings above")
        environment = open_packed(path)
        try:
            header = environment.header
        finally:
            environment.close()
    record = Record(
        file=Digest("0x" + hashlib.sha256(data).hexdigest()),
        name=header.name,
        version=header.version,
        description=header.description,
        author=header.author,
        license=header.license,
        tasks=report.tasks,
        has_code=bool(header.grader),
        submitted=int(time.time()),
    )
    _show(Queue(queue).submit(data, record), queue, json_output)


@app.command(name="list")
def list_command(
    queue: QueueFolder = _QUEUE,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only undecided ones.")] = False,
    json_output: AsJson = False,
) -> None:
    """What was submitted, oldest first."""
    records = [r for r in Queue(queue).records() if not waiting or r.status == "waiting"]
    if json_output:
        typer.echo(json.dumps({"environments": [r.model_dump(mode="json") for r in records]}))
        return
    for record in records:
        typer.echo(
            f"{record.file[2:14]}  {record.status:8}  {record.name} v{record.version}  "
            f"{record.tasks} tasks{', own grader' if record.has_code else ''}, {record.author}"
        )
    if not records:
        typer.echo(f"nothing {'waits' if waiting else 'was submitted'} in {queue}")


@app.command()
def show(which: Which, queue: QueueFolder = _QUEUE, json_output: AsJson = False) -> None:
    """One contribution, and how a run names it."""
    _show(Queue(queue).get(which), queue, json_output)


@app.command()
def approve(
    which: Which,
    by: Reviewer,
    queue: QueueFolder = _QUEUE,
    note: Annotated[str, typer.Option(help="A sentence for the record.")] = "",
    json_output: AsJson = False,
) -> None:
    """Check it once more here, and let runs be made of it."""
    record = Queue(queue).get(which)
    report = check(checked(Queue(queue).bundle(record.file), record.file))
    if not report.ok:
        _show_report(report, Path(record.name), json_output)
        raise PolicyError(f"{record.name} is not fit to be trained on: see its findings above")
    _decide(queue, which, "approved", by, note, json_output)


@app.command()
def refuse(
    which: Which,
    by: Reviewer,
    note: Annotated[str, typer.Option(help="Why: the author reads it.")],
    queue: QueueFolder = _QUEUE,
    json_output: AsJson = False,
) -> None:
    """Say no, and why."""
    _decide(queue, which, "refused", by, note, json_output)


def _decide(
    queue: Path, which: str, status: Literal["approved", "refused"], by: str, note: str, plain: bool
) -> None:
    record = Queue(queue).decide(which, status, by=by, note=note, now=int(time.time()))
    _show(record, queue, plain)


def _packed(source: Path, scratch: Path) -> tuple[Path, bytes]:
    """The environment as one file, with its bytes."""
    if source.is_dir():
        data = pack(source)
        path = scratch / f"{source.resolve().name}.jsonl"
        path.write_bytes(data)
        return path, data
    hint = "name an environment's folder; make one with: orchestrator env new FOLDER"
    return source, read_given(source, "packed environment", hint)


def _show_report(report: Report, source: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "ok": report.ok,
                    "digest": report.digest,
                    "tasks": report.tasks,
                    "graded": report.graded,
                    "findings": report.faults,
                }
            )
        )
        return
    for name, faults in report.faults.items():
        typer.echo(f"{'holds ' if not faults else 'FAILS '} {name}")
        for fault in faults:
            typer.echo(f"         {fault}")
    verdict = "fit to be trained on" if report.ok else "not fit"
    typer.echo(f"{source}: {report.tasks} tasks, {report.graded} answers graded twice: {verdict}")


def _show(record: Record, queue: Path, as_json: bool) -> None:
    path = Queue(queue).bundle(record.file).resolve()
    if as_json:
        shown: dict[str, Any] = {**record.model_dump(mode="json"), "bundle": str(path)}
        typer.echo(json.dumps(shown))
        return
    typer.echo(f"{record.name} v{record.version} by {record.author} ({record.license})")
    typer.echo(f"  {record.description}")
    typer.echo(f"  {record.tasks} tasks; {'a grader of its own' if record.has_code else 'no code'}")
    decided = f" by {record.reviewer}: {record.note}" if record.reviewer else ""
    typer.echo(f"  {record.status}{decided}")
    if record.status == "approved":
        typer.echo("  a run names it so (publish the file, give its address as `url`):")
        typer.echo('  [environment]\n  name = "crowd"')
        typer.echo(f'  arguments = {{ sha256 = "{record.file}", url = "https://…" }}')
    typer.echo(f"  {path}")
