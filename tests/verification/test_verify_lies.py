"""Lies about a rollout file are found, and named, at the shipped thresholds.

Variants that the devnet's nodes do not play; test_lies_by_name has those that they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_core.seeds import lease_seed
from prime_core.verdict import Outcome, Reason
from prime_engine.base import Generation, GenerationRequest, ReplayRequest
from prime_engine.variants import quantizer
from prime_verify import build
from prime_verify.checks import NOISE_SPAN, least_logprob
from prime_verify.engines import load_engine
from prime_verify.proofs import activations, sampling, sketch
from prime_verify.rollout_file import FileRow

TRAINED = Path(__file__).parents[2] / "devnet" / "model"
LEASES = range(200, 204)
WEIGHTS = {Reason.WRONG_ACTIVATIONS, Reason.WRONG_SAMPLING, Reason.WRONG_SKETCH}


def _rejected(world: Any, make: Callable[[int], Any], reasons: set[Reason]) -> None:
    for number in LEASES:
        found = world.judge(make(number), secret=number)
        assert found.outcome is Outcome.REJECTED, (number, found)
        assert found.reason in reasons, found
        assert not found.table
        assert found.units == 0


def _sampled(temperature: float, other_seed: int = 0) -> Any:
    def generate(plan: list, engine: Any) -> list[Generation]:
        requests = [
            GenerationRequest(row.prompt_tokens, 24, row.noise_seed ^ other_seed) for row in plan
        ]
        return engine.generate(requests, temperature)

    return generate


@pytest.mark.slow
def test_four_bit_weights_are_rejected_where_bfloat16_is_declared(world: Any) -> None:
    liar = load_engine(TRAINED, dtype="bfloat16", prepare=quantizer(4))
    _rejected(world, lambda n: world.honest(n, liar), WEIGHTS)


def test_bfloat16_passed_off_as_float32_is_rejected(world: Any) -> None:
    liar = load_engine(TRAINED, dtype="bfloat16")
    _rejected(world, lambda n: world.made(n, engine=liar, metadata={"dtype": "float32"}), WEIGHTS)


def test_a_sketch_without_the_states_is_rejected_even_with_a_true_proof(world: Any) -> None:
    """The forger knows projection, keys and all but the sign of one state in four."""

    def make(number: int) -> Any:
        seed = lease_seed(world.lease(number).lease_digest)

        def change(rows: list, plan: list, generations: list) -> list:
            rng = np.random.default_rng(number)
            changed = []
            for row, generation in zip(rows, generations, strict=True):
                wrong = generation.states ^ (
                    (rng.random(generation.states.shape) < 0.25).astype(np.uint16) << 15
                )
                keys = build.sketch_keys(seed, row.group, row.sample, row.output_tokens)
                made_up = sketch.build(activations.split_windows(wrong), keys)
                changed.append(replace(row, sketch=sketch.pack(made_up)))
            return changed

        return world.made(number, change=change)

    _rejected(world, make, {Reason.WRONG_SKETCH})


def test_an_empty_sketch_is_rejected(world: Any) -> None:
    def change(rows: list, plan: list, generations: list) -> list:
        return [replace(row, sketch=bytes(len(row.sketch))) for row in rows]

    _rejected(world, lambda n: world.made(n, change=change), {Reason.WRONG_SKETCH})


def test_a_tampered_reward_is_rejected_in_any_row(world: Any) -> None:
    def make(number: int) -> Any:
        def change(rows: list, plan: list, generations: list) -> list:
            rows[number % 64] = replace(rows[number % 64], reward=rows[number % 64].reward + 0.01)
            return rows

        return world.made(number, change=change)

    _rejected(world, make, {Reason.TAMPERED_REWARD})


def test_slightly_tampered_logprobs_are_rejected(world: Any) -> None:
    def change(rows: list, plan: list, generations: list) -> list:
        return [replace(row, logprobs=row.logprobs + np.float32(-0.02)) for row in rows]

    _rejected(world, lambda n: world.made(n, change=change), {Reason.TAMPERED_LOGPROBS})


@pytest.fixture(scope="module")
def older_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy one optimizer step of size 3e-4 before, as far as weights go."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("older")
    model = AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 3e-4 * torch.randn(weight.shape, generator=generator).sign()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TRAINED).save_pretrained(folder)
    return folder


def test_an_older_policy_is_rejected_and_named(world: Any, older_folder: Path) -> None:
    older = load_engine(older_folder)
    both = type(world)(world.run, world.environment, world.engine)
    both.policies.engines[0] = older
    _rejected(both, lambda n: both.honest(n, older), {Reason.WRONG_POLICY})
    assert "made with policy 0" in both.judge(both.honest(1, older)).detail


def test_an_older_policy_is_rejected_even_if_it_is_not_at_hand(
    world: Any, older_folder: Path
) -> None:
    older = load_engine(older_folder)
    _rejected(world, lambda n: world.honest(n, older), WEIGHTS)


def test_an_earlier_policy_that_gives_no_numbers_saves_no_liar(
    world: Any, older_folder: Path
) -> None:
    older, broken = load_engine(older_folder), load_engine(older_folder)
    with torch.no_grad():
        next(iter(broken.model.parameters())).fill_(float("nan"))  # type: ignore[attr-defined]
    both = type(world)(world.run, world.environment, world.engine)
    both.policies.engines[0] = broken
    assert both.judge(both.honest(1, older)).reason in WEIGHTS


def test_a_log_probability_that_no_noise_draws_is_a_lie_even_in_a_row_without_replay(
    world: Any,
) -> None:
    """One such token would make training's ratio infinite; drawn rows are a quarter of a file."""
    floor = least_logprob(world.engine.vocabulary)
    found = world.judge(world.honest(3))
    hidden = next(n for n in range(64) if n not in found.rows_drawn)

    def claims(value: float) -> Any:
        def change(rows: list[FileRow], *_: Any) -> list[FileRow]:
            logprobs = rows[hidden].logprobs.copy()
            logprobs[0] = value
            rows[hidden] = replace(rows[hidden], logprobs=logprobs)
            return rows

        return world.judge(world.made(3, change=change))

    for value in (-3e38, floor - 0.1):
        said = claims(value)
        assert (said.reason, said.chance) == (Reason.IMPROBABLE_TOKENS, 0), said
        assert f"row {hidden} claims" in said.detail
    assert claims(floor + 0.1).outcome is Outcome.ACCEPTED  # as far as one row's claim goes


