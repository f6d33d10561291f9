"""Ways to lie about a rollout file, each the honest builder with one step replaced.

    sampling   another rule of drawing, everything else computed by the true policy
    weights    another policy draws, proves and reports
    tokens     text from elsewhere, scored by the true policy (the right prefill)
    file       honest generation; rows, rewards, log-probabilities or proofs are changed

A liar declares the set-up that an honest node would: the plain engine in bfloat16. Several files
are made at once, so that their rows share a batch; rows do not depend on it beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bench.honest import Bench
from protocol.core import seeds
from protocol.engine.base import Engine, Generation, GenerationRequest, ReplayRequest
from protocol.engine.variants import VARIANTS
from protocol.engine.vllm import NAME as VLLM
from protocol.proofs import activations, sampling_torch, sketch
from protocol.verification import build
from protocol.verification.build import PlannedRow
from protocol.verification.engines import load_engine
from protocol.verification.forgeries import FORGERIES, forged_rows
from protocol.verification.rollout_file import FileRow, read_rollout_file, write_rollout_file
from protocol.verification.setups import HonestFile

DTYPE = "bfloat16"
AS_VLLM = "_as_vllm"
Plan = Sequence[PlannedRow]
Made = Sequence[Generation]


@dataclass(frozen=True)
class Job:
    """The files to lie about: those of the leases `numbers`."""

    bench: Bench
    numbers: range

    @property
    def honest_engine(self) -> Engine:
        return self.bench.engine(DTYPE)

    @cached_property
    def leases(self) -> list[tuple[HonestFile, list[PlannedRow]]]:
        return [self.bench.lease(number) for number in self.numbers]

    @property
    def plan(self) -> list[PlannedRow]:
        """The rows of all files, one after another."""
        return [row for _, plan in self.leases for row in plan]

    def files(self, generations: Made, change: Change | None = None) -> list[HonestFile]:
        """The files of `generations` (of `plan`, in order), declared as the honest engine's."""
        left = list(generations)
        files = []
        for lease, plan in self.leases:
            made, left = left[: len(plan)], left[len(plan) :]
            altered = None
            if change is not None:
                altered = partial(change, job=self, lease=lease, made=made)
            files.append(self.bench.assemble(lease, plan, made, self.honest_engine, altered))
        return files


class Change(Protocol):
    """Alters the rows of one file that was made honestly."""

    def __call__(
        self, rows: list[FileRow], plan: Plan, *, job: Job, lease: HonestFile, made: Made
    ) -> list[FileRow]: ...


Attack = Callable[[Job], list[HonestFile]]


@cache
def _variant(folder: Path, name: str) -> Engine:
    return load_engine(folder, dtype=DTYPE, threads=1, prepare=VARIANTS[name])


# ── other weights ────────────────────────────────────────────────────────────────────────────────


def _by(engine: Callable[[Job], Engine]) -> Attack:
    """Everything by another engine, declared as the honest one."""

    def attack(job: Job) -> list[HonestFile]:
        return job.files(build.generate_rows(job.plan, job.bench.run, engine(job)))

    return attack


def _weights(name: str) -> Attack:
    return _by(lambda job: _variant(job.bench.folder, name))


# ── other sampling ───────────────────────────────────────────────────────────────────────────────


def _requests(job: Job, plan: Plan, keyed: bool = True, flip: int = 0) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            row.prompt_tokens,
            job.bench.run.max_output_tokens,
            (row.noise_key[0] ^ flip, row.noise_key[1]) if keyed else None,
        )
        for row in plan
    ]


def _claim(job: Job, plan: Plan, tokens: Sequence[Sequence[int]]) -> list[Generation]:
    """Given tokens as if the true policy had drawn them: its states and log-probabilities."""
    engine = job.honest_engine
    replays = engine.replay(
        [
            ReplayRequest(row.prompt_tokens, tuple(text), row.noise_key)
            for row, text in zip(plan, tokens, strict=True)
        ],
        job.bench.run.temperature,
    )
    return [
        Generation(
            tuple(text),
            found.logprobs,
            found.states,
            "end" if text[-1] in engine.end_tokens else "length",
        )
        for text, found in zip(tokens, replays, strict=True)
    ]


def _retold(choose: Callable[[Job, Plan], Sequence[Sequence[int]]]) -> Attack:
    """Tokens by `choose`; states and log-probabilities those of the true policy for them."""

    def attack(job: Job) -> list[HonestFile]:
        return job.files(_claim(job, job.plan, choose(job, job.plan)))

    return attack


def _tokens(made: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.output_tokens for generation in made]


def _temperature(value: float) -> Attack:
    return _retold(
        lambda job, plan: _tokens(job.honest_engine.generate(_requests(job, plan), value))
    )


