"""Attacks on rollout files, each the honest builder with one step replaced.

    sampling   another sampling rule; everything else computed by the true policy
    weights    another policy samples, proves and reports
    tokens     text from elsewhere, scored by the true policy (the right prefill)
    file       honest generation; rows, rewards, log-probabilities or proofs are changed

For tests, benchmarks, planted files and attacking nodes of the devnet; honest nodes never import
this. An attacker declares the set-up that an honest node would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from prime_engine.base import Generation, GenerationRequest
from prime_verify import build
from prime_verify.canaries.forgeries import FORGERIES, forged_rows
from prime_verify.canaries.scene import Rows, Scene, Text, Texts

Ending = Literal["slashed", "void", "unseen"]
"""Eventual outcome on the devnet: a slash, only lost pay, or no detection (see
docs/verification.md)."""


Make = Callable[[Scene], bytes]


@dataclass(frozen=True)
class Lie:
    """One attack, and its outcome on the devnet, whose nodes compute in float32."""

    make: Make
    ends: Ending = "slashed"


def _texts(made: Sequence[Generation]) -> list[Text]:
    return [Text(generation.output_tokens, generation.spans) for generation in made]


def _retold(choose: Callable[[Scene], Texts]) -> Make:
    """Tokens from `choose`, with the true policy's states and log-probabilities for them."""
    return lambda scene: scene.file(scene.score(choose(scene)))


def _changed(change: Callable[[Scene, Rows, Sequence[Generation]], Rows]) -> Make:
    """Honest generation, followed by a change of the rows."""

    def make(scene: Scene) -> bytes:
        made = scene.generate()
        return scene.file(made, lambda rows: change(scene, rows, made))

    return make


# ── other weights ────────────────────────────────────────────────────────────────────────────────


def _weights(name: str) -> Make:
    return lambda scene: scene.file(scene.generate(scene.variant(name)))


def _old_policy(scene: Scene) -> bytes:
    """An earlier policy instead of the leased one; honest if there is none."""
    return scene.file(scene.generate(scene.older()))


# ── other sampling ───────────────────────────────────────────────────────────────────────────────


def _temperature(scene: Scene, value: float) -> Texts:
    return _texts(scene.generate(temperature=value))


def _greedy(scene: Scene) -> Texts:
    return _texts(scene.generate(keyed=False))


def _other_seed(scene: Scene) -> Texts:
    return _texts(scene.generate(flip=1))


def _best_of(scene: Scene, tries: int) -> Texts:
    """The try with the highest reward; among equals, the one most probable under the policy."""
    made = [scene.generate(flip=flip) for flip in range(tries)]
    tokenizer = scene.engine.tokenizer
    paid = [build.grade_rows(scene.plan, one, scene.environment, tokenizer) for one in made]
    best = []
    for row in range(len(scene.plan)):
        key = [(paid[t][row], float(made[t][row].logprobs.mean())) for t in range(tries)]
        best.append(made[key.index(max(key))][row])
    return _texts(best)


def _cut(scene: Scene, keep: Callable[[Any], Any]) -> Texts:
    """Samples only tokens in the mask `keep`(log-probabilities [N, V]), with the correct noise.

    For the plain engine only, whose noise is wrapped during generation.
    """
    import torch

    engine: Any = scene.engine
    noise, head = engine._noise, engine.model.get_output_embeddings()
    seen: dict[str, Any] = {}

    def cut(keys: Any, places: Any, vocabulary: int) -> Any:
        drawn = noise(keys, places, vocabulary)
        return drawn.masked_fill(~keep(seen["logprobs"]), -torch.inf)

    def remember(_layer: Any, _inputs: Any, output: Any) -> None:
        logits = output.float() / scene.run.temperature
        seen["logprobs"] = logits.log_softmax(dim=-1)

    hook = head.register_forward_hook(remember)
    engine._noise = cut
    try:
        return _texts(scene.generate())
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


def _top(count: int) -> Callable[[Any], Any]:
    return lambda logprobs: logprobs >= logprobs.topk(count, dim=-1).values[:, -1:]


# ── other tokens ─────────────────────────────────────────────────────────────────────────────────


def _small(scene: Scene) -> Texts:
    return _texts(scene.generate(scene.variant("shallow")))


def _half_small(scene: Scene) -> Texts:
    """Honest for the first half of each row, then a smaller model with the correct noise."""
    honest = _texts(scene.generate())
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


def _foreign(scene: Scene, share: float) -> Texts:
    """Replaces this share of the last turn's tokens, at least one per row, by random others."""
    rng, ends = scene.rng, scene.engine.end_tokens

    def change(turn: tuple[int, ...]) -> list[int]:
        words = list(turn)
        count = max(1, round(share * len(words)))
        for place in rng.choice(max(1, len(words) - 1), min(count, len(words)), replace=False):
            token = int(rng.integers(3, scene.engine.vocabulary))
            words[place] = words[place] if {token, words[place]} & ends else token
        return words

    return [text.with_last_turn(change) for text in _texts(scene.generate())]


