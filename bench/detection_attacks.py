"""Ways to lie about a rollout file, each the honest builder with one step replaced.

    sampling   another rule of drawing, everything else computed by the true policy
    weights    another policy draws, proves and reports: rounded ones, and older ones, by real
               optimizer steps (`old`) or by steps of ±rate in random directions (`random`)
    tokens     text from elsewhere, scored by the true policy (the right prefill)
    file       honest generation; rows, rewards, log-probabilities or proofs are changed

A liar works with the plain engine in bfloat16 and declares that, or vLLM, whose limits may be wider
(`as_vllm`). Several files are made at once, so that their rows share a batch; rows do not depend on
it beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.honest import Bench
from bench.kin import AGES, EXPONENTS, OLDER, smaller, stepped
from bench.lying import (
    DTYPE,
    Attack,
    Change,
    Job,
    Made,
    Plan,
    asked_of,
    retold,
    texts,
    variant,
)
from prime_core import seeds
from prime_engine.base import Engine, GenerationRequest, ReplayRequest
from prime_verify import build
from prime_verify.canaries.forgeries import FORGERIES, forged_rows
from prime_verify.proofs import activations, sampling_torch, sketch
from prime_verify.rollout_file import FileRow
from prime_verify.setups import HonestFile

# ── other weights ────────────────────────────────────────────────────────────────────────────────


def held_by_verifier(name: str, bench: Bench) -> Bench:
    """The bench whose policy is the leased one: where the lie is an older policy, a newer one."""
    if name not in _AGED:
        return bench
    return replace(bench, folder=stepped(bench.folder) / name.removeprefix("old"))


def _older(job: Job) -> Engine:
    """The policy from which the leased one was trained on."""
    return replace(job.bench, folder=job.bench.folder.parent / OLDER).engine(DTYPE)


def _by(engine: Callable[[Job], Engine]) -> Attack:
    """Everything by another engine, declared as the honest one."""

    def attack(job: Job) -> list[HonestFile]:
        return job.files(build.generate_rows(job.plan, job.bench.run, engine(job)))

    return attack


def _weights(name: str) -> Attack:
    return _by(lambda job: variant(job, name))


# ── other sampling ───────────────────────────────────────────────────────────────────────────────


def _temperature(value: float) -> Attack:
    return retold(lambda job, plan: texts(job.honest_engine.generate(asked_of(job, plan), value)))


def _greedy(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
    return texts(job.honest_engine.generate(asked_of(job, plan, keyed=False), 1.0))


def _other_seed(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
    return texts(job.honest_engine.generate(asked_of(job, plan, flip=1), 1.0))


def _best_of(tries: int) -> Callable[[Job, Plan], Sequence[Sequence[int]]]:
    """The try whose text the policy itself finds most probable."""

    def choose(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
        made = [job.honest_engine.generate(asked_of(job, plan, flip=i), 1.0) for i in range(tries)]
        best = [
            max(row, key=lambda one: float(one.logprobs.mean())) for row in zip(*made, strict=True)
        ]
        return texts(best)

    return choose


def _cut(keep: Callable[[torch.Tensor], torch.Tensor]) -> Attack:
    """Only tokens of the mask `keep`(log-probabilities [N, V]) are drawn, with the right noise."""

    def choose(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
        engine: Any = job.bench.bare_engine(DTYPE)
        head = engine.model.get_output_embeddings()
        noise = sampling_torch.gumbel

        def cut(seeds: torch.Tensor, places: torch.Tensor, vocabulary: int) -> torch.Tensor:
            drawn = noise(seeds, places, vocabulary)
            return drawn.masked_fill(~keep(head.last), -torch.inf)

        def remember(layer: Any, _inputs: Any, output: torch.Tensor) -> None:
            layer.last = output.float().log_softmax(dim=-1)

        hook = head.register_forward_hook(remember)
        engine._noise = cut
        try:
            return texts(engine.generate(asked_of(job, plan), job.bench.run.temperature))
        finally:
            engine._noise = noise
            hook.remove()

    return retold(choose)


def _nucleus(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def keep(logprobs: torch.Tensor) -> torch.Tensor:
        ordered, places = logprobs.exp().sort(dim=-1, descending=True)
        inside = ordered.cumsum(dim=-1) - ordered < share
        return torch.zeros_like(inside).scatter(1, places, inside)

    return keep


def _top(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda logprobs: logprobs >= logprobs.topk(count, dim=-1).values[:, -1:]


# ── other tokens ─────────────────────────────────────────────────────────────────────────────────


Other = Callable[[Job], Engine]


def _small(job: Job) -> Engine:
    """A smaller model, trained on the same text."""
    return replace(job.bench, folder=smaller(job.bench.folder)).engine(DTYPE)


def _shallow(job: Job) -> Engine:
    """The policy without the upper half of its layers."""
    return variant(job, "shallow")


def _by_other(other: Other) -> Callable[[Job, Plan], Sequence[Sequence[int]]]:
    return lambda job, plan: texts(
        other(job).generate(asked_of(job, plan), job.bench.run.temperature)
    )


def _half_by(other: Other) -> Callable[[Job, Plan], Sequence[Sequence[int]]]:
    """Honest to the middle, then another model from there, with the right noise."""

    def choose(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
        half = job.bench.run.max_output_tokens // 2
        honest = texts(build.generate_rows(plan, job.bench.run, job.honest_engine))
        asked = [
            GenerationRequest(row.prompt_tokens + text[:half], half, row.noise_seed)
            for row, text in zip(plan, honest, strict=True)
        ]
        rest = other(job).generate(asked, job.bench.run.temperature)
        return [
            text if len(text) <= half else text[:half] + more.output_tokens
            for text, more in zip(honest, rest, strict=True)
        ]

    return choose


def _foreign(share: float) -> Callable[[Job, Plan], Sequence[Sequence[int]]]:
    """So many tokens replaced by ones that a writer preferred."""

    def choose(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
        rng = np.random.default_rng(job.numbers.start)
        honest = texts(build.generate_rows(plan, job.bench.run, job.honest_engine))
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
    end = min(job.honest_engine.end_tokens)
    honest = texts(build.generate_rows(plan, job.bench.run, job.honest_engine))
    return [(*text[: len(text) // 2], end) for text in honest]


def _padded(job: Job, plan: Plan) -> Sequence[Sequence[int]]:
    """Honest for three quarters, then one character to the limit."""
    limit = job.bench.run.max_output_tokens
    *_, dot = job.honest_engine.tokenizer.encode(".", add_special_tokens=False)
    honest = texts(build.generate_rows(plan, job.bench.run, job.honest_engine))
    kept = [text[: min(len(text) - 1, 3 * limit // 4)] for text in honest]
    return [text + (dot,) * (limit - len(text)) for text in kept]


def _paraphrased(job: Job) -> list[HonestFile]:
    """The true prompt is written down, another was given to the model."""
    *_, dot = job.honest_engine.tokenizer.encode(".", add_special_tokens=False)
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
    """Proofs and sketches of a 4-bit copy's states next to honest tokens: the forger knows the
    projection, its keys and the calibration, and all but the policy's true states."""
    copy = variant(job, "int4")
    replays = copy.replay(
        [
            ReplayRequest(row.prompt_tokens, g.output_tokens, row.noise_seed)
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


_AGED = tuple(f"old{age}_1e{exponent}" for exponent in EXPONENTS for age in AGES)
ATTACKS: dict[str, Attack] = {
    "t09": _temperature(0.9),
    "t095": _temperature(0.95),
    "t105": _temperature(1.05),
    "t11": _temperature(1.1),
    "topp95": _cut(_nucleus(0.95)),
    "topk10": _cut(_top(10)),
    "greedy": retold(_greedy),
    "other_seed": retold(_other_seed),
    "best_of_2": retold(_best_of(2)),
    "best_of_4": retold(_best_of(4)),
    **{name: _weights(name) for name in ("int8", "int4", "kv8", "kv4")},
    **{name: _by(_older) for name in _AGED},
    "small_model": retold(_by_other(_small)),
    "half_small": retold(_half_by(_small)),
    "foreign1": retold(_foreign(0.01)),
    "foreign2": retold(_foreign(0.02)),
    "foreign5": retold(_foreign(0.05)),
    "paraphrased": _paraphrased,
    "early_end": retold(_early_end),
    "padded": retold(_padded),
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
    "shallow_model": retold(_by_other(_shallow)),
    "half_shallow": retold(_half_by(_shallow)),
    **{name.replace("old", "random"): _weights(name) for name in _AGED},
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
LYING_ROWS: dict[str, Callable[[int, int], bool]] = {
    "tampered_reward": lambda row, samples: row == 0,
    "copied_rows": lambda row, samples: row % samples > 0,
}
"""Which rows lie, by number and rows a group, where not all do."""
