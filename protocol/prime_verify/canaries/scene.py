"""Resources of an attacker: one lease, the true policy, altered copies of it, the honest builder.

For planted files and attacking nodes of the devnet; see lies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from prime_core import seeds
from prime_core.ids import Digest
from prime_core.proof_form import FinishReason
from prime_core.rollout import model_ranges
from prime_core.run import MICRO, RunDefinition
from prime_core.task import SignedLease
from prime_engine.base import Engine, Generation, ReplayRequest
from prime_envs.base import Environment
from prime_verify import build
from prime_verify.build import PlannedRow
from prime_verify.proofs import activations, sketch
from prime_verify.rollout_file import FileRow, write_rollout_file

Plan = Sequence[PlannedRow]


@dataclass(frozen=True)
class Text:
    """A row's output tokens, and its spans in a conversation (prime_core.rollout.SCHEMAS)."""

    tokens: tuple[int, ...]
    spans: tuple[int, ...] = ()

    def with_last_turn(self, change: Callable[[tuple[int, ...]], Sequence[int]]) -> Text:
        """The same text with the model's last turn changed."""
        start = sum(self.spans[:-1])
        last = tuple(change(self.tokens[start:]))
        return Text(self.tokens[:start] + last, (*self.spans[:-1], len(last)) if self.spans else ())


Texts = Sequence[Text]
Rows = list[FileRow]


@dataclass(frozen=True)
class Scene:
    """One lease to attack. `engine` holds its policy; `variant(name)` returns the same with altered
    weights (prime_engine.variants)."""

    signed: SignedLease
    digest: Digest
    run: RunDefinition
    environment: Environment
    engine: Engine
    variant: Callable[[str], Engine]

    @cached_property
    def plan(self) -> list[PlannedRow]:
        """The rows that the seed dictates."""
        return build.plan_rows(
            self.signed.lease,
            self.digest,
            self.run,
            self.environment,
            self.engine.tokenizer,
            self.signed.opening,
        )

    @property
    def rng(self) -> np.random.Generator:
        """A random generator seeded by the lease."""
        return np.random.default_rng(int(self.digest[2:18], 16))

    def generate(
        self,
        engine: Engine | None = None,
        temperature: float | None = None,
        *,
        keyed: bool = True,
        flip: int = 0,
        plan: Plan | None = None,
    ) -> list[Generation]:
        """Generates the plan, by default like an honest node, with all turns of a conversation.
        `keyed` False drops the noise, `flip` alters its seed."""
        engine = engine or self.engine
        run = self.run
        if temperature is not None:
            run = run.model_copy(update={"temperature_micro": round(temperature * MICRO)})
        rows = [
            replace(row, noise_seed=row.noise_seed ^ flip if keyed else None)  # type: ignore[arg-type]
            for row in plan or self.plan
        ]
        return build.generate_rows(rows, run, engine, environment=self.environment)

    def score(self, texts: Texts, engine: Engine | None = None) -> list[Generation]:
        """States and log-probabilities for given tokens, as if the true policy had sampled them."""
        engine = engine or self.engine
        replays = engine.replay(
            [
                ReplayRequest(row.prompt_tokens, text.tokens, row.noise_seed)
                for row, text in zip(self.plan, texts, strict=True)
            ],
            self.run.temperature,
        )
        scored = []
        for row, text, found in zip(self.plan, texts, replays, strict=True):
            places = np.concatenate(
                [np.arange(a, b) for a, b in model_ranges(text.spans, len(text.tokens))]
            )
            logprobs = np.zeros_like(found.logprobs)
            logprobs[places] = found.logprobs[places]
            ending = self._ending(row, text)
            scored.append(
                Generation(text.tokens, logprobs, found.states[places], ending, text.spans)
            )
        return scored

    def _ending(self, row: PlannedRow, text: Text) -> FinishReason:
        """How an honest row with these tokens ends."""
        if text.tokens[-1] not in self.engine.end_tokens:
            return "length"
        spans = text.spans or (len(text.tokens),)
        reply = build.reply_to(
            row, self.run, self.environment, self.engine.tokenizer, text.tokens, spans
        ).tokens
        return "length" if reply and not build.fits(self.run, text.tokens, reply) else "end"

    def file(
        self, generations: Sequence[Generation], change: Callable[[Rows], Rows] | None = None
    ) -> bytes:
        """Builds the file of `generations`, graded and proved honestly; `change` may alter its
        rows."""
        rewards = build.grade_rows(self.plan, generations, self.environment, self.engine.tokenizer)
        proofs = build.prove_rows(self.digest, self.plan, generations)
        rows = build.assemble_rows(self.signed, self.plan, generations, rewards, proofs)
        return write_rollout_file(
            change(rows) if change else rows, build.metadata_of(self.digest, self.engine, self.run)
        )

    def repack(self, rows: Rows, states: Sequence[Any]) -> Rows:
        """`rows` with proofs and sketches built from `states` (uint16 [T, H] each)."""
        made = [
            replace_states(self.digest, row, of_row)
            for row, of_row in zip(rows, states, strict=True)
        ]
        return [
            replace(row, proofs=proofs, sketch=sketches)
            for row, (proofs, sketches) in zip(rows, made, strict=True)
        ]


def replace_states(digest: Digest, row: FileRow, states: Any) -> tuple[bytes, bytes]:
    """(proofs, sketch) of `row`, packed, as if `states` were its own."""
    windows = activations.split_windows(states)
    keys = build.sketch_keys(seeds.lease_seed(digest), row.group, row.sample, row.model_tokens)
    return activations.pack(activations.build(windows)), sketch.pack(sketch.build(windows, keys))
