"""The offline filter: selects tasks that are neither too easy nor too hard for a given model.

It takes k samples per task and keeps tasks whose pass rate is within a range (INTELLECT-2 kept up
to 75 % over 8 samples of a smaller model). The samples are drawn here, or are the accepted rollouts
of a pool. The result is a dataset in the common task schema,
identified by its digest; a run definition that pins it (environment `tasks`, or `crowd` for a
contributed one) trains on these tasks only. Before it gets its final name, it is read back and its
first gold answers are graded. Environments whose problems cannot be dataset rows are refused at the
start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prime_core import encoding
from prime_core.errors import FatalError, PrimeError, UnavailableError, UserError
from prime_core.ids import Digest
from prime_core.run import MICRO, RunDefinition
from prime_envs.base import Environment, Grade, Problem
from prime_envs.environments.crowd import CrowdEnvironment
from prime_envs.environments.tasks import TaskDataset
from prime_envs.graders.base import Grader
from prime_envs.registry import environment_for, load_environment
from prime_envs.tasks import Task
from prime_trainer.advantages import UNCOMPARED
from prime_trainer.sampling import Answered, Sampling, answer, keep, recorded, sampling_seed

GRADED_AGAIN = 64
"""Number of gold answers graded in the finished file."""


@dataclass(frozen=True)
class Range:
    """Pass rates to keep, inclusive; `samples` is the least number of samples per task."""

    low: float
    high: float
    samples: int

    def keeps(self, one: Answered) -> bool:
        """Whether a task with these samples is kept."""
        if len(one.grades) < self.samples:
            return False
        return self.low <= one.passes / len(one.grades) <= self.high


@dataclass(frozen=True)
class Filtered:
    """Result of filtering: the file, its SHA-256 and the environment with which a run pins it, and
    the number of tasks by number of passes."""

    file: str
    environment: str
    digest: Digest
    asked: int
    kept: int
    passes: dict[str, int]

    def as_json(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return asdict(self)


def select(answered: Sequence[Answered], wanted: Range) -> list[Answered]:
    """The answers within the range, in order, each problem once. Samples that could not be graded
    do not count."""
    seen: set[str] = set()
    kept = []
    for one in map(Answered.graded, answered):
        if wanted.keeps(one) and one.problem.problem_id not in seen:
            seen.add(one.problem.problem_id)
            kept.append(one)
    return kept


def task_of(problem: Problem, environment: Environment) -> Task:
    """The problem as a dataset row. Raises UserError if the environment does not provide one."""
    with _named(environment, f"problem {problem.problem_id}"):
        task = environment.as_task(problem.index)
    if task is None:
        raise UserError(
            f"problem {problem.problem_id} of the environment {environment.name!r} cannot be a row "
            "of a dataset: no grader of task types knows it",
            hint="filter a run of the environment tasks, crowd or reasoning_gym",
        )
    return task


def _require_rows(environment: Environment, count: int) -> None:
    """Raises UserError if an environment's problems, or those of a mixture's part, cannot be rows.
    Only the first of each part, below `count`, is tried."""
    for index in environment.firsts():
        if index < count:
            with _named(environment, f"problem {index}"):
                problem = environment.problem(index)
            task_of(problem, environment)
    parts = environment.members()[1:]
    if any(isinstance(part, CrowdEnvironment) and part.header.grader for part in parts):
        raise UserError(
            "a part of the mixture has a grader of its own, which a row of `tasks` cannot name",
            hint="filter a run of that environment alone",
        )


def row(one: Answered, environment: Environment) -> dict[str, Any]:
    """A task in the common schema, with its pass rate in the metadata. Raises the same errors as
    `task_of`."""
    plain = task_of(one.problem, environment).plain()
    rates = {
        "index": one.problem.index,
        "solve_rate": one.passes / len(one.grades),
        "solve_samples": len(one.grades),
    }
    return plain | {"metadata": plain["metadata"] | rates}


def head(environment: Environment) -> list[dict[str, Any]]:
    """Lines before the rows: a packed environment's header, or nothing."""
    if isinstance(environment, CrowdEnvironment):
        return [environment.header.model_dump(mode="json")]
    return []


