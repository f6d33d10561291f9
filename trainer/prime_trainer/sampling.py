"""Generates a model's answers to numbered problems of a run, graded by the run's own grader.

The seed determines problems, target lengths and sampling noise, so sampling the same weights with
the same seed gives the same answers; engine and reward are those of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prime_core import encoding, seeds
from prime_core.errors import UserError
from prime_core.folders import make_folder
from prime_core.gateway import Answers, Cassette
from prime_core.ids import Digest
from prime_core.run import MICRO, RunDefinition
from prime_engine.base import Discard, Engine
from prime_envs.base import Environment, Grade, Problem
from prime_envs.sources import file_digest
from prime_trainer.disk import whole_lines, writing
from prime_trainer.loading import require_model_folder
from prime_verify.build import PlannedRow, generate_rows

ROWS = 256
"""Answers generated in one batch."""
ANOTHER = "name another folder by --answers, or remove the file to start again"


@dataclass(frozen=True)
class Answered:
    """One problem with its target and the grades of its samples, in sample order."""

    problem: Problem
    target: int
    grades: tuple[Grade, ...]

    @property
    def passes(self) -> int:
        """Number of fully correct samples, of any length."""
        return sum(grade.parts["task_micro"] >= MICRO for grade in self.grades)

    def graded(self) -> Answered:
        """Returns it without the samples that could not be graded, which is perhaps all of them."""
        return replace(self, grades=tuple(grade for grade in self.grades if not grade.ungraded))


@dataclass(frozen=True)
class Sampling:
    """How a command samples: the engine and its device, the folder in which graded answers are
    kept (None: nowhere), what is called after each batch with its number of problems, and the file
    with recorded answers of the run's gateway."""

    engine: str = "plain"
    dtype: str = "float32"
    device: str = "cpu"
    answers: Path | None = None
    progress: Callable[[int], None] = lambda answered: None
    cassette: Path | None = None

    def load(self, model: Path) -> Engine:
        """Loads `model`. Raises UserError if it is no model folder, UnavailableError if it cannot
        be loaded."""
        from prime_verify.engines import load_engine

        require_model_folder(model)
        # vLLM batches by itself
        options = {"batch_rows": ROWS} if self.engine == "plain" else {}
        return load_engine(
            model, engine=self.engine, dtype=self.dtype, device=self.device, **options
        )


