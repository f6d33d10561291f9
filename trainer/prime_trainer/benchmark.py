"""`trainer benchmark`: a model's score on a public benchmark, next to the published figures.

Our engine generates, with the model's chat template, seeded; benchmark_tasks.py scores the text
after the thinking. The seed fixes noise and the order of choices.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, cast

from prime_core import encoding, seeds
from prime_core.errors import UntrustedError, UserError
from prime_core.ids import Digest
from prime_core.run import Chat, RunDefinition
from prime_engine.base import Discard, Engine, GenerationRequest
from prime_engine.batch import BatchEngine, RowSet
from prime_envs.base import MAX_OUTPUT_CHARACTERS, Grade, Problem, decode_output
from prime_envs.chat import THINK, prompt_of, prompt_tokens
from prime_envs.graders.answers import final_section
from prime_envs.shares import Interval, pass_at_k, share
from prime_envs.sources import file_digest
from prime_trainer.benchmark_tasks import Benchmark, read_problems
from prime_trainer.sampling import ROWS, Answered, Kept, Sampling, keep, sampling_seed
from prime_trainer.talk import chat_of

SOURCE = "technical report of INTELLECT-2, arXiv 2505.07291"
PUBLISHED = {
    "aime24": {"INTELLECT-2": 78.8, "QwQ-32B": 76.6},
    "aime25": {"INTELLECT-2": 64.9, "QwQ-32B": 64.8},
    "livecodebench-v5": {"INTELLECT-2": 67.8, "QwQ-32B": 66.1},
    "gpqa-diamond": {"INTELLECT-2": 66.8, "QwQ-32B": 66.3},
    "ifeval": {"INTELLECT-2": 81.5, "QwQ-32B": 83.4},
    "gsm8k": {},
}
"""Scores in percent, from SOURCE; it has none of GSM8K."""


@dataclass(frozen=True)
class Asked:
    """What is asked of a model. `problems`: number of the first ones (None: all). `temperature` 0
    takes the most probable token. `max_tokens` of an answer are cut to what the model's positions
    leave. `budget`: tokens of thinking that the prompt asks for; `system`: the system prompt (None:
    the run's)."""

    data: Path
    problems: int | None = None
    samples: int = 1
    seed: int = 0
    temperature: float = 0.6
    max_tokens: int = 32_768
    budget: int | None = None
    system: str | None = None


@dataclass(frozen=True)
class Report:
    """A benchmark's result. `score` is the mean over problems of the share of right samples,
    `pass_k` the share of problems with at least one of k = `samples`, both from 0 to 1 with 95 %
    intervals over problems.

    `tokens`: of an answer: mean, median, longest. `cut`: share of answers that the token limit
    ended. `ungraded`: answers on which the scoring code failed; they count as wrong.
    `seconds` of generating and `tokens_per_second` are those of this command alone, without the
    `resumed` problems that were kept; None if nothing was generated.
    """

    task: str
    model: str
    data: str
    digest: Digest
    problems: int
    whole: int
    samples: int
    score: Interval
    pass_k: Interval
    details: dict[str, float]
    tokens: dict[str, float]
    cut: float
    ungraded: int
    seconds: float
    tokens_per_second: float | None
    resumed: int
    settings: dict[str, Any]
    versions: dict[str, str]
    published: dict[str, float]
    source: str = SOURCE

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


@dataclass
class _Made:
    """What this command generated."""

    tokens: int = 0
    seconds: float = 0.0
    resumed: int = 0


@dataclass(frozen=True)
class _Prompts:
    """Makes prompts: by the model's chat template, or the bare question if `chat` is None."""

    engine: BatchEngine
    chat: Chat | None
    budget: int | None

    def of(self, problem: Problem) -> tuple[tuple[int, ...], bool]:
        """(tokens, whether the template has opened the thinking). Special tokens in the problem
        are ordinary text, as in training. Raises UserError if the model's positions leave no room
        for an answer, and the same errors as chat.prompt_tokens."""
        tokenizer, opened = self.engine.tokenizer, False
        if self.chat is None:
            found = tokenizer.encode(
                problem.prompt, add_special_tokens=False, split_special_tokens=True
            )
        else:
            target = self.budget or 0
            found = prompt_tokens(self.chat, problem.prompt, target, tokenizer)
            text = prompt_of(self.chat, problem.prompt, target, tokenizer)
            opened = text.rstrip().endswith(THINK)
        tokens = tuple(found)
        if len(tokens) >= self.engine.positions:
            raise UserError(
                f"problem {problem.index + 1} takes {len(tokens)} tokens, and the model has "
                f"{self.engine.positions} positions",
                hint="choose a model with a longer context",
            )
        return tokens, opened


def require_pinned(data: Path, pinned: str | None) -> Digest:
    """The file's SHA-256. Raises UserError if the file cannot be read or `pinned` is not a digest,
    UntrustedError if the file has another digest."""
    if pinned is not None and not re.fullmatch("0x[0-9a-fA-F]{64}", pinned):
        raise UserError(
            f"{pinned[:80]!r} is not a SHA-256 digest; expected 0x and 64 hexadecimal digits",
            hint="sha256sum FILE",
        )
    found = file_digest(data)
    if pinned is not None and found != pinned.lower():
        raise UntrustedError(f"{data} has digest {found}, but --digest pins {pinned}")
    return found


def count_problems(benchmark: Benchmark, asked: Asked) -> int:
    """Reads the whole file once, so that a malformed row is found before anything is generated.
    Returns how many problems will be asked. Raises MalformedError, UserError."""
    count = sum(1 for _ in read_problems(benchmark, asked.data))
    if count < max(1, asked.problems or 0):
        raise UserError(
            f"{asked.data} has {count} problems, {asked.problems or 1} were asked for",
            hint="name another file by --data, or fewer by --problems",
        )
    return asked.problems or count


def run_benchmark(
    benchmark: Benchmark,
    model: Path,
    run: RunDefinition | None,
    asked: Asked,
    digest: Digest,
    sampling: Sampling,
) -> Report:
    """Generates and scores all answers. `digest` is that of the data; `run` gives the chat format.
    With `sampling.answers`, answers that are kept there are not generated again.

    Raises UserError if temperature 0 is asked with several samples, a prompt leaves no room for an
    answer, or the folder keeps answers to another question; UnavailableError if the model cannot be
    loaded.
    """
    if asked.temperature == 0 and asked.samples > 1:
        raise UserError(
            f"{asked.samples} samples at temperature 0 are all the same",
            hint="use --samples 1, or a temperature above 0",
        )
    engine = cast(BatchEngine, sampling.load(model))
    try:
        prompts = _Prompts(engine, _chat(run, engine, asked), asked.budget)
        settings = {
            "temperature": asked.temperature, "max_tokens": asked.max_tokens, "seed": asked.seed,
            "budget": asked.budget, "system": None if prompts.chat is None else prompts.chat.system,
            "chat_template": prompts.chat is not None,
            "engine": engine.name, "dtype": engine.dtype, "device": engine.device,
        }  # fmt: skip
        question = {
            "task": benchmark.name, "data": digest, "samples": asked.samples,
            "temperature": asked.temperature, "max_tokens": asked.max_tokens, "seed": asked.seed,
            "budget": asked.budget,
            "chat": None if prompts.chat is None else encoding.sha256(
                encoding.canonical_json(prompts.chat.model_dump(mode="json"))
            ),
            "graded_by": benchmark.versions(),
        }  # fmt: skip
        kept = keep(sampling, benchmark.name, model, question)
        for problem in read_problems(benchmark, asked.data, asked.problems):
            prompts.of(problem)  # all prompts must fit, before hours of sampling
        made = _Made()
        answered: list[Answered] = []
        for one in _answers(benchmark, prompts, asked, kept, made):
            answered.append(one)
            sampling.progress(1)
        answered.sort(key=lambda one: one.problem.index)
    finally:
        engine.close()
    return _report(benchmark, model, asked, digest, settings, answered, made)


def _chat(run: RunDefinition | None, engine: Engine, asked: Asked) -> Chat | None:
    """The chat format; None for a base model without a template, which gets the bare question."""
    if (
        engine.tokenizer.chat_template is None
        and run is None
        and asked.budget is None
        and asked.system is None
    ):
        return None
    chat = chat_of(run, engine, asked.system, asked.budget)
    return chat if asked.budget is not None else chat.model_copy(update={"budget": ""})


def _answers(
    benchmark: Benchmark, prompts: _Prompts, asked: Asked, kept: Kept | None, made: _Made
) -> Iterator[Answered]:
    """Yields graded answers as they end, kept ones at once. About ROWS answers are generated
    together. `made` counts what is generated."""
    problems = read_problems(benchmark, asked.data, asked.problems)
    under_way: dict[int, tuple[Problem, RowSet, bool]] = {}
    more = True
    while more or under_way:
        room = max(1, ROWS // asked.samples) - len(under_way)
        new = list(islice(problems, room))
        more = len(new) == room
        for problem in new:
            known = None if kept is None else kept.get(problem.index, problem, 0)
            if known is not None:
                made.resumed += 1
                yield known
            else:
                under_way[problem.index] = (problem, *_begin(prompts, asked, problem))
        ended = [one for one in under_way.values() if one[1].done]
        for problem, rows, thinking in ended:
            del under_way[problem.index]
            found, texts = _graded(benchmark, prompts, problem, rows, thinking)
            made.tokens += sum(len(row.output_tokens) for row in rows.results)
            if kept is not None:
                kept.add(problem.index, [found], [texts])
            yield found
        if under_way and not ended:
            start = time.monotonic()
            prompts.engine.step()
            made.seconds += time.monotonic() - start


def _begin(prompts: _Prompts, asked: Asked, problem: Problem) -> tuple[RowSet, bool]:
    """Queues the samples of a problem. Returns them, and whether the prompt opens a thinking
    span."""
    engine, source = prompts.engine, sampling_seed(asked.seed, b"benchmark")
    tokens, thinking = prompts.of(problem)
    most = min(asked.max_tokens, engine.positions - len(tokens))
    noise = [
        seeds.noise_seed(source, problem.index, sample) if asked.temperature else None
        for sample in range(asked.samples)
    ]
    requests = [GenerationRequest(tokens, most, each) for each in noise]
    return engine.add(requests, asked.temperature or 1.0, Discard()), thinking


def _graded(
    benchmark: Benchmark, prompts: _Prompts, problem: Problem, rows: RowSet, thinking: bool
) -> tuple[Answered, list[str]]:
    """Scores the generated samples of a problem. Returns the grades and the samples' texts."""
    grades, texts = [], []
    for row in rows.results:
        text = decode_output(prompts.engine.tokenizer, row.output_tokens)
        texts.append((THINK if thinking else "") + text)
        score = benchmark.score(problem, final_section(texts[-1][:MAX_OUTPUT_CHARACTERS]))
        parts = {
            **score.parts, "task_micro": score.task_micro, "tokens": len(row.output_tokens),
            "cut": int(row.finish_reason != "end"),
        }  # fmt: skip
        grades.append(Grade(score.task_micro, parts, score.reason, score.uncertain))
    return Answered(problem, 0, tuple(grades)), texts


def _report(
    benchmark: Benchmark, model: Path, asked: Asked, digest: Digest, settings: dict[str, Any],
    answered: Sequence[Answered], made: _Made,
) -> Report:  # fmt: skip
    grades = [grade for one in answered for grade in one.grades]
    lengths = [grade.parts["tokens"] for grade in grades]
    k = asked.samples
    return Report(
        task=benchmark.name,
        model=str(model),
        data=str(asked.data),
        digest=digest,
        problems=len(answered),
        whole=benchmark.whole,
        samples=k,
        score=share([one.passes / k for one in answered]),
        pass_k=share([pass_at_k(k, one.passes, k) for one in answered]),
        details=benchmark.details(grades),
        tokens={
            "mean": statistics.fmean(lengths),
            "median": statistics.median(lengths),
            "longest": max(lengths),
        },
        cut=sum(grade.parts["cut"] for grade in grades) / len(grades),
        ungraded=sum(grade.parts.get("ungraded", 0) for grade in grades),
        seconds=made.seconds,
        tokens_per_second=made.tokens / made.seconds if made.tokens else None,
        resumed=made.resumed,
        settings=settings,
        versions={"prime-open": version("prime-open"), **benchmark.versions()},
        published=PUBLISHED[benchmark.name],
    )


def report_table(found: Report) -> str:
    """The report as text; scores in percent."""

    def percent(value: Interval) -> str:
        return f"{100 * value.mean:.1f}  [{100 * value.low:.1f}, {100 * value.high:.1f}]"

    k, how, tokens = found.samples, found.settings, found.tokens
    only = "" if found.problems == found.whole else f" (the benchmark has {found.whole})"
    lines = [
        ("task", f"{found.task}, {found.problems} problems{only}, {k} sample{'s' * (k > 1)} each"),
        ("data", f"{found.data}, {found.digest}"),
        ("model", f"{found.model}, {how['engine']}, {how['dtype']}, {how['device']}"),
        (f"average@{k}", f"{percent(found.score)}  95 % interval over problems"),
        *([(f"pass@{k}", percent(found.pass_k))] if k > 1 else []),
        *((name, f"{100 * value:.1f}") for name, value in found.details.items()),
        (
            "tokens",
            f"{tokens['mean']:.0f} mean, {tokens['median']:.0f} median, {tokens['longest']:.0f} "
            f"longest; {100 * found.cut:.1f} % of answers cut at the limit",
        ),
    ]
    if found.ungraded:
        lines.append(("ungraded", f"{found.ungraded} answers; they count as wrong"))
    if found.resumed:
        lines.append(("resumed", f"{found.resumed} problems from the answers folder"))
    if found.tokens_per_second is not None:
        lines.append(("time", f"{found.seconds:.1f} s, {found.tokens_per_second:.1f} tokens/s"))
    asked = (
        f"temperature {how['temperature']:g}, at most {how['max_tokens']} tokens, seed "
        f"{how['seed']}, budget {how['budget'] if how['budget'] is not None else 'none'}"
    )
    lines += [
        ("settings", asked + ("" if how["chat_template"] else ", no chat template")),
        ("versions", ", ".join(f"{name} {value}" for name, value in found.versions.items())),
        *((name, f"{value:.1f}  published: {SOURCE}") for name, value in found.published.items()),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines)


def write_report(found: Report, out: Path) -> None:
    """Writes the report as JSON. Raises UnavailableError if the disk refuses it."""
    from prime_trainer.disk import writing

    with writing("the report", out):
        out.write_text(json.dumps(found.as_json(), indent=1) + "\n")
