"""No honest file is ever rejected; what is not a lie ends in another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from prime_core import encoding
from prime_core.errors import PolicyError
from prime_core.ids import ZERO_DIGEST
from prime_core.rollout import Submission
from prime_core.verdict import Outcome, Reason, VerdictTable
from prime_engine.tiny import write_tiny_model
from prime_envs.base import Problem, TaskScore
from prime_envs.registry import environment_for
from prime_verify import rollout_file
from prime_verify.build import build_rollout_file
from prime_verify.calibrate import synthetic_lease, synthetic_run
from prime_verify.engines import load_engine
from prime_verify.proofs import thresholds
from prime_verify.rollout_file import load_rollouts, read_rollout_file, write_rollout_file

TRAINED = Path(__file__).parents[2] / "devnet" / "model"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch_rows", [3, 64])
def test_honest_files_are_accepted_for_every_batch_size_and_dtype(
    world: Any, dtype: str, batch_rows: int
) -> None:
    engine = load_engine(TRAINED, dtype=dtype, batch_rows=batch_rows)
    for number in range(100, 104):
        found = world.judge(world.honest(number, engine), secret=number)
        assert found.outcome is Outcome.ACCEPTED, found
        assert len(found.rows_drawn) == 16


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_files_of_models_never_calibrated_are_accepted(
    world: Any, tmp_path: Path, seed: int, dtype: str
) -> None:
    folder = write_tiny_model(
        tmp_path / "m", seed=50 + seed, hidden=(48, 96, 160)[seed], layers=3 + seed, logit_scale=3.0
    )
    run = synthetic_run(70, temperature_micro=(700_000, 1_000_000, 1_300_000)[seed])
    other = type(world)(run, environment_for(run), load_engine(folder))
    engine = load_engine(folder, dtype=dtype, batch_rows=20)
    for number in range(2):
        found = other.judge(other.honest(number, engine))
        assert found.outcome is Outcome.ACCEPTED, found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_drawn_row_is_enough_for_an_honest_file_in_the_replays_own_dtype(
    world: Any, dtype: str
) -> None:
    run = world.run.model_copy(update={"replay_rows_micro": 1})
    lonely = type(world)(run, world.environment, world.engine)
    engine = load_engine(TRAINED, dtype=dtype)
    for number in range(5):
        found = lonely.judge(lonely.honest(number, engine), secret=number)
        assert found.outcome is Outcome.ACCEPTED, found
        if dtype == "float32":
            assert len(found.rows_drawn) == 1
        else:
            assert found.statistics["tokens"] >= thresholds.LEAST_TOKENS


def test_an_accepted_file_yields_its_table_units_and_rollouts(world: Any) -> None:
    file = world.honest(1)
    found = world.judge(file)
    rows = read_rollout_file(file.data).rows
    assert found.units == sum(len(row.output_tokens) for row in rows)
    assert [(r.group, r.sample) for r in found.table] == [(i // 16, i % 16) for i in range(64)]
    table = found.verdict_table(ZERO_DIGEST, encoding.sha256(file.data), 1, 0)
    assert VerdictTable.model_validate_json(table.model_dump_json()) == table
    rollouts = load_rollouts(file.data, table)
    assert len(rollouts) == 64
    for row, rollout, entry in zip(rows, rollouts, found.table, strict=True):
        assert tuple(rollout.output_tokens) == row.output_tokens
        assert rollout.reward == entry.reward_micro / 1e6 == row.reward
        assert list(rollout.logprobs) == row.logprobs.tolist()


def test_a_row_on_which_a_plugin_raises_is_paid_and_not_trained_on(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that raises does so for node and validator, or on one of the two machines only."""
    broken = environment_for(world.run)
    check = broken.check

    def raises(problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        if output_tokens % 2:
            raise ZeroDivisionError("there is no half letter")
        return check(problem, output_text, output_tokens)

    monkeypatch.setattr(broken, "plugin", True)
    monkeypatch.setattr(broken, "check", raises)
    monkeypatch.setattr(world.environment, "plugin", True)
    other = type(world)(world.run, broken, world.engine)
    honest, made = world.honest(8), other.honest(8)
    odd = [len(row.output_tokens) % 2 == 1 for row in read_rollout_file(honest.data).rows]
    right = [row.reward for row in read_rollout_file(honest.data).rows]
    assert {reward for reward, is_odd in zip(right, odd, strict=True) if is_odd} > {0.0}
    for file in (honest, made):
        found = other.judge(file)
        assert found.outcome is Outcome.ACCEPTED, found
        assert [row.ungraded for row in found.table] == odd
        assert found.units == sum(
            len(row.output_tokens) for row in read_rollout_file(file.data).rows
        )
        table = found.verdict_table(ZERO_DIGEST, encoding.sha256(file.data), 1, 0)
        endings = [rollout.finish_reason for rollout in load_rollouts(file.data, table)]
        assert [ending == "ungraded" for ending in endings] == odd
        found = world.judge(file)
        assert found.outcome is Outcome.ACCEPTED, found
        assert [row.reward_micro / 1e6 for row in found.table] == right
        assert not any(row.ungraded for row in found.table)
    read = read_rollout_file(honest.data)
    lie = replace(read.rows[0], reward=read.rows[0].reward + 0.5)
    data = write_rollout_file([lie, *read.rows[1:]], read.metadata)
    assert world.judge(replace(honest, data=data)).reason is Reason.TAMPERED_REWARD


def test_a_problem_on_which_a_plugin_raises_is_paid_and_accuses_no_one(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that raises does so for node and validator, or on one of the two machines only."""
    broken = environment_for(world.run)
    problem = broken.problem

    def raises(index: int) -> Problem:
        if index % 2:
            raise KeyError("row 3 has no question")
        return problem(index)

    monkeypatch.setattr(broken, "plugin", True)
    monkeypatch.setattr(broken, "problem", raises)
    other = type(world)(world.run, broken, world.engine)
    honest, made = world.honest(8), other.honest(8)
    rows = read_rollout_file(made.data).rows
    unasked = [row.problem_id == "unasked" for row in rows]
    assert set(unasked) == {True, False}, "take another lease"
    found = other.judge(made)
    assert found.outcome is Outcome.ACCEPTED, found
    assert [row.ungraded for row in found.table] == unasked
    assert found.units == sum(len(row.output_tokens) for row in rows)
    found = world.judge(made)
    assert (found.outcome, found.reason) == (Outcome.VOID, Reason.WRONG_ROWS)
    found = other.judge(honest)
    assert (found.outcome, found.reason) == (Outcome.ABSTAINED, Reason.VALIDATOR_CRASHED)
    assert "the environment reverse raised KeyError('row 3 has no question')" in found.detail
    first = unasked.index(False)
    lie = replace(rows[first], prompt_tokens=rows[first].prompt_tokens[1:])
    lies = [*rows[:first], lie, *rows[first + 1 :]]
    data = write_rollout_file(lies, read_rollout_file(made.data).metadata)
    assert other.judge(replace(made, data=data)).reason is Reason.WRONG_PROMPTS


def test_the_same_inputs_give_the_same_finding(world: Any) -> None:
    file = world.honest(2)
    assert world.judge(file) == world.judge(file)
    assert world.judge(file, secret=1).rows_drawn != world.judge(file, secret=2).rows_drawn


def test_statistics_and_limits_are_decimal_text_for_evidence(world: Any) -> None:
    found = world.judge(world.honest(3))
    assert set(thresholds.STATISTICS) <= set(found.decimal_statistics())
    assert set(found.decimal_thresholds()) == {
        f"{scope}.{name}" for scope in thresholds.SCOPES for name in thresholds.STATISTICS
    }
    encoding.canonical_json({**found.decimal_statistics(), **found.decimal_thresholds()})


@pytest.mark.parametrize(("step", "allowed"), [(2, 1), (5, 4)])
def test_a_policy_too_old_for_its_leases_batch_is_void_and_one_that_aged_since_is_not(
    world: Any, step: int, allowed: int
) -> None:
    """Policy 1 for batch `step`; policies published after the lease do not matter."""
    run = world.run.model_copy(update={"max_staleness": allowed})
    strict = type(world)(run, world.environment, world.engine)
    for batch, reason in ((step + 1, Reason.POLICY_TOO_OLD), (step, Reason.NONE)):
        lease = synthetic_lease(run, 7, policy_version=1, step=batch)
        data = build_rollout_file(
            lease.signed, lease.lease_digest, run, world.engine, world.environment
        )
        found = strict.judge(replace(lease, data=data))
        assert found.reason is reason, found
    assert found.outcome is Outcome.ACCEPTED
    assert Reason.POLICY_TOO_OLD.outcome is Outcome.VOID


def test_a_policy_that_is_not_here_is_the_validators_trouble(world: Any) -> None:
    empty = type(world)(world.run, world.environment, world.engine)
    empty.policies.engines.clear()
    found = empty.judge(world.honest(4))
    assert (found.outcome, found.reason) == (Outcome.ABSTAINED, Reason.POLICY_MISSING)


def test_a_machine_that_is_short_of_memory_says_nothing_of_a_file(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow's own error of memory is one of those by which it refuses a damaged file."""

    def full(*_: Any, **__: Any) -> None:
        raise pa.ArrowMemoryError("malloc of size 4096 failed")

    file = world.honest(4)
    monkeypatch.setattr(rollout_file.pq, "ParquetFile", full)
    found = world.judge(file)
    assert (found.outcome, found.reason) == (Outcome.ABSTAINED, Reason.OUT_OF_RESOURCES)


def test_a_card_that_is_short_of_memory_in_a_replay_accuses_no_node(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    file = world.honest(4)
    monkeypatch.setattr(world.engine._held, "_arguments", full)
    found = world.judge(file)
    assert (found.outcome, found.reason) == (Outcome.ABSTAINED, Reason.OUT_OF_RESOURCES)
    assert found.detail.startswith("replay ran out of memory: CUDA out of memory. Tried")


@pytest.mark.parametrize("broken", ["states", "logprobs", "margins", "contrasts"])
def test_a_replay_without_numbers_accuses_no_node(
    world: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A diverged policy, or a machine's fault: NaN lies beyond every limit."""
    file = world.honest(6)
    honest = world.engine.replay

    def replay(requests: Any, temperature: float) -> Any:
        found = honest(requests, temperature)
        values = getattr(found[-1], broken).copy()
        values.flat[0] = 0x7FC0 if broken == "states" else float("nan")
        return [*found[:-1], replace(found[-1], **{broken: values})]

    monkeypatch.setattr(world.engine, "replay", replay)
    found = world.judge(file)
    assert (found.outcome, found.reason) == (Outcome.ABSTAINED, Reason.VALIDATOR_CRASHED)


@pytest.mark.parametrize(
    "setup", [{"device": "NVIDIA H200"}, {"dtype": "float8"}, {"engine": "vllm/2"}]
)
def test_an_uncalibrated_setup_is_measured_and_never_rejected(
    world: Any, setup: dict[str, str]
) -> None:
    greedy = world.made(
        5,
        generate=lambda plan, engine: engine.generate(
            [world_request(row, world.run) for row in plan], 1.0
        ),
        metadata=setup,
    )
    found = world.judge(greedy)
    assert (found.outcome, found.reason) == (Outcome.VOID, Reason.UNCALIBRATED)
    assert f"margin_max {found.statistics['margin_max']:.3g}" in found.detail
    assert found.statistics["margin_max"] > 1


@pytest.mark.parametrize("other", [{"replay_device": "NVIDIA H200"}, {"replay_dtype": "bfloat16"}])
def test_by_limits_of_another_replaying_setup_a_file_is_measured_and_never_rejected(
    world: Any, other: dict[str, str]
) -> None:
    """Limits hold for one pair of prover and replayer: a GPU's prefill rounds otherwise."""
    lie = world.made(6, change=lambda rows, *_: [replace(r, logprobs=r.logprobs - 1) for r in rows])
    assert world.judge(lie).reason is Reason.TAMPERED_LOGPROBS
    assert thresholds.shipped().replayed_by("plain/1", "float32", "cpu")
    found = world.judge(lie, calibration=thresholds.shipped().model_copy(update=other))
    assert (found.outcome, found.reason) == (Outcome.ABSTAINED, Reason.UNKNOWN_SETUP)
    assert "no calibration for replays by plain/1, float32 on cpu: measured" in found.detail
    assert (found.chance, found.thresholds) == (None, {})


def world_request(row: Any, run: Any) -> Any:
    from prime_engine.base import GenerationRequest

    return GenerationRequest(row.prompt_tokens, run.max_output_tokens, None)


def test_a_run_that_names_an_unknown_calibration_is_only_measured(world: Any) -> None:
    run = world.run.model_copy(update={"calibration": encoding.sha256(b"another")})
    other = type(world)(run, world.environment, world.engine)
    assert other.judge(other.honest(6)).reason is Reason.UNKNOWN_SETUP


@pytest.mark.parametrize("named", [thresholds.shipped, thresholds.newest])
def test_a_run_may_name_a_shipped_calibration(
    world: Any, named: Callable[[], thresholds.Calibration]
) -> None:
    run = world.run.model_copy(update={"calibration": named().digest()})
    other = type(world)(run, world.environment, world.engine)
    assert other.judge(other.honest(6)).outcome is Outcome.ACCEPTED


def test_a_lease_of_another_run_is_refused_loudly(world: Any) -> None:
    run = world.run.model_copy(update={"name": "another"})
    with pytest.raises(PolicyError):
        world.judge(world.honest(7), run=run)


def test_a_submission_must_be_of_these_very_bytes(world: Any) -> None:
    from prime_core.ids import digest
    from prime_verify.case import Case
    from prime_verify.verify import verify_file

    file = world.honest(8)
    lease = file.signed.lease
    right = Submission(
        pool=lease.pool,
        lease_digest=file.lease_digest,
        node=lease.node,
        step=lease.step,
        policy_digest=lease.policy_digest,
        sha256=encoding.sha256(file.data),
        size=len(file.data),
        rows=64,
        valid_until=lease.deadline,
    )

    def judged(submission: Submission) -> Reason:
        return verify_file(Case(
            file.data, file.signed, file.lease_digest, world.run, world.environment,
            world.policies, draw_secret=digest(bytes(32)), submission_digest=digest(bytes(32)),
            submission=submission,
        )).reason  # fmt: skip

    assert judged(right) is Reason.NONE
    for change, reason in (
        ({"sha256": encoding.sha256(b"")}, Reason.WRONG_SIZE_OR_DIGEST),
        ({"size": 1}, Reason.WRONG_SIZE_OR_DIGEST),
        ({"rows": 63}, Reason.WRONG_ROWS),
        ({"step": 9}, Reason.WRONG_LEASE),
        ({"lease_digest": ZERO_DIGEST}, Reason.WRONG_LEASE),
        ({"valid_until": lease.deadline - 1}, Reason.WRONG_LEASE),
        ({"valid_until": lease.deadline + 1}, Reason.WRONG_LEASE),
    ):
        assert judged(right.model_copy(update=change)) is reason


def test_a_file_of_another_lease_is_void(world: Any) -> None:
    first, second = world.honest(9), world.honest(10)
    found = world.judge(replace(first, data=second.data))
    assert (found.outcome, found.reason) == (Outcome.VOID, Reason.WRONG_LEASE)


@pytest.mark.parametrize(("dtype", "passes"), [("float32", 1), ("bfloat16", 2)])
def test_the_replays_cost_is_reported_as_a_share_of_the_files(
    world: Any, dtype: str, passes: int
) -> None:
    engine = load_engine(TRAINED, dtype=dtype)
    file = world.honest(77, engine)
    found = world.judge(file)
    rows = read_rollout_file(file.data).rows
    tokens = [len(row.prompt_tokens) + len(row.output_tokens) for row in rows]
    drawn = sum(tokens[number] for number in found.rows_drawn)
    assert found.statistics["compute_share"] == pytest.approx(passes * drawn / sum(tokens))
    assert found.setup == f"plain/1 {dtype} cpu"
    assert set(found.shares()) == set(thresholds.STATISTICS)
