"""Attacks on rollout files, each the honest builder with one step replaced.

    sampling   another sampling rule; everything else computed by the true policy
    weights    another policy samples, proves and reports
    tokens     text from elsewhere, scored by the true policy (the right prefill)
    file       honest generation; rows, rewards, log-probabilities or proofs are changed

For planted files, and for the devnet, which has more (devnet/kinds.py); honest nodes never import
this. An attacker declares the setup that an honest node would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from prime_engine.base import Generation, GenerationRequest
from prime_verify import build
from prime_verify.canaries.forgeries import FORGERIES, forged_rows
from prime_verify.canaries.scene import Rows, Scene, Text, Texts

Make = Callable[[Scene], bytes]


def texts(made: Sequence[Generation]) -> list[Text]:
    return [Text(generation.output_tokens, generation.spans) for generation in made]


def other_tokens(choose: Callable[[Scene], Texts]) -> Make:
    """Tokens from `choose`, with the true policy's states and log-probabilities for them."""
    return lambda scene: scene.file(scene.score(choose(scene)))


def changed(change: Callable[[Scene, Rows, Sequence[Generation]], Rows]) -> Make:
    """Honest generation, followed by a change of the rows."""

    def make(scene: Scene) -> bytes:
        made = scene.generate()
        return scene.file(made, lambda rows: change(scene, rows, made))

    return make


# ── other weights ────────────────────────────────────────────────────────────────────────────────


def weights(name: str) -> Make:
    return lambda scene: scene.file(scene.generate(scene.variant(name)))


# ── other sampling ───────────────────────────────────────────────────────────────────────────────


def temperature(scene: Scene, value: float) -> Texts:
    return texts(scene.generate(temperature=value))


def _greedy(scene: Scene) -> Texts:
    return texts(scene.generate(keyed=False))


def _other_seed(scene: Scene) -> Texts:
    return texts(scene.generate(flip=1))


def best_of(scene: Scene, tries: int) -> Texts:
    """The try with the highest reward; among equals, the one most probable under the policy."""
    made = [scene.generate(flip=flip) for flip in range(tries)]
    tokenizer = scene.engine.tokenizer
    paid = [build.grade_rows(scene.plan, one, scene.environment, tokenizer) for one in made]
    best = []
    for row in range(len(scene.plan)):
        key = [(paid[t][row], float(made[t][row].logprobs.mean())) for t in range(tries)]
        best.append(made[key.index(max(key))][row])
    return texts(best)


def cut(scene: Scene, keep: Callable[[Any], Any]) -> Texts:
    """Samples only tokens in the mask `keep`(log-probabilities [N, V]), with the correct noise.

    For the plain engine only, whose noise is wrapped during generation.
    """
    import torch

    engine: Any = scene.engine
    noise, head = engine._noise, engine.model.get_output_embeddings()
    seen: dict[str, Any] = {}

    def kept(keys: Any, places: Any, vocabulary: int) -> Any:
        drawn = noise(keys, places, vocabulary)
        return drawn.masked_fill(~keep(seen["logprobs"]), -torch.inf)

    def remember(_layer: Any, _inputs: Any, output: Any) -> None:
        logits = output.float() / scene.run.temperature
        seen["logprobs"] = logits.log_softmax(dim=-1)

    hook = head.register_forward_hook(remember)
    engine._noise = kept
    try:
        return texts(scene.generate())
    finally:
        engine._noise = noise
        hook.remove()


def _nucleus(share: float) -> Callable[[Any], Any]:
    def keep(logprobs: Any) -> Any:
        import torch

        ordered, places = logprobs.exp().sort(dim=-1, descending=True)
        inside = ordered.cumsum(dim=-1) - ordered < share
        return torch.zeros_like(inside).scatter(1, places, inside)

    return keep


def top(count: int) -> Callable[[Any], Any]:
    return lambda logprobs: logprobs >= logprobs.topk(count, dim=-1).values[:, -1:]


# ── other tokens ─────────────────────────────────────────────────────────────────────────────────


def _small(scene: Scene) -> Texts:
    return texts(scene.generate(scene.variant("shallow")))


