"""`orchestrator env`: environments that anyone contributes, from an empty folder to a run.

    new → (the author writes) → check → submit → list → show → approve | refuse

A contribution's code runs in the sandbox only. Contributions wait for the operator as files in a
folder, since they come before there is a pool and are few:

    bundles/<digest>.jsonl    the packed environment, named by its SHA-256
    records/<digest>.json     who made it, what the check found, and what the operator decided

A record is replaced in one step, so a killed command leaves the old or the new one. A bundle
without a record (a command was killed between the two) is submitted again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field, ValidationError

from prime_core.command_line import Json, group
from prime_core.errors import ConflictError, FatalError, NotFoundError, PolicyError, UserError
from prime_core.given import read_given
from prime_core.ids import Digest
from prime_core.signing import DigestField, Strict
from prime_envs.crowd_check import Report, check
from prime_envs.environments.crowd import open_packed, pack, write_template
from prime_envs.graders.harbor import check_packages
from prime_envs.harbor import packed, rows
from prime_envs.sources import checked

app = group("Contribute, check and review environments (docs/environments.md).")

Source = Annotated[Path, typer.Argument(help="Folder of an environment, or a packed one (.jsonl).")]
QueueFolder = Annotated[Path, typer.Option("--queue", help="Folder of the review queue.")]
Which = Annotated[str, typer.Argument(help="Digest, or how it begins.")]
Reviewer = Annotated[str, typer.Option("--by", help="Who decides.")]
_QUEUE = Path("var/orchestrator/environments")
MAX_WAITING = 1000

Status = Literal["waiting", "approved", "refused"]


class Record(Strict):
    """One contribution. Times in Unix seconds; `file` is the digest that a run pins as `sha256`."""

    file: DigestField
    name: str
    version: int
    description: str
    author: str
    license: str
    tasks: int = Field(ge=1)
    has_code: bool
    status: Status = "waiting"
    submitted: int
    decided: int = 0
    reviewer: str = ""
    note: str = ""


class Queue:
    """The queue in `folder`, made when something is put into it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bundles = folder / "bundles"
        self._records = folder / "records"

    def bundle(self, file: str) -> Path:
        """Where the packed environment lies."""
        return self._bundles / f"{file[2:]}.jsonl"

    def submit(self, packed: bytes, record: Record) -> Record:
        """Puts a packed environment in. Raises ConflictError if it was submitted before (it says
        what became of it), PolicyError if too many wait."""
        if self._path(record.file).exists():
            known = self.get(record.file)
            raise ConflictError(
                f"{known.name} {known.file[:12]}… was submitted and is {known.status}"
            )
        if sum(known.status == "waiting" for known in self.records()) >= MAX_WAITING:
            raise PolicyError(f"{MAX_WAITING} environments wait already; review some first")
        for folder in (self._bundles, self._records):
            folder.mkdir(parents=True, exist_ok=True)
        if "0x" + hashlib.sha256(packed).hexdigest() != record.file:
            raise FatalError("a record names other bytes than those submitted")
        _replace(self.bundle(record.file), packed)
        self._write(record)
        return record

    def records(self) -> list[Record]:
        """All contributions, oldest first."""
        found = [self._read(path) for path in self._records.glob("*.json")]
        return sorted(found, key=lambda record: (record.submitted, record.file))

    def get(self, start: str) -> Record:
        """The one whose digest begins with `start` (0x may be left out). Raises NotFoundError, or
        UserError if several do."""
        wanted = start.lower().removeprefix("0x")
        found = [record for record in self.records() if record.file[2:].startswith(wanted)]
        if not found:
            raise NotFoundError(
                f"no environment whose digest begins with {start!r} is in the queue "
                f"{self._folder}; name another by --queue"
            )
        if len(found) > 1:
            raise UserError(
                f"{len(found)} environments have digests that begin with {start!r}",
                hint="give more of it",
            )
        return found[0]

    def decide(
        self, start: str, status: Literal["approved", "refused"], *, by: str, note: str, now: int
    ) -> Record:
        """The operator's word on a waiting one. Raises ConflictError if it was decided before."""
        record = self.get(start)
        if record.status != "waiting":
            raise ConflictError(f"{record.name} was {record.status} by {record.reviewer} before")
        decided = record.model_copy(
            update={"status": status, "reviewer": by, "note": note, "decided": now}
        )
        self._write(decided)
        return decided

    def _path(self, file: Digest | str) -> Path:
        return self._records / f"{file[2:]}.json"

    def _write(self, record: Record) -> None:
        _replace(self._path(record.file), record.model_dump_json(indent=1).encode())

    def _read(self, path: Path) -> Record:
        try:
            return Record.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise FatalError(f"{path} is not a record of this queue: {error}") from error


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@app.command()
def new(folder: Annotated[Path, typer.Argument(help="Folder to make; its name names it.")]) -> None:
    """Write a small environment that passes every check, to start from."""
    name = folder.name
    if not re.fullmatch("[a-z][a-z0-9-]{1,62}", name):
        raise UserError(
            f"{name!r} is not a name for an environment",
            hint="use lowercase letters, digits and dashes",
        )
    for path in write_template(folder, name):
        typer.echo(f"wrote {path}")
    typer.echo(f"now: edit them, then `orchestrator env check {folder}`")