class Kept:
    """A file of graded answers, so that a command that was ended goes on where it stopped.

    JSON lines: what was asked, then one line for each problem. Lines are added after each batch; an
    incomplete last line is cut off. Raises UserError if the file answers another question, or
    cannot be read; UnavailableError for a full disk.
    """

    def __init__(self, path: Path, question: Mapping[str, Any]) -> None:
        self._path = path
        self._found: dict[int, tuple[int, tuple[Grade, ...]]] = {}
        make_folder(path.parent)
        with writing("the graded answers", path):
            lines = self._lines()
            if not lines:
                path.write_text(json.dumps(question, sort_keys=True) + "\n")
        if lines:
            self._read(lines, question)

    def get(self, number: int, problem: Problem, target: int) -> Answered | None:
        """The answer to problem `number` of those asked, if it is kept."""
        index, grades = self._found.get(number, (-1, ()))
        return Answered(problem, target, grades) if index == problem.index else None

    def add(
        self, first: int, answered: Sequence[Answered], texts: Sequence[Sequence[str]] | None = None
    ) -> None:
        """Keeps the answers to the problems from number `first` on. `texts`: the answers
        themselves, by problem and sample, to be read by people."""
        lines = [
            json.dumps(
                {
                    "number": number,
                    "index": one.problem.index,
                    "grades": [asdict(grade) for grade in one.grades],
                    **({} if texts is None else {"texts": texts[number - first]}),
                }
            )
            for number, one in enumerate(answered, start=first)
        ]
        with writing("the graded answers", self._path), self._path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def _lines(self) -> list[str]:
        try:
            return whole_lines(self._path)
        except UnicodeDecodeError as error:
            raise UserError(f"{self._path} is not text in UTF-8", hint=ANOTHER) from error

    def _read(self, lines: Sequence[str], question: Mapping[str, Any]) -> None:
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                found = json.loads(line)
                if number == 1:
                    self._require(question, found)
                    continue
                grades = tuple(Grade(**grade) for grade in found["grades"])
                self._found[int(found["number"])] = int(found["index"]), grades
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"line {number} of {self._path} is not a graded answer: {error}", hint=ANOTHER
            ) from error

    def _require(self, question: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        for name in question:
            if found[name] != question[name]:
                raise UserError(
                    f"{self._path} holds answers for {name} {found[name]!r}, not "
                    f"{question[name]!r}",
                    hint=ANOTHER,
                )


def sampling_seed(seed: int, purpose: bytes = b"evaluate") -> Digest:
    """The 32-byte seed of all randomness. Raises UserError if `seed` is not a 64-bit number."""
    if not 0 <= seed < 1 << 64:
        raise UserError(f"the evaluation seed {seed} is not in 0 … 2^64 − 1")
    return encoding.sha256(b"prime/" + purpose + b"/v1" + seed.to_bytes(8, "big"))


def keep(sampling: Sampling, name: str, model: Path, question: Mapping[str, Any]) -> Kept | None:
    """Opens the file `name` of graded answers for `model`, if they are to be kept. `question`: what
    else has to be the same for its answers to count. Raises UserError if `model` is no model
    folder, and the same errors as `Kept`."""
    if sampling.answers is None:
        return None
    from prime_broadcast.manifest import build_manifest

    require_model_folder(model)
    weights = build_manifest(model, pool=0, version=0, step=0).result_digest
    how = {"engine": sampling.engine, "dtype": sampling.dtype, "device": sampling.device}
    if sampling.cassette is not None:
        how["cassette"] = file_digest(sampling.cassette)
    stated = {"model": weights, **how, **question}
    return Kept(sampling.answers / f"{name}.jsonl", stated)


def recorded(run: RunDefinition, cassette: Path | None) -> Cassette | None:
    """Reads the recorded answers for the calls of the run's gateway; None for a run without one.
    Raises UserError if the run and `cassette` do not go together, and that of Cassette.read."""
    asks = run.conversation is not None and run.conversation.gateway is not None
    if asks and cassette is None:
        raise UserError(
            "the run's tools ask a gateway, which is not reached from here",
            hint="give recorded answers by --cassette FILE (orchestrator gateway export FILE)",
        )
    if cassette is not None and not asks:
        raise UserError("the run has no [conversation.gateway]", hint="leave out --cassette")
    return None if cassette is None else Cassette.read(cassette)


def answer(
    engine: Engine,
    run: RunDefinition,
    environment: Environment,
    indices: Sequence[int],
    *,
    samples: int,
    source: Digest,
    gateway: Answers | None = None,
    kept: Kept | None = None,
) -> Iterator[list[Answered]]:
    """Generates and grades `samples` answers to each problem of `indices`, at the run's
    temperature; yields them in order, about ROWS answers at a time.

    `gateway` answers calls of the gateway's tools (see build.generate_rows). Answers in `kept` are
    not generated again, and new ones are added to it. Raises MalformedError for an invalid problem
    index, and the errors of `Kept`.
    """
    targets = seeds.target_lengths(source, len(indices), run.budgets.targets)
    size = max(1, ROWS // samples)
    for start in range(0, len(indices), size):
        numbers = range(start, min(len(indices), start + size))
        asked = {
            number: environment.ask(indices[number], targets[number], engine.tokenizer)
            for number in numbers
        }
        if kept is not None:
            known = [kept.get(number, asked[number][0], targets[number]) for number in numbers]
            if None not in known:
                yield [one for one in known if one is not None]
                continue
        plan = [
            PlannedRow(
                group=number,
                sample=sample,
                problem=problem,
                target_length=targets[number],
                prompt_tokens=prompt,
                noise_seed=seeds.noise_seed(source, number, sample),
            )
            for number, (problem, prompt) in asked.items()
            for sample in range(samples)
        ]
        made = iter(generate_rows(plan, run, engine, Discard(), environment, gateway))
        found = []
        for number, (problem, _) in asked.items():
            grades = []
            for _ in range(samples):
                row = next(made)
                grades.append(
                    environment.grade_output(
                        problem, targets[number], row.output_tokens, engine.tokenizer, row.spans
                    )
                )
            found.append(Answered(problem, targets[number], tuple(grades)))
        if kept is not None:
            kept.add(start, found)
        yield found