def _half_small(scene: Scene) -> Texts:
    """Honest for the first half of each row, then a smaller model with the correct noise."""
    honest = texts(scene.generate())
    heads = [text.with_last_turn(lambda turn: turn[: max(1, len(turn) // 2)]) for text in honest]
    asked = [
        GenerationRequest(
            row.prompt_tokens + head.tokens,
            scene.run.max_output_tokens - len(head.tokens),
            row.noise_seed,
        )
        for row, head in zip(scene.plan, heads, strict=True)
    ]
    rest = scene.variant("shallow").generate(asked, scene.run.temperature)
    return [
        head
        if head.tokens[-1] in scene.engine.end_tokens
        else head.with_last_turn(lambda turn, more=more: turn + more.output_tokens)  # type: ignore[misc]
        for head, more in zip(heads, rest, strict=True)
    ]


def foreign(scene: Scene, share: float) -> Texts:
    """Replaces this share of the last turn's tokens, at least one per row, by random others."""
    rng, ends = scene.rng, scene.engine.end_tokens

    def change(turn: tuple[int, ...]) -> list[int]:
        words = list(turn)
        count = max(1, round(share * len(words)))
        for place in rng.choice(max(1, len(words) - 1), min(count, len(words)), replace=False):
            token = int(rng.integers(3, scene.engine.vocabulary))
            words[place] = words[place] if {token, words[place]} & ends else token
        return words

    return [text.with_last_turn(change) for text in texts(scene.generate())]


def _padded(scene: Scene) -> Texts:
    """Honest for three quarters of the last turn, then one repeated character up to the limit."""
    limit = scene.run.max_output_tokens
    (dot,) = scene.engine.tokenizer.encode(".", add_special_tokens=False)

    def padded(text: Text) -> Text:
        start = sum(text.spans[:-1])
        keep = min(len(text.tokens) - 1 - start, 3 * (limit - start) // 4)
        return text.with_last_turn(
            lambda turn: turn[:keep] + (dot,) * (limit - start - len(turn[:keep]))
        )

    return [padded(text) for text in texts(scene.generate())]


# ── another file ─────────────────────────────────────────────────────────────────────────────────


def _reward(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    return [replace(rows[0], reward=rows[0].reward + 0.5), *rows[1:]]


def _logprobs(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    return [
        replace(
            row, logprobs=np.where(row.logprobs == 0, np.float32(0), row.logprobs - np.float32(0.1))
        )
        for row in rows
    ]


def _copied(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    """Submits one row of each group for all of its samples."""
    first = {row.group: row for row in reversed(rows)}
    return [replace(first[row.group], sample=row.sample) for row in rows]


def forged(kind: str) -> Make:
    return changed(
        lambda scene, rows, made: forged_rows(rows, [g.states for g in made], FORGERIES[kind])
    )


def _by_a_copy(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    """Proofs and sketches of a 4-bit copy's states with honest tokens: the forger knows the
    projection, its keys and the calibration, everything except the policy's true states."""
    found = scene.score(texts(made), scene.variant("int4"))
    return scene.repack(rows, [one.states for one in found])


PLANTED: Mapping[str, Make] = {
    "t09": other_tokens(partial(temperature, value=0.9)),
    "t11": other_tokens(partial(temperature, value=1.1)),
    "topp95": other_tokens(partial(cut, keep=_nucleus(0.95))),
    "greedy": other_tokens(_greedy),
    "other_seed": other_tokens(_other_seed),
    "best_of_4": other_tokens(partial(best_of, tries=4)),
    "int4": weights("int4"),
    "small_model": other_tokens(_small),
    "half_small": other_tokens(_half_small),
    "foreign5": other_tokens(partial(foreign, share=0.05)),
    "padded": other_tokens(_padded),
    "tampered_reward": changed(_reward),
    "tampered_logprobs": changed(_logprobs),
    "copied_rows": changed(_copied),
    "forged_const": forged("const"),
    "forged_modh": forged("modh"),
    "sign_flip": forged("sign_flip"),
    "forged_by_copy": changed(_by_a_copy),
}
"""The attacks of planted files by name (planting.PLANTED_LIES)."""
