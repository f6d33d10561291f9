"""All lies of the devnet's nodes by name, with the expected ending (`python -m devnet kinds`).

Those of planted files (prime_verify/canaries/lies.py), weaker forms of them, and those that one
file does not show or that have a check of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from prime_engine.base import Engine, Generation
from prime_verify.canaries.lies import (
    PLANTED,
    best_of,
    changed,
    cut,
    foreign,
    forged,
    other_tokens,
    temperature,
    texts,
    top,
    weights,
)
from prime_verify.canaries.scene import Rows, Scene, Text, Texts
from prime_verify.rollout_file import FileRow

Ending = Literal["slashed", "void", "unseen"]
"""Eventual outcome on the devnet: a slash, only lost pay, or no detection (see
docs/verification.md)."""


@dataclass(frozen=True)
class LongScene(Scene):
    """A scene of a node that keeps what it had before: an earlier policy, if one is available, and
    the rows of its previous file."""

    older: Callable[[], Engine | None]
    earlier: Sequence[FileRow] = ()


@dataclass(frozen=True)
class Lie:
    """One attack, and its outcome on the devnet, whose nodes compute in float32."""

    make: Callable[[LongScene], bytes]
    ends: Ending = "slashed"


def _old_policy(scene: LongScene) -> bytes:
    """An earlier policy instead of the leased one; honest if there is none."""
    return scene.file(scene.generate(scene.older()))


def _early_end(scene: Scene) -> Texts:
    """Ends each row in the middle of its last turn, as if the policy had chosen to."""
    end = min(scene.engine.end_tokens)
    return [
        text.with_last_turn(lambda turn: (*turn[: len(turn) // 2], end))
        for text in texts(scene.generate())
    ]


def _after_end(scene: Scene) -> Texts:
    """Continues each row after an end token."""
    end = min(scene.engine.end_tokens)
    return [
        text.with_last_turn(lambda turn: (*turn[:2], end, *turn[:2], end))
        for text in texts(scene.generate())
    ]


def _paraphrased(scene: Scene) -> bytes:
    """Records the true prompt, but gives another to the model."""
    (dot,) = scene.engine.tokenizer.encode(".", add_special_tokens=False)
    asked = [replace(row, prompt_tokens=(*row.prompt_tokens[:-1], dot)) for row in scene.plan]
    return scene.file(scene.generate(plan=asked))


def _copied_proof(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    """Copies the proof of each group's first row to the group's other rows of that length."""
    first = {row.group: row for row in reversed(rows)}
    changed = []
    for row in rows:
        source = first[row.group]
        fits = len(source.proofs) == len(row.proofs)
        changed.append(replace(row, proofs=source.proofs, sketch=source.sketch) if fits else row)
    return changed


def _made_up(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    """Proofs and sketches of random activations of the right shape."""
    rng = scene.rng
    noise = [rng.normal(size=g.states.shape).astype(np.float32) for g in made]
    return scene.repack(rows, [(one.view(np.uint32) >> 16).astype(np.uint16) for one in noise])


def _other_targets(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    return [replace(row, target_length=row.target_length + 4) for row in rows]


def _other_prompts(scene: Scene, rows: Rows, made: Sequence[Generation]) -> Rows:
    easier = rows[0]
    return [
        replace(row, prompt_tokens=easier.prompt_tokens, problem_id=easier.problem_id)
        for row in rows
    ]


def _copied_earlier(scene: LongScene) -> bytes:
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
    copied = [known.get(prompt, one) for prompt, one in zip(prompts, texts(made), strict=True)]
    return scene.file(scene.score(copied))


def _truncated(scene: Scene) -> bytes:
    honest = scene.file(scene.generate())
    return honest[: len(honest) // 2]


LIES: Mapping[str, Lie] = {
    **{name: Lie(make) for name, make in PLANTED.items()},
    "t095": Lie(other_tokens(partial(temperature, value=0.95))),
    "t105": Lie(other_tokens(partial(temperature, value=1.05))),
    "topk10": Lie(other_tokens(partial(cut, keep=top(10)))),
    "best_of_2": Lie(other_tokens(partial(best_of, tries=2))),
    "int8": Lie(weights("int8")),
    "kv8": Lie(weights("kv8")),
    "kv4": Lie(weights("kv4")),
    **{
        f"old{steps}_1e{exponent}": Lie(
            weights(f"old{steps}_1e{exponent}"), "unseen" if exponent == 6 else "slashed"
        )
        for steps in (1, 4, 10)
        for exponent in (4, 5, 6)
    },
    "old_policy": Lie(_old_policy),
    "foreign1": Lie(other_tokens(partial(foreign, share=0.01))),
    "foreign2": Lie(other_tokens(partial(foreign, share=0.02))),
    "paraphrased": Lie(_paraphrased),
    "early_end": Lie(other_tokens(_early_end)),
    "other_prompts": Lie(changed(_other_prompts)),
    "other_targets": Lie(changed(_other_targets)),
    "copied_earlier": Lie(_copied_earlier),
    "copied_proof": Lie(changed(_copied_proof)),
    "made_up_proof": Lie(changed(_made_up)),
    "forged_outlier": Lie(forged("outlier")),
    "after_end": Lie(other_tokens(_after_end), "void"),
    "truncated": Lie(_truncated, "void"),
}
"""All attacks by name."""
