"""`orchestrator rollouts list|show|export`: what nodes handed in, read from the store."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_core import ids
from prime_core.command_line import Json, group
from prime_core.errors import MalformedError, UserError
from prime_core.ids import Address
from prime_core.printing import printable
from prime_core.times import utc
from prime_orchestrator.cli.storage import StoreOptions, progress, with_objects

if TYPE_CHECKING:
    from prime_orchestrator.rollouts import FileFacts, Sample
    from prime_orchestrator.store.submissions import Wanted

MOST = 1000
VERDICTS = ("submitted", "accepted", "rejected", "void")
_AGO = re.compile(r"(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

app = group("Rollout files: list, read, export them as a data set.")

Since = Annotated[
    str | None, typer.Option(help="Received since: 30m, 24h, 7d, or a UTC time, 2026-11-23T12:00.")
]
Verdict = Annotated[str | None, typer.Option(help=f"Only {', '.join(VERDICTS)} ones.")]
Node = Annotated[str | None, typer.Option(help="Only those of this node.")]
Model = Annotated[
    Path | None, typer.Option(help="Model folder of the run, whose tokenizer decodes the texts.")
]

Again = Annotated[
    bool,
    typer.Option(
        "--grade",
        help="Grade again by the run's environment, to show what rewards are made of; answers that "
        "are programs run in its sandbox.",
    ),
]


@app.command("list")
@with_objects
def list_files(
    options: StoreOptions,
    last: Annotated[int, typer.Option(min=1, max=MOST, help="Most files to list.")] = 20,
    before: Annotated[
        str | None, typer.Option(help="Those older than this one: the next page.")
    ] = None,
    since: Since = None,
    verdict: Verdict = None,
    node: Node = None,
    json_output: Json = False,
) -> None:
    """List the newest rollout files. With verdict, reward, staleness and why groups were
    dropped."""
    from prime_orchestrator import rollouts
    from prime_orchestrator.store import backup

    wanted = _wanted(since, verdict, node)
    with options.pool() as (settings, store):
        kept = settings.open_objects("", backup.place(store))
        with store.read() as connection:
            older = None if before is None else rollouts.find(connection, before, kept)[0]
            rows, archived = rollouts.newest(connection, kept, wanted, last + 1, before=older)
            found = rollouts.facts(connection, rows[:last], archived)
    following = found[-1].id if len(rows) > last else None
    if json_output:
        typer.echo(json.dumps({"rollouts": [asdict(one) for one in found], "before": following}))
        return
    if not found:
        typer.echo("no rollout file fits")
        return
    typer.echo(
        f"{'file':13}{'received':21}{'node':13}{'step':>6}{'policy':>7}{'old':>4}  "
        f"{'environment':16}{'rows':>5}{'reward':>8}  {'verdict':10}groups"
    )
    for one in found:
        reward = "-" if one.reward is None else f"{one.reward:.3f}"
        typer.echo(
            f"{one.id[:12]} {utc(one.received_at):21}{one.node[:12]} {one.step:>6}{one.policy:>7}"
            f"{one.staleness:>4}  {one.environment[:15]:16}{one.rows:>5}{reward:>8}  "
            f"{one.verdict:10}{_became(one)}"
        )
    if following is not None:
        typer.echo(f"older ones: --before {following[:18]}")


def _became(one: FileFacts) -> str:
    """What became of a file's groups, in a few words."""
    if one.verdict != "accepted":
        return one.reason or "no verdict yet"
    if one.shadow:
        return "shadow: judged only"
    said = Counter(
        f"{found.state} in {found.batch}"
        if found.batch is not None
        else "waiting"
        if found.state == "waiting"
        else found.why.partition(":")[0]
        for found in one.groups
    )
    return ", ".join(f"{count} {what}" for what, count in sorted(said.items()))


@app.command()
@with_objects
def show(
    options: StoreOptions,
    file: Annotated[str, typer.Argument(metavar="ID", help="Id, or its first digits.")],
    row: Annotated[int | None, typer.Option(min=0, help="Only this row.")] = None,
    most: Annotated[int, typer.Option(min=1, max=4096, help="Most rows to show.")] = 8,
    model: Model = None,
    grade: Again = False,
    json_output: Json = False,
) -> None:
    """Show a rollout file: verdict, groups, texts and rewards."""
    from prime_envs.registry import environment_for
    from prime_orchestrator import rollouts
    from prime_orchestrator.store import backup
    from prime_verify.rollout_file import FileError

    _require_model(grade, model)
    with options.pool() as (settings, store):
        kept = settings.open_objects("", backup.place(store))
        with store.read() as connection:
            found, archived = rollouts.find(connection, file, kept)
            (known,) = rollouts.facts(connection, [found], [archived] if archived else [])
            runs = rollouts.runs_of(connection)
            lease = rollouts.lease_of(connection, found, archived)
            tokenizer = None
            if model is not None:
                tokenizer = rollouts.load_tokenizer(connection, model)
        detail = rollouts.accusation(kept, found)
        damage, rows, samples = rollouts.why_gone(kept, archived), 0, []
        if not damage:
            try:
                parsed, judged = rollouts.read_file(kept, found, lease.lease.deadline)
            except FileError as error:
                damage = str(error)
            else:
                rows = len(parsed.rows)
                chosen = range(min(rows, most)) if row is None else [row]
                samples = rollouts.samples(parsed, judged, chosen, tokenizer)
        if grade:
            run = runs.of_lease(lease.lease)
            environment = environment_for(run)
            try:
                graded = rollouts.grades(samples, found, lease, run, environment, tokenizer)
            finally:
                environment.close()
            samples = [
                one if again is None else replace(one, parts=dict(again.parts), reason=again.reason)
                for one, again in zip(samples, graded, strict=True)
            ]
    if json_output:
        parts = {"detail": detail, "damage": damage, "samples": [asdict(one) for one in samples]}
        typer.echo(json.dumps(asdict(known) | parts, ensure_ascii=False))
        return
    typer.echo(_file_text(known, detail, damage))
    for one in samples:
        typer.echo("\n" + _sample_text(one, known.verdict == "accepted"))
    if row is None and rows > len(samples):
        typer.echo(f"\n{rows - len(samples)} more rows: --row N or --most {rows}")
    if tokenizer is None and samples:
        typer.echo("\nTexts need the run's tokenizer: --model FOLDER")


