"""One optimizer step: what is not finite changes nothing, and the loss goes the right way."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trainer_kit as kit
from trainer_kit import full_state

from prime_core.errors import FatalError, UserError
from prime_core.ids import ZERO_DIGEST, Step
from prime_trainer import learner as learner_module
from prime_trainer.config import load
from prime_trainer.data import TrainingBatch
from prime_trainer.learner import learning_rate, train_step
from prime_trainer.loading import load_policy
from prime_trainer.metrics import Stopwatch
from prime_trainer.model import Policy
from prime_trainer.parallel import World, published_state
from prime_trainer.publish import export


def batch(rollouts: list[kit.Rollout]) -> TrainingBatch:
    groups = tuple(tuple(rollouts[i : i + 4]) for i in range(0, len(rollouts), 4))
    return TrainingBatch(Step(0), ZERO_DIGEST, groups, ())


@pytest.mark.parametrize("poison", ["a NaN in the data", "logits that overflow"])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing_and_says_so(
    model: Path, tmp_path: Path, world: World, poison: str
) -> None:
    # An ancestor had no such guard: NaN weights would have been broadcast.
    learner = kit.learner(model, tmp_path, world)
    before = full_state(learner.policy)
    rollouts = kit.rows()
    if poison == "a NaN in the data":
        rollouts[0] = replace(rollouts[0], logprobs=(math.nan,) * len(rollouts[0].logprobs))
    else:
        learner.policy.temperature = 1e-45
    line = train_step(learner, batch(rollouts), Stopwatch())
    assert line["applied"] is False
    learner.policy.temperature = 1.0
    after = full_state(learner.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert train_step(learner, batch(kit.rows()), Stopwatch())["applied"] is True
    assert any(not torch.equal(before[n], v) for n, v in full_state(learner.policy).items())


def test_weights_that_are_not_finite_stop_the_trainer_before_they_are_kept(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world, learning_rate=1.0)
    for group in learner.optimizer.param_groups:
        group["eps"] = math.nan
    with pytest.raises(FatalError, match="not finite"):
        train_step(learner, batch(kit.rows()), Stopwatch())


def test_weights_that_are_not_finite_are_not_exported(
    model: Path, tmp_path: Path, world: World
) -> None:
    weights = full_state(kit.learner(model, tmp_path, world).policy)
    next(iter(weights.values())).view(-1)[0] = math.nan
    with pytest.raises(FatalError, match="not finite"):
        export(weights, model, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_training_makes_good_answers_likelier_and_bad_ones_less(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world)
    rollouts = [
        replace(row, reward=1.0 if row.sample < 2 else 0.0, logprobs=row.logprobs)
        for row in kit.rows()
    ]

    def likelihoods() -> list[float]:
        rows = [[number] for number in range(len(rollouts))]
        zeros = [0.0] * len(rollouts)
        packed, _ = learner_module.collate(rows, rollouts, zeros, zeros, world.device)
        with torch.no_grad():
            logprobs, _ = learner.policy(packed)
        sizes = [len(row.output_tokens) for row in rollouts]
        return [float(part.mean()) for part in logprobs.split(sizes)]

    # The behaviour policy is the present one, so that no ratio is clipped at the start.
    before = likelihoods()
    rollouts = [
        replace(row, logprobs=(value,) * len(row.logprobs))
        for row, value in zip(rollouts, before, strict=True)
    ]
    train_step(learner, batch(rollouts), Stopwatch())
    change = [after - earlier for after, earlier in zip(likelihoods(), before, strict=True)]
    good = [value for value, row in zip(change, rollouts, strict=True) if row.reward == 1.0]
    bad = [value for value, row in zip(change, rollouts, strict=True) if row.reward == 0.0]
    assert sum(good) / len(good) > 0 > sum(bad) / len(bad)


def test_a_step_computes_with_the_weights_that_nodes_have_and_steps_from_its_own(
    model: Path, tmp_path: Path, world: World
) -> None:
    # The rate is so small that bf16 shows most of a step's changes only after many steps.
    learner = kit.learner(model, tmp_path, world, learning_rate=1e-5, round_weights=True)
    for step in range(3):
        node = load_policy(model, learner.run.temperature)
        node.lm.load_state_dict(published_state(learner.policy, world))
        rollouts = kit.rows(seed=step, version=step)
        zeros = [0.0] * len(rollouts)
        order = [[number] for number in range(len(rollouts))]
        packed, _ = learner_module.collate(order, rollouts, zeros, zeros, world.device)
        with torch.no_grad():
            parts = node(packed)[0].split([len(row.output_tokens) for row in rollouts])
        rollouts = [
            replace(row, logprobs=tuple(part.tolist()))
            for row, part in zip(rollouts, parts, strict=True)
        ]
        line = train_step(learner, replace(batch(rollouts), step=Step(step)), Stopwatch())
        assert line["kl_mismatch"] < 1e-10
        assert line["clipped"] == 0.0
    masters = full_state(learner.policy)
    assert any(not torch.equal(m, m.to(torch.bfloat16).to(m.dtype)) for m in masters.values())


@pytest.mark.parametrize(
    "changes", [{}, {"round_weights": True}, {"lora_rank": 4}], ids=["plain", "rounded", "lora"]
)
def test_stale_rows_are_compared_with_the_policy_that_generated_them(
    model: Path, tmp_path: Path, world: World, changes: dict[str, object]
) -> None:
    learner = kit.learner(model, tmp_path, world, mismatch_every=1, **changes)
    without = kit.learner(model, tmp_path, world, mismatch_every=0, **changes)
    rows: dict[int, list[kit.Rollout]] = {}
    for step in range(5):
        rows[step] = kit.answered(learner, step, seed=step)
        ages = range(min(step, 2) + 1)
        mixed = [row for age in ages for row in rows[step - age][4 * age : 4 * age + 4]]
        found = replace(batch(mixed), step=Step(step))
        line = train_step(learner, found, Stopwatch())
        assert line["kl_mismatch"] < 1e-10
        stale = line.get("kl_mismatch_stale", {})
        assert set(stale) == {str(age) for age in ages if age}
        assert all(value < 1e-10 for value in stale.values())
        if step:
            assert line["kl_old"] > 1e-5, "the present policy gives stale rows other values"
        train_step(without, found, Stopwatch())
    one, two = full_state(learner.policy), full_state(without.policy)
    assert all(torch.equal(one[name], two[name]) for name in one)  # scoring changes no training
    mistaken = [replace(row, policy_version=4) for row in rows[3]]
    line = train_step(learner, replace(batch(mistaken), step=Step(5)), Stopwatch())
    assert line["kl_mismatch_stale"]["1"] > 1e-5


def test_only_weights_that_a_batch_will_need_are_kept(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world, mismatch_every=4)
    kept = []
    for step in range(9):
        rows = kit.rows(version=max(0, step - 1))
        line = train_step(learner, replace(batch(rows), step=Step(step)), Stopwatch())
        assert ("kl_mismatch_stale" in line) == (step in (4, 8))
        kept.append([version for version in range(step + 1) if version in learner.past])
    assert kept == [[], [], [2], [2, 3], [3], [], [6], [6, 7], [7]]


def test_the_line_of_metrics_tells_staleness_rewards_and_every_wait(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world)
    watch = Stopwatch()
    found = replace(batch(kit.rows(version=0)), step=Step(2))
    line = train_step(learner, found, watch)
    assert line["staleness"] == {"2": 12}
    assert line["rows"] == 12
    assert line["version"] == 3
    assert set(watch.seconds) == {
        "mismatch", "plan", "collate", "forward_backward", "statistics", "optimizer",
    }  # fmt: skip
    for name in ("loss", "ratio", "ratio_max", "clipped", "entropy", "kl_old", "gradient_norm"):
        assert math.isfinite(line[name]), name


def test_the_policys_log_probabilities_are_those_of_the_plain_model(
    model: Path, world: World
) -> None:
    policy: Policy = load_policy(model, temperature=0.7)
    rollouts = kit.rows()
    zeros = [0.0] * len(rollouts)
    packed, _ = learner_module.collate([[3, 5, 0]], rollouts, zeros, zeros, torch.device("cpu"))
    with torch.no_grad():
        logprobs, entropy = policy(packed)
        expected = []
        for sample in (3, 5, 0):
            row = rollouts[sample]
            tokens = torch.tensor([[*row.prompt_tokens, *row.output_tokens]])
            logits = policy.lm(input_ids=tokens).logits[0, len(row.prompt_tokens) - 1 : -1]
            every = torch.log_softmax(logits / 0.7, -1)
            expected.append(every.gather(1, torch.tensor(row.output_tokens)[:, None])[:, 0])
    torch.testing.assert_close(logprobs, torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert (entropy > 0).all()


def test_the_learning_rate_warms_up_and_stays(tmp_path: Path, model: Path) -> None:
    settings = kit.settings(model, tmp_path, learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(settings, s) for s in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_settings_come_from_flags_before_environment_before_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trainer.toml"
    file.write_text("learning_rate = 0.1\nbeta2 = 0.5\nwarmup_steps = 7\n")
    monkeypatch.setenv("PRIME_TRAINER_LEARNING_RATE", "0.2")
    monkeypatch.setenv("PRIME_TRAINER_BETA2", "0.6")
    monkeypatch.setenv("PRIME_TRAINER_RPC", "http://a, http://b")
    found = load({"learning_rate": 0.3, "beta1": None}, file)
    assert (found.learning_rate, found.beta2, found.warmup_steps) == (0.3, 0.6, 7)
    assert found.beta1 == 0.9
    assert found.rpc == ("http://a", "http://b")


@pytest.mark.parametrize(
    ("flags", "text", "said"),
    [
        ({"beta1": 2.0}, "", "'beta1' is wrong"),
        ({}, "no_such = 1", "no setting 'no_such'"),
        ({}, "learning_rat = 1", "'learning_rat'; did you mean learning_rate"),
        ({}, "[objective]\nclp = 1", "'objective.clp'; did you mean objective.clip"),
        ({}, "[objective]\nnothing = 1", "no setting 'objective.nothing'$"),
        ({}, "not toml", "is not TOML"),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    tmp_path: Path, flags: dict[str, object], text: str, said: str
) -> None:
    file = tmp_path / "trainer.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=said):
        load(flags, file)