def _greedy(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
    return _tokens(job.honest_engine.generate(_requests(job, plan, keyed=False), 1.0))


def _other_seed(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
    return _tokens(job.honest_engine.generate(_requests(job, plan, flip=1), 1.0))


def _best_of(tries: int) -> Callable[[Job, Plan], Sequence[Sequence[int]]]:
    """The try whose text the policy itself finds most probable."""

    def choose(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
        made = [job.honest_engine.generate(_requests(job, plan, flip=i), 1.0) for i in range(tries)]
        best = [
            max(row, key=lambda one: float(one.logprobs.mean())) for row in zip(*made, strict=True)
        ]
        return _tokens(best)

    return choose


def _cut(keep: Callable[[torch.Tensor], torch.Tensor]) -> Attack:
    """Only tokens of the mask `keep`(log-probabilities [N, V]) are drawn, with the right noise."""

    def choose(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
        engine: Any = job.bench.bare_engine(DTYPE)
        noise = sampling_torch.gumbel

        def cut(keys: torch.Tensor, places: torch.Tensor, vocabulary: int) -> torch.Tensor:
            drawn = noise(keys, places, vocabulary)
            return drawn.masked_fill(~keep(engine.model.lm_head.last), -torch.inf)

        def remember(layer: Any, _inputs: Any, output: torch.Tensor) -> None:
            layer.last = output.float().log_softmax(dim=-1)

        hook = engine.model.lm_head.register_forward_hook(remember)
        engine._noise = cut
        try:
            return _tokens(engine.generate(_requests(job, plan), job.bench.run.temperature))
        finally:
            engine._noise = noise
            hook.remove()

    return _retold(choose)


def _nucleus(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def keep(logprobs: torch.Tensor) -> torch.Tensor:
        ordered, places = logprobs.exp().sort(dim=-1, descending=True)
        inside = ordered.cumsum(dim=-1) - ordered < share
        return torch.zeros_like(inside).scatter(1, places, inside)

    return keep


def _top(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda logprobs: logprobs >= logprobs.topk(count, dim=-1).values[:, -1:]


# ── other tokens ─────────────────────────────────────────────────────────────────────────────────


def _small(job: Job, plan: Plan) -> list[tuple[int, ...]]:
    engine = _variant(job.bench.folder, "shallow")
    return _tokens(engine.generate(_requests(job, plan), job.bench.run.temperature))


def _half_small(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
    """Honest to the middle, then a shallower model from there (its noise starts anew)."""
    half = job.bench.run.max_output_tokens // 2
    honest = _tokens(build.generate_rows(plan, job.bench.run, job.honest_engine))
    asked = [
        GenerationRequest(row.prompt_tokens + text[:half], half, row.noise_key)
        for row, text in zip(plan, honest, strict=True)
    ]
    rest = _variant(job.bench.folder, "shallow").generate(asked, job.bench.run.temperature)
    return [
        text if len(text) < half else text[:half] + more.output_tokens
        for text, more in zip(honest, rest, strict=True)
    ]


def _foreign(share: float) -> Callable[[Job, Plan], Sequence[Sequence[int]]]:
    """So many tokens replaced by ones that a writer preferred."""

    def choose(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
        rng = np.random.default_rng(job.numbers.start)
        honest = _tokens(build.generate_rows(plan, job.bench.run, job.honest_engine))
        ends = job.honest_engine.end_tokens
        changed = []
        for text in honest:
            words = list(text)
            count = max(1, round(share * len(words)))
            for place in rng.choice(max(1, len(words) - 1), count, replace=False):
                token = int(rng.integers(3, job.honest_engine.vocabulary))
                words[place] = words[place] if token in ends else token
            changed.append(words)
        return changed

    return choose


def _early_end(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
    (end,) = job.honest_engine.end_tokens
    honest = _tokens(build.generate_rows(plan, job.bench.run, job.honest_engine))
    return [(*text[: len(text) // 2], end) for text in honest]


def _padded(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
    """Honest for three quarters, then one character to the limit."""
    limit = job.bench.run.max_output_tokens
    (dot,) = job.honest_engine.tokenizer.encode(".", add_special_tokens=False)
    honest = _tokens(build.generate_rows(plan, job.bench.run, job.honest_engine))
    kept = [text[: min(len(text) - 1, 3 * limit // 4)] for text in honest]
    return [text + (dot,) * (limit - len(text)) for text in kept]


def _paraphrased(job: Job) -> list[HonestFile]:
    """The true prompt is written down, another was given to the model."""
    (dot,) = job.honest_engine.tokenizer.encode(".", add_special_tokens=False)
    asked = [replace(row, prompt_tokens=(*row.prompt_tokens[:-1], dot)) for row in job.plan]
    return job.files(build.generate_rows(asked, job.bench.run, job.honest_engine))


# ── another file ─────────────────────────────────────────────────────────────────────────────────


def _changed(change: Change) -> Attack:
    def attack(job: Job) -> list[HonestFile]:
        return job.files(build.generate_rows(job.plan, job.bench.run, job.honest_engine), change)

    return attack


def _reward(rows: list[FileRow], plan: Plan, **_: Any) -> list[FileRow]:
    return [replace(rows[0], reward=rows[0].reward + 0.5), *rows[1:]]


def _logprobs(rows: list[FileRow], plan: Plan, **_: Any) -> list[FileRow]:
    return [replace(row, logprobs=row.logprobs - np.float32(0.1)) for row in rows]


def _copied(rows: list[FileRow], plan: Plan, **_: Any) -> list[FileRow]:
    """One row of each group, handed in for all its samples."""
    first = {row.group: row for row in reversed(rows)}
    return [replace(first[row.group], sample=row.sample) for row in rows]


def _forged(kind: str) -> Attack:
    def change(rows: list[FileRow], plan: Plan, *, made: Made, **_: Any) -> list[FileRow]:
        return forged_rows(rows, [g.states for g in made], FORGERIES[kind])

    return _changed(change)


def _by_a_copy(
    rows: list[FileRow], plan: Plan, *, job: Job, lease: HonestFile, made: Made
) -> list[FileRow]:
    """Proofs and sketches of a 4-bit copy's states beside honest tokens: the forger knows the
    projection, its keys and the calibration, and all but the policy's true states."""
    copy = _variant(job.bench.folder, "int4")
    replays = copy.replay(
        [
            ReplayRequest(row.prompt_tokens, g.output_tokens, row.noise_key)
            for row, g in zip(plan, made, strict=True)
        ],
        job.bench.run.temperature,
    )
    seed = seeds.lease_seed(lease.lease_digest)
    changed = []
    for row, found in zip(rows, replays, strict=True):
        windows = activations.split_windows(found.states)
        keys = build.sketch_keys(seed, row.group, row.sample, row.output_tokens)
        proofs = activations.pack(activations.build(windows))
        sketches = sketch.pack(sketch.build(windows, keys))
        changed.append(replace(row, proofs=proofs, sketch=sketches))
    return changed


def _as_vllm(attack: Attack) -> Attack:
    """The same, declared as vLLM's work, whose limits may be wider."""

    def relabelled(job: Job) -> list[HonestFile]:
        files = []
        for made in attack(job):
            file = read_rollout_file(made.data)
            data = write_rollout_file(file.rows, replace(file.metadata, engine=VLLM))
            files.append(replace(made, data=data))
        return files

    return relabelled


ATTACKS: dict[str, Attack] = {
    "t09": _temperature(0.9),
    "t095": _temperature(0.95),
    "t105": _temperature(1.05),
    "t11": _temperature(1.1),
    "topp95": _cut(_nucleus(0.95)),
    "topk10": _cut(_top(10)),
    "greedy": _retold(_greedy),
    "other_seed": _retold(_other_seed),
    "best_of_2": _retold(_best_of(2)),
    "best_of_4": _retold(_best_of(4)),
    **{name: _weights(name) for name in VARIANTS if name != "shallow"},
    "small_model": _retold(_small),
    "half_small": _retold(_half_small),
    "foreign1": _retold(_foreign(0.01)),
    "foreign2": _retold(_foreign(0.02)),
    "foreign5": _retold(_foreign(0.05)),
    "paraphrased": _paraphrased,
    "early_end": _retold(_early_end),
    "padded": _retold(_padded),
    "tampered_reward": _changed(_reward),
    "tampered_logprobs": _changed(_logprobs),
    "copied_rows": _changed(_copied),
    "forged_const": _forged("const"),
    "forged_modh": _forged("modh"),
    "forged_outlier": _forged("outlier"),
    "sign_flip": _forged("sign_flip"),
    "forged_by_copy": _changed(_by_a_copy),
}
ATTACKS |= {
    name + AS_VLLM: _as_vllm(ATTACKS[name])
    for name in ("t095", "topp95", "best_of_2", "int8", "int4", "kv8", "old10_1e4", "foreign5")
}
"""Every attack by the name that its rows have."""
MUST_CATCH = frozenset(
    {
        *("t09", "t11", "topp95", "greedy", "other_seed", "best_of_2", "best_of_4", "int4"),
        *("small_model", "half_small", "foreign5", "copied_rows", "tampered_reward"),
        *("forged_const", "forged_modh", "forged_outlier", "sign_flip", "old10_1e4"),
    }
)
"""Attacks of which at least 0.99 of the files have to be caught."""
