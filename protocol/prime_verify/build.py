"""Builds the rollout file of a lease: plan → generate → grade → prove → Parquet.

The node's worker calls `build_rollout_file`; a validator plans the same rows from the same seed.
Each step is a separate function, so that tests and the devnet's attackers can replace exactly one.

A multi-turn row alternates between the model's tokens and the environment's:

    prompt │ model … end │ environment │ model … end │ environment │ model … end

The model's tokens are drawn with the row's noise at their absolute positions, as if the
environment's tokens were part of the prompt. The environment's tokens are a pure function of the
problem and the earlier turns, so a validator recomputes them and compares every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from prime_core import seeds
from prime_core.draws import SaltOpening
from prime_core.errors import PolicyError, UnavailableError
from prime_core.gateway import Answers, GatewayAnswer, GatewayCall, tokens_digest
from prime_core.ids import Digest
from prime_core.proof_form import PROOF_WINDOW, FinishReason
from prime_core.rollout import SCHEMA_VERSION, Rollout, model_ranges, model_tokens
from prime_core.run import MICRO, RunDefinition
from prime_core.task import Lease, SignedLease
from prime_engine.base import Engine, Generation, GenerationRequest, StateSink
from prime_envs.base import Environment, Problem, Reply
from prime_envs.tools import ToolCall
from prime_verify.proofs import activations, exact, sketch
from prime_verify.rollout_file import FileMetadata, FileRow, write_rollout_file


@dataclass(frozen=True)
class PlannedRow:
    """What the lease's seed dictates for one row."""

    group: int
    sample: int
    problem: Problem
    target_length: int
    prompt_tokens: tuple[int, ...]
    noise_seed: int

    def rollout(self, made: Generation, policy_version: int, reward: float) -> Rollout:
        """The row for training, without the way through a file and its verdict."""
        return Rollout(
            problem_id=self.problem.problem_id,
            group=self.group,
            sample=self.sample,
            prompt_tokens=self.prompt_tokens,
            output_tokens=made.output_tokens,
            logprobs=tuple(float(value) for value in made.logprobs),
            target_length=self.target_length,
            finish_reason=made.finish_reason,
            policy_version=policy_version,
            reward=reward,
            spans=made.spans,
        )


def problem_indices(seed: Digest, run: RunDefinition, opening: SaltOpening | None) -> list[int]:
    """Returns the environment's index of each group's problem; `seed`: the lease's.

    Held-out problems follow those to train on; after the last comes the first again.
    """
    groups, known = run.groups_per_lease, run.environment
    if opening is None or opening.heldout is None:
        drawn_from = seed if opening is None else opening.problems or seed
        return seeds.problem_indices(drawn_from, groups, known.train_size)
    first = opening.heldout
    if first >= known.heldout_size:
        raise PolicyError(
            f"the lease asks held-out problem {first}; the run has {known.heldout_size} of them"
        )
    return [known.train_size + (first + group) % known.heldout_size for group in range(groups)]


def plan_rows(
    lease: Lease,
    lease_digest: Digest,
    run: RunDefinition,
    environment: Environment,
    tokenizer: Any,
    opening: SaltOpening | None = None,
) -> list[PlannedRow]:
    """Returns the rows of a lease, sorted by (group, sample). `opening`: the lease's, which may
    name other problems than its own seed draws; None: it names none."""
    seed = seeds.lease_seed(lease_digest)
    indices = problem_indices(seed, run, opening)
    rows = []
    for group, index in enumerate(indices):
        problem, prompt = environment.ask(index, lease.target, tokenizer)
        for sample in range(run.samples_per_group):
            key = seeds.noise_seed(seed, group, sample)
            rows.append(PlannedRow(group, sample, problem, lease.target, prompt, key))
    return rows