def test_the_noise_spans_at_most_what_the_check_assumes() -> None:
    uniform = (np.array([0.0, 2.0**32 - 1]) + 0.5) / 2.0**32
    largest, smallest = -np.log(-np.log1p(-uniform))
    assert largest - smallest < NOISE_SPAN
    noise = sampling.gumbel([1], [0], 1 << 16)
    assert smallest <= noise.min() < noise.max() <= largest


def _forced(world: Any, outputs: Callable[[Any, tuple[int, ...]], tuple[int, ...]]) -> Any:
    """Rows whose tokens were chosen by hand, everything else computed by the true policy."""

    def generate(plan: list, engine: Any) -> list[Generation]:
        honest = build.generate_rows(plan, world.run, engine)
        chosen = [outputs(row, made.output_tokens) for row, made in zip(plan, honest, strict=True)]
        replays = engine.replay(
            [
                ReplayRequest(row.prompt_tokens, tokens, row.noise_seed)
                for row, tokens in zip(plan, chosen, strict=True)
            ],
            world.run.temperature,
        )
        return [
            Generation(
                tokens,
                found.logprobs,
                found.states,
                "end" if tokens[-1] in engine.end_tokens else "length",
            )
            for tokens, found in zip(chosen, replays, strict=True)
        ]

    return generate


@pytest.mark.slow
def test_the_right_answers_written_by_hand_are_rejected(world: Any) -> None:
    """Perfect rewards: every row is the gold answer, scored by the true policy."""

    def gold(row: Any, tokens: tuple[int, ...]) -> tuple[int, ...]:
        text = "." * row.target_length + "=" + row.problem.answer + "\n"
        return tuple(world.engine.tokenizer.encode(text, add_special_tokens=False))

    _rejected(
        world,
        lambda n: world.made(n, generate=_forced(world, gold)),
        {Reason.WRONG_SAMPLING, Reason.IMPROBABLE_TOKENS, Reason.EARLY_END},
    )


def test_text_that_the_policy_finds_impossible_is_found(world: Any) -> None:
    def odd(row: Any, tokens: tuple[int, ...]) -> tuple[int, ...]:
        text = "zq,:+-zq0\n"
        return tuple(world.engine.tokenizer.encode(text, add_special_tokens=False))

    _rejected(
        world, lambda n: world.made(n, generate=_forced(world, odd)), {Reason.IMPROBABLE_TOKENS}
    )


@pytest.mark.slow
def test_one_lying_row_is_found_when_it_is_drawn(world: Any) -> None:
    run = world.run.model_copy(update={"replay_rows_micro": 1_000_000})
    every = type(world)(run, world.environment, world.engine)

    def one_greedy(plan: list, engine: Any) -> list[Generation]:
        honest = build.generate_rows(plan, run, engine)
        other = _sampled(1.0, other_seed=1)(plan, engine)
        changed = next(i for i in range(64) if honest[i].output_tokens != other[i].output_tokens)
        honest[changed] = other[changed]
        return honest

    _rejected(every, lambda n: every.made(n, generate=one_greedy), {Reason.WRONG_SAMPLING})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"policy_version": 0}, Reason.WRONG_ROWS),
        ({"group": 5}, Reason.WRONG_ROWS),
        ({"finish_reason": "length"}, Reason.WRONG_ROWS),
        ({"proofs": b""}, Reason.MALFORMED),
        ({"sketch": b"\x00"}, Reason.MALFORMED),
        ({"output_tokens": (9999, 0)}, Reason.MALFORMED),
    ],
)
def test_a_file_that_contradicts_itself_is_void(
    world: Any, change: dict[str, Any], reason: Reason
) -> None:
    def corrupt(rows: list, plan: list, generations: list) -> list:
        number = next(i for i, row in enumerate(rows) if row.finish_reason == "end")
        row = replace(rows[number], **change)
        rows[number] = replace(row, logprobs=np.zeros(len(row.output_tokens), dtype=np.float32))
        return rows

    found = world.judge(world.made(1, change=corrupt))
    assert (found.outcome, found.reason) == (Outcome.VOID, reason), found