def _require_model(grade: bool, model: Path | None) -> None:
    if grade and model is None:
        raise UserError("--grade needs the run's tokenizer", hint="add --model FOLDER")


def _file_text(one: FileFacts, detail: str, damage: str) -> str:
    lines = [
        f"rollout file {one.id}",
        f"  node {one.node}, received {utc(one.received_at)}, leased for step {one.step}",
        f"  policy {one.policy} ({one.staleness} old), environment {printable(one.environment)}, "
        f"{one.rows} rows" + ("" if one.reward is None else f", mean reward {one.reward:.3f}"),
        f"  {one.verdict}{' (shadow: judged only)' if one.shadow else ''}: {one.why}",
    ]
    if detail:
        lines.append(f"  evidence: {printable(detail)}")
    if damage:
        lines.append(f"  its rows cannot be shown: {printable(damage)}")
    for found in one.groups:
        became = f"{found.state} ({found.why})"
        if found.batch is not None:
            became = f"{found.state} in batch {found.batch} ({found.staleness} old)"
        reward = "no reward" if found.reward is None else f"reward {found.reward:.3f}"
        if found.ungraded and found.reward is not None:
            reward += f" without {found.ungraded} rows that were not graded"
        lines.append(f"  group {found.group}: {reward}, {became}")
    return "\n".join(lines)


def _sample_text(one: Sample, accepted: bool) -> str:
    from prime_envs.samples import reward_text, sample_text, styled

    where = f"row {one.row} (group {one.group}, sample {one.sample}), {printable(one.problem)}: "
    claimed = "" if accepted else ", claimed by the node and not verified"
    reward = one.reward if accepted else one.claimed
    head = where + reward_text(reward, one.parts, one.reason) + claimed
    tokens = len(one.output_tokens)
    if one.prompt is None:
        asked = len(one.prompt_tokens)
        return f"{head}\n{asked} prompt tokens, {tokens} tokens, ended by {one.finish}"
    text = sample_text(one.prompt, one.turns, tokens=tokens, finish=one.finish, style=styled)
    return f"{head}\n{text}"


@app.command()
@with_objects
def export(
    options: StoreOptions,
    out: Annotated[Path, typer.Option(help="Parquet file to write, or a folder for it.")],
    since: Since = None,
    node: Node = None,
    accepted: Annotated[
        bool, typer.Option("--accepted/--all", help="Accepted files, or those of any verdict.")
    ] = True,
    model: Model = None,
    grade: Again = False,
    json_output: Json = False,
) -> None:
    """Export rollouts as one Parquet file. Includes texts if --model is given.
    docs/tutorial.md lists the columns."""
    from prime_orchestrator import rollouts
    from prime_orchestrator.store import backup

    _require_model(grade, model)
    wanted = _wanted(since, "accepted" if accepted else None, node)
    target = out / "rollouts.parquet" if out.is_dir() else out
    with options.pool() as (settings, store):
        kept, tokenizer = settings.open_objects("", backup.place(store)), None
        if model is not None:
            with store.read() as connection:
                tokenizer = rollouts.load_tokenizer(connection, model)
        with progress() as bar:
            task = bar.add_task("files", total=None)
            done = rollouts.export(
                store,
                kept,
                target.absolute(),
                wanted,
                tokenizer=tokenizer,
                grade=grade,
                begins=lambda total: bar.update(task, total=total),
                went=lambda files: bar.advance(task, files),
            )
    if json_output:
        typer.echo(json.dumps({"out": str(target), **asdict(done)}))
        return
    left_out = f"; {done.unreadable} files do not parse" if done.unreadable else ""
    left_out += f"; {done.removed} files were removed (docs/retention.md)" if done.removed else ""
    typer.echo(f"{done.rows} rows of {done.files} files in {target}{left_out}")


def _wanted(since: str | None, verdict: str | None, node: str | None) -> Wanted:
    """The filters. Raises UserError for one that cannot be read."""
    from prime_orchestrator.store.submissions import Wanted

    if verdict is not None and verdict not in VERDICTS:
        raise UserError(f"the verdict {verdict!r} is not one of {', '.join(VERDICTS)}")
    account: Address | None = None
    if node is not None:
        try:
            account = ids.address(node)
        except MalformedError as error:
            raise UserError(str(error), hint="--node takes the whole address") from error
    return Wanted(
        since=None if since is None else _time(since, time.time()),
        status=verdict,  # type: ignore[arg-type]
        node=account,
    )


def _time(text: str, now: float) -> float:
    """Unix seconds of `24h` (ago) or of a UTC time. Raises UserError."""
    if ago := _AGO.fullmatch(text):
        return now - int(ago[1]) * _SECONDS[ago[2]]
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise UserError(
            f"{text!r} is not a time", hint="say 30m, 24h, 7d, or 2026-11-23T12:00 (UTC)"
        ) from error
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