def _early_end(scene: Scene) -> Texts:
    """Ends each row in the middle of its last turn, as if the policy had chosen to."""
    end = min(scene.engine.end_tokens)
    return [
        text.with_last_turn(lambda turn: (*turn[: len(turn) // 2], end))
        for text in _texts(scene.generate())
    ]


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

    return [padded(text) for text in _texts(scene.generate())]


def _after_end(scene: Scene) -> Texts:
    """Continues each row after an end token."""
    end = min(scene.engine.end_tokens)
    return [
        text.with_last_turn(lambda turn: (*turn[:2], end, *turn[:2], end))
        for text in _texts(scene.generate())
    ]


def _paraphrased(scene: Scene) -> bytes:
    """Records the true prompt, but gives another to the model."""
    (dot,) = scene.engine.tokenizer.encode(".", add_special_tokens=False)
    asked = [replace(row, prompt_tokens=(*row.prompt_tokens[:-1], dot)) for row in scene.plan]
    return scene.file(scene.generate(plan=asked))


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


def _copied_proof(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    """Copies the proof of each group's first row to the group's other rows of that length."""
    first = {row.group: row for row in reversed(rows)}
    changed = []
    for row in rows:
        lender = first[row.group]
        fits = len(lender.proofs) == len(row.proofs)
        changed.append(replace(row, proofs=lender.proofs, sketch=lender.sketch) if fits else row)
    return changed


def _made_up(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    """Proofs and sketches of random activations of the right shape."""
    rng = scene.rng
    noise = [rng.normal(size=g.states.shape).astype(np.float32) for g in made]
    return scene.repack(rows, [(one.view(np.uint32) >> 16).astype(np.uint16) for one in noise])


def _forged(kind: str) -> Make:
    return _changed(
        lambda scene, rows, made: forged_rows(rows, [g.states for g in made], FORGERIES[kind])
    )


def _by_a_copy(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    """Proofs and sketches of a 4-bit copy's states with honest tokens: the forger knows the
    projection, its keys and the calibration, everything except the policy's true states."""
    found = scene.score(_texts(made), scene.variant("int4"))
    return scene.repack(rows, [one.states for one in found])


def _other_targets(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    return [replace(row, target_length=row.target_length + 4) for row in rows]


def _other_prompts(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    easier = rows[0]
    return [
        replace(row, prompt_tokens=easier.prompt_tokens, problem_id=easier.problem_id)
        for row in rows
    ]


def _copied_earlier(scene: Scene) -> bytes:
    """Answers of an earlier file, scored by the true policy: for the prompts they share, or for all
    if they share none. Honest if there is no earlier file."""
    made = scene.generate()
    earlier = scene.earlier
    if not earlier:
        return scene.file(made)
    known = {tuple(row.prompt_tokens): Text(row.output_tokens, row.spans) for row in earlier}
    prompts = [tuple(row.prompt_tokens) for row in scene.plan]
    if known.keys().isdisjoint(prompts):
        known = {prompt: list(known.values())[n % len(known)] for n, prompt in enumerate(prompts)}
    texts = [known.get(prompt, one) for prompt, one in zip(prompts, _texts(made), strict=True)]
    return scene.file(scene.score(texts))


def _truncated(scene: Scene) -> bytes:
    honest = scene.file(scene.generate())
    return honest[: len(honest) // 2]


LIES: Mapping[str, Lie] = {
    "t09": Lie(_retold(partial(_temperature, value=0.9))),
    "t095": Lie(_retold(partial(_temperature, value=0.95))),
    "t105": Lie(_retold(partial(_temperature, value=1.05))),
    "t11": Lie(_retold(partial(_temperature, value=1.1))),
    "topp95": Lie(_retold(partial(_cut, keep=_nucleus(0.95)))),
    "topk10": Lie(_retold(partial(_cut, keep=_top(10)))),
    "greedy": Lie(_retold(_greedy)),
    "other_seed": Lie(_retold(_other_seed)),
    "best_of_2": Lie(_retold(partial(_best_of, tries=2))),
    "best_of_4": Lie(_retold(partial(_best_of, tries=4))),
    "int8": Lie(_weights("int8")),
    "int4": Lie(_weights("int4")),
    "kv8": Lie(_weights("kv8")),
    "kv4": Lie(_weights("kv4")),
    **{
        f"old{steps}_1e{exponent}": Lie(
            _weights(f"old{steps}_1e{exponent}"), "unseen" if exponent == 6 else "slashed"
        )
        for steps in (1, 4, 10)
        for exponent in (4, 5, 6)
    },
    "old_policy": Lie(_old_policy),
    "small_model": Lie(_retold(_small)),
    "half_small": Lie(_retold(_half_small)),
    "foreign1": Lie(_retold(partial(_foreign, share=0.01))),
    "foreign2": Lie(_retold(partial(_foreign, share=0.02))),
    "foreign5": Lie(_retold(partial(_foreign, share=0.05))),
    "paraphrased": Lie(_paraphrased),
    "early_end": Lie(_retold(_early_end)),
    "padded": Lie(_retold(_padded)),
    "other_prompts": Lie(_changed(_other_prompts)),
    "other_targets": Lie(_changed(_other_targets)),
    "tampered_reward": Lie(_changed(_reward)),
    "tampered_logprobs": Lie(_changed(_logprobs)),
    "copied_rows": Lie(_changed(_copied)),
    "copied_earlier": Lie(_copied_earlier),
    "copied_proof": Lie(_changed(_copied_proof)),
    "made_up_proof": Lie(_changed(_made_up)),
    "forged_const": Lie(_forged("const")),
    "forged_modh": Lie(_forged("modh")),
    "forged_outlier": Lie(_forged("outlier")),
    "sign_flip": Lie(_forged("sign_flip")),
    "forged_by_copy": Lie(_changed(_by_a_copy)),
    "after_end": Lie(_retold(_after_end), "void"),
    "truncated": Lie(_truncated, "void"),
}
"""All attacks by name."""
