"""`orchestrator evaluations start|list|grade|end`: held-out problems, answered by the pool's nodes.

Evaluation leases are judged and paid like any other, and their files are never trained on.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from prime_core.command_line import Json, group
from prime_core.errors import NotFoundError, UserError
from prime_core.times import utc
from prime_orchestrator.cli.storage import StoreOptions, progress, with_database, with_objects

app = group("Evaluate a policy by the pool's nodes, on held-out problems.")


@app.command()
@with_database
def start(
    options: StoreOptions,
    policy: Annotated[
        int | None, typer.Option(min=0, help="Version of the policy (the newest).")
    ] = None,
    problems: Annotated[
        int | None, typer.Option(min=1, help="How many held-out problems (all of the run).")
    ] = None,
    json_output: Json = False,
) -> None:
    """Have the pool's nodes answer held-out problems. The answers are paid."""
    from prime_orchestrator.rollouts import runs_of
    from prime_orchestrator.store import evaluations, policies

    with options.pool() as (_, store), store.begin() as connection:
        newest = policies.latest_version(connection)
        version = newest if policy is None else policy
        if version is None or policies.get(connection, version) is None:
            known = "none" if newest is None else f"0 to {newest}"
            raise NotFoundError(f"policy {version} is not published; known versions: {known}")
        run = runs_of(connection).at(version)
        known_problems = run.environment.heldout_size
        if not known_problems:
            raise UserError(
                f"the run of step {version} has no held-out problems",
                hint="set environment.heldout_size in a revision: orchestrator run revise",
            )
        wanted = problems or known_problems
        if wanted > known_problems:
            raise UserError(
                f"the run has {known_problems} held-out problems, fewer than {wanted}",
                hint=f"give --problems {known_problems} or fewer",
            )
        number = evaluations.start(connection, version, wanted, now=time.time())
    if json_output:
        typer.echo(json.dumps({"id": number, "policy_version": version, "problems": wanted}))
        return
    typer.echo(
        f"evaluation {number}: policy {version} on {wanted} held-out problems, "
        f"{run.samples_per_group} answers each; results: orchestrator evaluations list"
    )


@app.command("list")
@with_database
def list_evaluations(
    options: StoreOptions,
    last: Annotated[int, typer.Option(min=1, max=1000, help="Most evaluations to list.")] = 20,
    json_output: Json = False,
) -> None:
    """List evaluations and their results so far, newest first."""
    from prime_orchestrator.store import evaluations

    with options.pool() as (_, store), store.read() as connection:
        found = [evaluations.info(connection, row) for row in evaluations.newest(connection, last)]
    if json_output:
        typer.echo(json.dumps({"evaluations": [one.model_dump() for one in found]}))
        return
    if not found:
        typer.echo("no evaluation was started: orchestrator evaluations start")
        return
    typer.echo(
        f"{'id':>5}{'policy':>8}{'answered':>12}{'rows':>8}  {'reward':17}{'started':22}ended"
    )
    for one in found:
        reward = "-" if one.reward is None else f"{one.reward:.3f}"
        if one.interval is not None:
            reward += f" ± {one.interval:.3f}"
        ended = "running" if one.ended_at is None else utc(one.ended_at)
        answered = f"{one.answered}/{one.problems}"
        typer.echo(
            f"{one.id:>5}{one.policy_version:>8}{answered:>12}{one.rows:>8}  "
            f"{reward:17}{utc(one.started_at):22}{ended}"
        )


@app.command()
@with_objects
def grade(
    options: StoreOptions,
    number: Annotated[int, typer.Argument(metavar="ID", help="Id, as list shows it.")],
    model: Annotated[
        Path, typer.Option(help="Model folder of the run, whose tokenizer decodes the answers.")
    ],
    json_output: Json = False,
) -> None:
    """Grade an evaluation's accepted answers again. Shows pass@1 and pass@k.

    Answers that are programs run in the environment's sandbox.
    """
    from prime_orchestrator import rollouts
    from prime_orchestrator.store import backup

    with options.pool() as (settings, store), progress() as bar:
        task = bar.add_task("files", total=None)
        found = rollouts.grade_evaluation(
            store,
            settings.open_objects("", backup.place(store)),
            number,
            model,
            begins=lambda total: bar.update(task, total=total),
            went=lambda files: bar.advance(task, files),
        )
    if json_output:
        typer.echo(json.dumps({"id": number, **asdict(found)}))
        return
    lines = (
        ("reward", found.reward),
        ("pass@1", found.pass_1),
        (f"pass@{found.samples}", found.pass_k),
    )
    for name, one in lines:
        typer.echo(f"{name:8}{one.mean:.3f}  95 % interval {one.low:.3f} to {one.high:.3f}")
    typer.echo(f"over {found.reward.count} problems, {found.samples} answers each")
    if found.ungraded:
        typer.echo(f"{found.ungraded} answers were left out: their prompt is not the lease's")


@app.command()
@with_database
def end(
    options: StoreOptions,
    number: Annotated[int, typer.Argument(metavar="ID", help="Id, as list shows it.")],
    json_output: Json = False,
) -> None:
    """End an evaluation: it gets no more leases. Those given are still judged and paid."""
    from prime_orchestrator.store import evaluations

    with options.pool() as (_, store), store.begin() as connection:
        if evaluations.get(connection, number) is None:
            raise NotFoundError(f"there is no evaluation {number}")
        evaluations.end(connection, number, now=time.time())
        row = evaluations.get(connection, number)
        assert row is not None
        one = evaluations.info(connection, row)
    if json_output:
        typer.echo(one.model_dump_json())
        return
    typer.echo(f"evaluation {number} has ended with {one.answered} of {one.problems} problems")