def generate_rows(
    plan: Sequence[PlannedRow],
    run: RunDefinition,
    engine: Engine,
    sink: StateSink | None = None,
    environment: Environment | None = None,
    answers: Answers | None = None,
) -> list[Generation]:
    """Generates every planned row with its noise, at the run's temperature and length limit.

    `environment` answers the turns of a run with `conversation`, and is required only there.
    `answers` is where the answers to calls of the gateway's tools come from; without it, rows with
    such a call end there as `tool_limit`.
    """
    if run.conversation is not None:
        if environment is None:
            raise ValueError("a run with conversation needs its environment to generate rows")
        return converse(plan, run, engine, environment, sink, answers)
    requests = [
        GenerationRequest(row.prompt_tokens, run.max_output_tokens, row.noise_seed) for row in plan
    ]
    return engine.generate(requests, run.temperature, sink)


def reply_to(
    row: PlannedRow,
    run: RunDefinition,
    environment: Environment,
    tokenizer: Any,
    output_tokens: Sequence[int],
    spans: Sequence[int],
    answers: Answers | None = None,
) -> Reply:
    """Returns the environment's reply to a model span that ended with an end token; empty after the
    run's last turn.

    `output_tokens` ends with that end token; `spans` are the span lengths, model first and last;
    `answers`: see generate_rows. Raises what `answers` raises.
    """
    if run.conversation is None or len(spans) // 2 + 1 >= run.conversation.turns:
        return Reply()

    def ask(call: ToolCall) -> GatewayAnswer | None:
        if answers is None:
            return None
        return answers.answer(
            GatewayCall(
                group=row.group,
                sample=row.sample,
                turn=len(spans) // 2,
                prefix=tokens_digest(row.prompt_tokens, output_tokens),
                tool=call.tool,
                arguments=dict(call.arguments),
            )
        )

    return environment.reply(row.problem, row.target_length, output_tokens, spans, tokenizer, ask)


def fits(run: RunDefinition, output_tokens: Sequence[int], reply: Sequence[int]) -> bool:
    """Whether a reply plus one more model token fit into the row."""
    return len(output_tokens) + len(reply) < run.max_output_tokens


@dataclass
class _Row:
    """A conversation in progress."""

    tokens: list[int]
    spans: list[int]
    logprobs: list[np.ndarray[Any, np.dtype[np.float32]]]
    states: list[np.ndarray[Any, np.dtype[np.uint16]]]
    finish_reason: FinishReason = "length"
    gateway: list[GatewayAnswer] = field(default_factory=list)


@dataclass(frozen=True)
class _TurnSink:
    """Forwards the states of one turn, with each row's own number and its tokens' positions among
    all tokens that the model generated."""

    sink: StateSink
    numbers: Sequence[int]
    generated: Sequence[int]

    def step(self, rows: Sequence[int], places: Sequence[int], tokens: Any, states: Any) -> None:
        """See StateSink."""
        shifted = [self.generated[row] + place for row, place in zip(rows, places, strict=True)]
        self.sink.step([self.numbers[row] for row in rows], shifted, tokens, states)

    def end(self, rows: Sequence[int]) -> None:
        """Does nothing at the end of a turn, because only `converse` knows which rows continue."""