@app.command(name="check")
def check_command(source: Source, json_output: Json = False) -> None:
    """Grade gold answers, wrong answers and known tricks, twice each."""
    with tempfile.TemporaryDirectory(prefix="prime-env-") as scratch:
        path, _data = _packed(source, Path(scratch))
        report = check(path)
    _show_report(report, source, json_output)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def harbor(
    source: Annotated[Path, typer.Argument(help="Folder or .tar.gz archive of Harbor tasks.")],
    out: Annotated[Path, typer.Option("--out", help="The dataset to write (.jsonl).")],
    json_output: Json = False,
) -> None:
    """Turn Harbor task packages into a dataset. Their solutions are graded first."""
    if out.suffix != ".jsonl":
        raise UserError(f"{out} is not a name for a dataset", hint="end it with .jsonl")
    made = rows(source)
    check_packages(made)
    data = packed(made)
    try:
        _replace(out, data)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from error
    sha256 = "0x" + hashlib.sha256(data).hexdigest()
    if json_output:
        typer.echo(json.dumps({"tasks": len(made), "sha256": sha256, "path": str(out)}))
        return
    typer.echo(f'{len(made)} tasks: name = "tasks", arguments = {{ sha256 = "{sha256}", … }}')


@app.command()
def submit(source: Source, queue: QueueFolder = _QUEUE, json_output: Json = False) -> None:
    """Check and pack an environment, and put it into the review queue."""
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
    waiting: Annotated[
        bool, typer.Option("--waiting", help="Only those that are not decided yet.")
    ] = False,
    json_output: Json = False,
) -> None:
    """List what was submitted, oldest first."""
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
def show(which: Which, queue: QueueFolder = _QUEUE, json_output: Json = False) -> None:
    """Show a contribution, and how a run names it."""
    _show(Queue(queue).get(which), queue, json_output)


@app.command()
def approve(
    which: Which,
    by: Reviewer,
    queue: QueueFolder = _QUEUE,
    note: Annotated[str, typer.Option(help="A sentence for the record.")] = "",
    json_output: Json = False,
) -> None:
    """Approve an environment for runs, after checking it once more."""
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
    json_output: Json = False,
) -> None:
    """Refuse an environment, with a reason."""
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
    decided = f" by {record.reviewer}" if record.reviewer else ""
    decided += f": {record.note}" if record.note else ""
    typer.echo(f"  {record.status}{decided}")
    if record.status == "approved":
        typer.echo("  a run names it so (publish the file, give its address as `url`):")
        typer.echo('  [environment]\n  name = "crowd"')
        typer.echo(f'  arguments = {{ sha256 = "{record.file}", url = "https://…" }}')
    typer.echo(f"  {path}")