def read_back(file: Path, name: str, digest: Digest, run: RunDefinition) -> None:
    """Opens a filtered dataset like a run does, and grades the first gold answers. Raises
    PrimeError naming the row that cannot be read, or whose gold answer does not get the full
    score."""
    environment = load_environment(name, {"sha256": digest, "path": str(file)}, run.budgets)
    assert isinstance(environment, TaskDataset)
    try:
        for index in range(min(GRADED_AGAIN, len(environment))):
            task = environment.task(index)
            grader = environment.grader(task.task_type)
            with _named(grader, f"problem {task.problem_id}"):
                gold = grader.gold(task)
                if gold is None:
                    continue
                score = grader.grade(task, gold)
            if score.task_micro < MICRO and not score.uncertain:
                raise FatalError(
                    f"{task.problem_id} in {file.name}: its gold answer scores {score.task_micro} "
                    f"of {MICRO} once it is a row ({score.reason}); nothing is kept"
                )
    finally:
        environment.close()


def filter_tasks(
    model: Path,
    run: RunDefinition,
    wanted: Range,
    out: Path,
    *,
    tasks: int | None = None,
    seed: int = 0,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
) -> Iterator[tuple[int, int]]:
    """Samples the run's first `tasks` training problems (None: all) and writes the selected ones to
    `out` as JSONL; yields (asked, kept) as progress. Afterwards, `describe` returns the result.

    Raises UserError if nothing is kept, `out` exists, the environment's problems cannot be rows,
    `sampling` keeps answers to another question or its cassette does not go with the run;
    UnavailableError for a full disk.
    """
    count = _count(run, tasks)
    _require_out(out)
    gateway = recorded(run, sampling.cassette)
    environment = environment_for(run)
    try:
        _require_rows(environment, count)  # fail before hours of sampling
        answered: list[Answered] = []
        stated = {"run": run.digest(), "seed": seed, "samples": wanted.samples, "tasks": count}
        known = keep(sampling, "filter", model, stated)
        engine = sampling.load(model)
        try:
            for some in answer(
                engine, run, environment, range(count), samples=wanted.samples,
                source=sampling_seed(seed, b"filter"), gateway=gateway, kept=known,
            ):  # fmt: skip
                answered += some
                sampling.progress(len(some))
                yield len(answered), len(select(answered, wanted))
        finally:
            engine.close()
        _write(out, answered, environment, run, wanted, {"seed": seed, "model": str(model)})
    finally:
        environment.close()


def filter_rollouts(
    rollouts: Path, run: RunDefinition, wanted: Range, out: Path, *, tasks: int | None = None
) -> None:
    """Does the same as `filter_tasks` with the accepted rows of `rollouts`, a Parquet file of
    `orchestrator rollouts export --grade`, in place of samples drawn here. Rows of another
    environment or dataset than the run's, as before a revision, are left out.

    Raises UserError if that file cannot be read, was made without `--grade` or has no problem of
    the run, and the same errors as `filter_tasks`.
    """
    count = _count(run, tasks)
    _require_out(out)
    environment = environment_for(run)
    try:
        _require_rows(environment, count)
        grades = _grades_of(rollouts, run.environment.digest)
        answered = []
        for index in range(count):
            if not grades:
                break
            with _named(environment, f"problem {index}"):
                problem = environment.problem(index)
            if own := grades.pop(problem.problem_id, ()):
                answered.append(Answered(problem, 0, tuple(own)))
        if not answered:
            raise UserError(
                f"{rollouts} has no accepted rollout of the first {count} problems of the run",
                hint="name the pool's run definition by --run",
            )
        _write(out, answered, environment, run, wanted, {"rollouts": str(rollouts)})
    finally:
        environment.close()