def converse(
    plan: Sequence[PlannedRow],
    run: RunDefinition,
    engine: Engine,
    environment: Environment,
    sink: StateSink | None = None,
    answers: Answers | None = None,
) -> list[Generation]:
    """Generates every planned row turn by turn; all rows advance together.

    Returns one Generation per row: `logprobs` [T] with 0 for the environment's tokens, `states` [M]
    of the model's tokens only (see StateSink for `sink`, generate_rows for `answers`). Raises the
    same errors as Engine.generate, and what `answers` raises.
    """
    assert run.conversation is not None
    rows = [_Row([], [], [], []) for _ in plan]
    going = list(range(len(plan)))
    while going:
        requests = [
            GenerationRequest(
                prompt_tokens=plan[n].prompt_tokens + tuple(rows[n].tokens),
                max_output_tokens=run.max_output_tokens - len(rows[n].tokens),
                noise_seed=plan[n].noise_seed,
            )
            for n in going
        ]
        turn = None
        if sink is not None:
            turn = _TurnSink(sink, going, [sum(rows[n].spans[::2]) for n in going])
        still = []
        for n, made in zip(going, engine.generate(requests, run.temperature, turn), strict=True):
            row = rows[n]
            row.tokens += made.output_tokens
            row.spans.append(len(made.output_tokens))
            row.logprobs.append(made.logprobs)
            row.states.append(made.states)
            row.finish_reason = made.finish_reason
            if made.finish_reason != "end":
                continue
            said = reply_to(
                plan[n], run, environment, engine.tokenizer, row.tokens, row.spans, answers
            )
            reply = said.tokens
            if said.answer is not None:
                row.gateway.append(said.answer)
            if said.unanswered:
                row.finish_reason = "tool_limit"
            elif not fits(run, row.tokens, reply):
                row.finish_reason = "length" if reply else "end"
            elif reply:
                row.tokens += reply
                row.spans.append(len(reply))
                row.logprobs.append(np.zeros(len(reply), dtype=np.float32))
                still.append(n)
        if sink is not None:
            sink.end([n for n in going if n not in still])
        going = still
    return [
        Generation(
            output_tokens=tuple(row.tokens),
            logprobs=np.concatenate(row.logprobs),
            states=np.concatenate(row.states),
            finish_reason=row.finish_reason,
            spans=tuple(row.spans) if len(row.spans) > 1 else (),
            gateway=tuple(row.gateway),
        )
        for row in rows
    ]


def generate_proved(
    lease_digest: Digest,
    plan: Sequence[PlannedRow],
    run: RunDefinition,
    engine: Engine,
    environment: Environment | None = None,
    answers: Answers | None = None,
) -> tuple[list[Generation], list[tuple[bytes, bytes]]]:
    """Combines `generate_rows` and `prove_rows`: each window is proved as soon as it is full, so
    that no states are kept."""
    from prime_verify.proofs.windows import WindowReducer  # torch, only needed here

    seed = seeds.lease_seed(lease_digest)

    def key_of(row: int, window: int, tokens: Sequence[int]) -> bytes:
        return seeds.sketch_key(seed, plan[row].group, plan[row].sample, window, tokens)

    reducer = WindowReducer(key_of)
    generations = generate_rows(plan, run, engine, reducer, environment, answers)
    proofs = [reducer.proof(row) for row in range(len(plan))]
    return generations, [(proof.proofs, proof.sketch) for proof in proofs]


def prove_exactly(
    lease_digest: Digest,
    plan: Sequence[PlannedRow],
    run: RunDefinition,
    engine: Engine,
    generations: Sequence[Generation],
) -> tuple[list[Generation], list[bytes]]:
    """Runs the proof pass of every row. Returns the rows with its log-probabilities, and the
    digests of its windows (proofs.exact)."""
    seed = seeds.lease_seed(lease_digest)
    proved, digests = [], []
    for row, made in zip(plan, generations, strict=True):
        ranges = model_ranges(made.spans, len(made.output_tokens))
        places = np.concatenate([np.arange(start, end) for start, end in ranges])
        own = model_tokens(made.output_tokens, made.spans)
        keys = sketch_keys(seed, row.group, row.sample, own)
        parts = engine.proof_pass(row.prompt_tokens, made.output_tokens, run.temperature)
        found = exact.commit(parts, places, keys)
        logprobs = np.zeros(len(made.output_tokens), dtype=np.float32)
        logprobs[places] = found.logprobs
        proved.append(replace(made, logprobs=logprobs))
        digests.append(found.digests)
    return proved, digests


def sketch_keys(seed: Digest, group: int, sample: int, tokens: Sequence[int]) -> list[bytes]:
    """Returns the sketch key of each proof window of a row; `tokens` are those that the model
    generated."""
    width = PROOF_WINDOW
    return [
        seeds.sketch_key(seed, group, sample, window, tokens[window * width :][:width])
        for window in range(activations.windows_of(len(tokens)))
    ]


