"""The offline filter: which tasks are neither too easy nor hopeless for a given model.

k samples a task, the share that passes, and a range of shares to keep (INTELLECT-2 kept up to 75 %
over 8 samples of a smaller model). What is kept is a dataset of its own in the common task schema,
named by its digest: a run definition that pins it (environment `tasks`) trains on just these tasks.
Problems of a procedural environment are written alike, as a list to look at: no grader of `tasks`
knows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protocol.core import encoding
from protocol.core.errors import UnavailableError, UserError
from protocol.core.ids import Digest
from protocol.core.run import RunDefinition
from protocol.environments.base import Environment
from protocol.environments.dataset import TaskDataset
from protocol.environments.registry import environment_for
from trainer.sampling import Answered, answer, sampling_seed

SCHEMA = (
    "problem_id", "source", "task_type", "prompt", "gold_standard_solution", "verification_info",
    "metadata",
)  # fmt: skip
CHUNK = 64
"""Tasks sampled between two lines of progress."""


@dataclass(frozen=True)
class Range:
    """Pass rates to keep, both ends included, as passes out of `samples`."""

    low: float
    high: float
    samples: int

    def keeps(self, passes: int) -> bool:
        """Whether a task with so many passes stays."""
        return self.low <= passes / self.samples <= self.high


@dataclass(frozen=True)
class Filtered:
    """What came of it: the file, its SHA-256 (what a run pins), and how many tasks had how many
    passes."""

    file: str
    digest: Digest
    asked: int
    kept: int
    passes: dict[str, int]

    def as_json(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return asdict(self)


def select(answered: Sequence[Answered], wanted: Range) -> list[Answered]:
    """Those within the range, in order; each problem once, whatever the order it came in."""
    seen: set[str] = set()
    kept = []
    for one in answered:
        if wanted.keeps(one.passes) and one.problem.problem_id not in seen:
            seen.add(one.problem.problem_id)
            kept.append(one)
    return kept


def row(one: Answered, environment: Environment) -> dict[str, Any]:
    """A task in the common schema, its pass rate kept under metadata. A task from a dataset comes
    out as it went in; a procedural problem gets what its environment knows of it."""
    problem = one.problem
    if isinstance(environment, TaskDataset):
        plain = environment.task(problem.index).plain()
    else:
        plain = {
            "problem_id": problem.problem_id,
            "source": environment.name,
            "task_type": environment.name,
            "prompt": problem.prompt,
            "gold_standard_solution": problem.answer,
            "verification_info": {"answer": problem.answer},
            "metadata": dict(problem.metadata),
        }
    rates = {
        "index": problem.index,
        "solve_rate": one.passes / len(one.grades),
        "solve_samples": len(one.grades),
    }
    return plain | {"metadata": plain["metadata"] | rates}


def filter_tasks(
    model: Path,
    run: RunDefinition,
    wanted: Range,
    out: Path,
    *,
    tasks: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[tuple[int, int]]:
    """Samples the run's first `tasks` training problems (None: all) and writes what is kept to
    `out` as JSONL; yields (asked, kept) as it goes. `describe` then tells the digest.

    Raises UserError if nothing is kept or `out` exists, UnavailableError for a full disk.
    """
    total = run.environment.train_size
    count = total if tasks is None else min(tasks, total)
    if out.exists():
        raise UserError(f"{out} exists already", hint="name another file by --out")
    environment = environment_for(run)
    answered: list[Answered] = []
    for start in range(0, count, CHUNK):
        source = encoding.sha256(sampling_seed(seed, b"filter").encode() + start.to_bytes(8, "big"))
        answered += answer(
            model, run, environment, range(start, min(count, start + CHUNK)),
            samples=wanted.samples, source=source, device=device,
        )  # fmt: skip
        yield len(answered), len(select(answered, wanted))
    kept = select(answered, wanted)
    if not kept:
        raise UserError(
            f"none of {count} tasks has a pass rate in [{wanted.low:g}, {wanted.high:g}]",
            hint="widen the range, or take another model",
        )
    text = "".join(
        json.dumps(row(one, environment), ensure_ascii=False, sort_keys=True) + "\n" for one in kept
    )
    environment.close()
    histogram: dict[str, int] = {}
    for one in answered:
        histogram[str(one.passes)] = histogram.get(str(one.passes), 0) + 1
    data = text.encode()
    found = Filtered(
        str(out), encoding.sha256(data), count, len(kept),
        dict(sorted(histogram.items(), key=lambda item: int(item[0]))),
    )  # fmt: skip
    facts = found.as_json() | {
        "range": [wanted.low, wanted.high],
        "samples": wanted.samples,
        "seed": seed,
        "model": str(model),
        "environment": run.environment.model_dump(mode="json"),
    }
    try:
        out.write_bytes(data)
        _facts_of(out).write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        raise UnavailableError(f"{out} cannot be written: {error.strerror}") from error


def describe(out: Path) -> Filtered:
    """What `filter_tasks` wrote beside its dataset."""
    facts = json.loads(_facts_of(out).read_text())
    return Filtered(**{name: facts[name] for name in Filtered.__dataclass_fields__})


def _facts_of(out: Path) -> Path:
    return out.with_name(out.name + ".facts.json")