def _grades_of(rollouts: Path, wanted: Digest) -> dict[str, list[Grade]]:
    """Returns the grades of the accepted rows of an export, by problem, without rows that a limit
    ended. Only rows of the environment with the digest `wanted` count. Raises UserError."""
    columns = [
        "verdict", "environment_digest", "problem_id", "finish_reason", "reward", "reward_parts",
    ]  # fmt: skip
    hint = "make it by `orchestrator rollouts export --grade`"
    if rollouts.is_dir():
        raise UserError(f"{rollouts} is a folder", hint=hint)
    found: dict[str, list[Grade]] = {}
    accepted, others = 0, set()
    try:
        with pq.ParquetFile(rollouts) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise UserError(f"{rollouts} has no column {missing[0]!r}", hint=hint)
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    if row["verdict"] != "accepted":
                        continue
                    if row["environment_digest"] != wanted:
                        others.add(str(row["environment_digest"]))
                        continue
                    accepted += 1
                    if row["reward"] is None or row["finish_reason"] in UNCOMPARED:
                        continue
                    parts = {one["name"]: one["value"] for one in row["reward_parts"] or ()}
                    if "task_micro" in parts:
                        grade = Grade(round(row["reward"] * MICRO), parts, "")
                        found.setdefault(row["problem_id"], []).append(grade)
    except OSError as error:
        raise UserError(f"{rollouts} cannot be read: {error}", hint=hint) from error
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{rollouts} is no export of rollouts: {error}", hint=hint) from error
    if others and not accepted:
        raise UserError(
            f"the accepted rollouts of {rollouts} are of the environment {min(others)}, and the "
            f"run pins {wanted}",
            hint="name the run definition or revision that they were made for by --run",
        )
    if accepted and not found:
        raise UserError(f"{rollouts} has no grades", hint=hint)
    return found


@contextmanager
def _named(plugin: Environment | Grader, row: str) -> Iterator[None]:
    """Raises UserError, naming the plugin and the row, where the code of an environment or grader
    raises what is no PrimeError."""
    try:
        yield
    except PrimeError:
        raise
    except Exception as error:  # a plugin may raise anything
        kind = type(plugin)
        raise UserError(
            f"{kind.__module__}.{kind.__qualname__} raised {type(error).__name__} on {row}: "
            f"{' '.join(str(error).split())[:200]}",
            hint="correct that class, or leave the row out of the dataset",
        ) from error


def _count(run: RunDefinition, tasks: int | None) -> int:
    total = run.environment.train_size
    return total if tasks is None else min(tasks, total)


def _require_out(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists already", hint="name another file by --out")
    if out.suffix != ".jsonl":
        raise UserError(f"{out} is written as JSON lines", hint="let --out end with .jsonl")


def _write(
    out: Path,
    answered: Sequence[Answered],
    environment: Environment,
    run: RunDefinition,
    wanted: Range,
    source: dict[str, object],
) -> None:
    """Writes the selected tasks to `out`, and next to it the facts that `describe` reads, which
    name the `source` of the samples."""
    kept = select(answered, wanted)
    if not kept:
        raise UserError(
            f"none of {len(answered)} tasks has a pass rate in [{wanted.low:g}, {wanted.high:g}] "
            f"over {wanted.samples} samples or more",
            hint="widen the range, or take another model",
        )
    lines = [*head(environment), *(row(one, environment) for one in kept)]
    data = "".join(
        json.dumps(line, ensure_ascii=False, sort_keys=True) + "\n" for line in lines
    ).encode()
    histogram: dict[str, int] = {}
    for one in map(Answered.graded, answered):
        histogram[str(one.passes)] = histogram.get(str(one.passes), 0) + 1
    found = Filtered(
        str(out), "crowd" if head(environment) else "tasks", encoding.sha256(data), len(answered),
        len(kept), dict(sorted(histogram.items(), key=lambda item: int(item[0]))),
    )  # fmt: skip
    facts = (
        found.as_json()
        | source
        | {
            "range": [wanted.low, wanted.high],
            "samples": wanted.samples,
            "filtered": run.environment.model_dump(mode="json"),
        }
    )
    staging = out.with_name(f".{out.name}.staging{out.suffix}")
    try:
        staging.write_bytes(data)
        read_back(staging, found.environment, found.digest, run)
        _facts_of(out).write_text(json.dumps(facts, indent=1) + "\n")
        staging.rename(out)
    except OSError as error:
        raise UnavailableError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        staging.unlink(missing_ok=True)


def describe(out: Path) -> Filtered:
    """Reads the facts that `filter_tasks` wrote next to its dataset."""
    facts = json.loads(_facts_of(out).read_text())
    return Filtered(**{name: facts[name] for name in Filtered.__dataclass_fields__})


def _facts_of(out: Path) -> Path:
    return out.with_name(out.name + ".facts.json")