def prove_rows(
    lease_digest: Digest, plan: Sequence[PlannedRow], generations: Sequence[Generation]
) -> list[tuple[bytes, bytes]]:
    """Returns (activation proofs, sketch) of each row, packed in file format."""
    seed = seeds.lease_seed(lease_digest)
    windows = [activations.split_windows(g.states) for g in generations]
    proofs = iter(activations.build([window for row in windows for window in row]))
    packed = []
    for row, generation, parts in zip(plan, generations, windows, strict=True):
        own_tokens = model_tokens(generation.output_tokens, generation.spans)
        keys = sketch_keys(seed, row.group, row.sample, own_tokens)
        own_proofs = activations.pack([next(proofs) for _ in parts])
        packed.append((own_proofs, sketch.pack(sketch.build(parts, keys))))
    return packed


def grade_rows(
    plan: Sequence[PlannedRow],
    generations: Sequence[Generation],
    environment: Environment,
    tokenizer: Any,
) -> list[float]:
    """Returns the node's own reward of each row; a validator regrades them."""
    return [
        environment.grade_output(
            row.problem, row.target_length, generation.output_tokens, tokenizer, generation.spans
        ).reward_micro
        / MICRO
        for row, generation in zip(plan, generations, strict=True)
    ]


def assemble_rows(
    signed: SignedLease,
    plan: Sequence[PlannedRow],
    generations: Sequence[Generation],
    rewards: Sequence[float],
    proofs: Sequence[tuple[bytes, bytes]],
    digests: Sequence[bytes] = (),
) -> list[FileRow]:
    """Combines the results of all steps into file rows; `digests` for an exact class only."""
    return [
        FileRow(
            problem_id=row.problem.problem_id,
            group=row.group,
            sample=row.sample,
            prompt_tokens=row.prompt_tokens,
            output_tokens=generation.output_tokens,
            logprobs=generation.logprobs,
            target_length=row.target_length,
            finish_reason=generation.finish_reason,
            policy_version=signed.policy_version,
            reward=reward,
            proofs=activation_proofs,
            sketch=row_sketch,
            spans=generation.spans,
            gateway=generation.gateway,
            digests=digest,
        )
        for row, generation, reward, (activation_proofs, row_sketch), digest in zip(
            plan, generations, rewards, proofs, digests or [b""] * len(plan), strict=True
        )
    ]


def metadata_of(
    lease_digest: Digest,
    engine: Engine,
    run: RunDefinition | None = None,
    numeric_class: Digest | None = None,
) -> FileMetadata:
    """The metadata of a file made with `engine`; without `run`, of a file without conversation;
    `numeric_class` as in the lease."""
    return FileMetadata(
        lease=lease_digest,
        engine=engine.name,
        dtype=engine.dtype,
        device=engine.device,
        schema_version=SCHEMA_VERSION if run is None else run.file_schema,
        numeric_class=numeric_class or "",
    )


def build_rollout_file(
    signed: SignedLease,
    lease_digest: Digest,
    run: RunDefinition,
    engine: Engine,
    environment: Environment,
    answers: Answers | None = None,
) -> bytes:
    """Builds the honest rollout file of one lease, as Parquet bytes.

    `engine` has the policy `signed.policy_version` loaded; `lease_digest` is the EIP-712 digest of
    `signed.lease` under the pool's Work domain; `answers`: see generate_rows. Raises
    UnavailableError if the lease names an exact class that is not this engine's.
    """
    numeric_class = signed.numeric_class()
    if numeric_class is not None and engine.numeric_class().digest() != numeric_class:
        raise UnavailableError("this machine with this policy is not of the lease's exact class")
    plan = plan_rows(signed.lease, lease_digest, run, environment, engine.tokenizer, signed.opening)
    generations, proofs = generate_proved(lease_digest, plan, run, engine, environment, answers)
    digests: list[bytes] = []
    if numeric_class is not None:
        generations, digests = prove_exactly(lease_digest, plan, run, engine, generations)
    rewards = grade_rows(plan, generations, environment, engine.tokenizer)
    rows = assemble_rows(signed, plan, generations, rewards, proofs, digests)
    return write_rollout_file(rows, metadata_of(lease_digest, engine, run, numeric_class))
