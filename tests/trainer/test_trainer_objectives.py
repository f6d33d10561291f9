"""Objectives beyond the plain ratio: decoupled PPO, truncated weights, masks, the registry."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest
import torch
import trainer_kit as kit
from hypothesis import given
from hypothesis import strategies as st
from trainer_kit import full_state

from prime_core.errors import UserError
from prime_core.ids import ZERO_DIGEST, Step
from prime_core.settings import load_settings
from prime_trainer import objectives
from prime_trainer.advantages import judge
from prime_trainer.config import ObjectiveSettings, Settings
from prime_trainer.data import TrainingBatch
from prime_trainer.learner import (
    backward,
    groups_of,
    proximal_logprobs,
    shares_of,
    train_step,
)
from prime_trainer.loss import Tokens, policy_loss, token_weights
from prime_trainer.metrics import Stopwatch, alarms_of
from prime_trainer.objectives import REGISTRY, objective_of
from prime_trainer.objectives.base import Objective
from prime_trainer.parallel import World


@pytest.mark.parametrize("seed", range(5))
def test_decoupled_ppo_is_its_formula_in_float64(seed: int) -> None:
    # J = Σ w · min(π_prox/π_old, cap) · min(min(r, δ)A, clip(r)A), r = π_θ/π_prox; by hand.
    rng = np.random.default_rng(seed)
    n = 40
    new, prox, old = (-rng.uniform(0.05, 3, n) for _ in range(3))
    advantages, weights = rng.normal(size=n), rng.uniform(0.1, 1, n)
    settings = ObjectiveSettings(ratio="proximal", clip=0.2, delta=4.0, importance_cap=2.0)
    logprobs = torch.tensor(new, requires_grad=True)
    tokens = Tokens(
        torch.tensor(old), torch.tensor(advantages), torch.tensor(weights),
        proximal=torch.tensor(prox),
    )  # fmt: skip
    policy_loss(logprobs, torch.zeros(n, dtype=torch.float64), tokens, settings).loss.backward()
    expected = np.zeros(n)
    for t in range(n):
        r, a = math.exp(new[t] - prox[t]), advantages[t]
        bounded, clipped = min(r, 4.0) * a, min(max(r, 0.8), 1.2) * a
        if bounded <= clipped:
            slope = r * a if r < 4.0 else 0.0
        else:
            slope = r * a if 0.8 < r < 1.2 else 0.0
        expected[t] = -weights[t] * min(math.exp(prox[t] - old[t]), 2.0) * slope
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, rtol=1e-9, atol=1e-14)


def a_batch(seed: int, n: int = 40) -> tuple[torch.Tensor, Tokens, torch.Tensor]:
    """Log-probabilities with gradient, tokens of samples of 1 to 9 tokens, and log ratios."""
    rng = np.random.default_rng(seed)
    samples = np.repeat(np.arange(n), rng.integers(1, 10, n))[:n]
    logprobs = torch.tensor(-rng.uniform(0.05, 3, n), requires_grad=True)
    tokens = Tokens(
        torch.tensor(-rng.uniform(0.05, 3, n)),
        torch.tensor(rng.normal(size=samples.max() + 1)[samples]),
        torch.tensor(rng.uniform(0.1, 1, samples.max() + 1)[samples]),
        samples=torch.tensor(samples),
    )
    return logprobs, tokens, (logprobs - tokens.old_logprobs).detach()


def gradient_of(logprobs: torch.Tensor, tokens: Tokens, settings: ObjectiveSettings) -> np.ndarray:
    zeros = torch.zeros_like(logprobs)
    policy_loss(logprobs, zeros, tokens, settings).loss.backward()
    assert logprobs.grad is not None
    found: np.ndarray = logprobs.grad.numpy()
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_higher_upper_bound_lets_good_tokens_grow_further(seed: int) -> None:
    logprobs, tokens, log_ratio = a_batch(seed)
    found = gradient_of(logprobs, tokens, ObjectiveSettings(clip=0.2, clip_high=0.5, delta=4.0))
    expected = np.zeros(len(found))
    for t, (log_r, a, w) in enumerate(
        zip(log_ratio.tolist(), tokens.advantages.tolist(), tokens.weights.tolist(), strict=True)
    ):
        r = math.exp(log_r)
        kept = r <= 1.5 if a > 0 else 0.8 <= r <= 4.0
        expected[t] = -w * r * a if kept else 0.0
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_gspo_is_its_formula_in_float64(seed: int) -> None:
    # J = Σ_i |o_i|·w_i · min(s A, clip(s) A), s = exp(mean of log r); ds/dlog π_t = s / |o_i|.
    logprobs, tokens, log_ratio = a_batch(seed)
    found = gradient_of(logprobs, tokens, ObjectiveSettings(name="gspo", clip=0.3, clip_high=0.4))
    assert tokens.samples is not None
    samples = tokens.samples.numpy()
    expected = np.zeros(len(found))
    for i in range(samples.max() + 1):
        mine = samples == i
        s = math.exp(float(log_ratio.numpy()[mine].mean()))
        a, w = float(tokens.advantages[mine][0]), float(tokens.weights[mine][0])
        kept = s <= 1.4 if a > 0 else 0.7 <= s <= 4.0
        expected[mine] = -w * s * a if kept else 0.0
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_cispo_is_its_formula_in_float64(seed: int) -> None:
    logprobs, tokens, log_ratio = a_batch(seed)
    found = gradient_of(logprobs, tokens, ObjectiveSettings(name="cispo", clip_high=0.5))
    weight = np.minimum(np.exp(log_ratio.numpy()), 1.5)
    expected = -tokens.weights.numpy() * weight * tokens.advantages.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-14)
    zeros = torch.zeros_like(logprobs)
    terms = policy_loss(logprobs, zeros, tokens, ObjectiveSettings(name="cispo", clip_high=0.5))
    assert float(terms.sums["clipped"]) == (log_ratio.exp() > 1.5).sum()


def test_masked_importance_leaves_out_tokens_on_which_engine_and_trainer_differ() -> None:
    apart = [0.4, 0.6, 1.0, 4.0, 6.0]
    logprobs = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0 - math.log(w) for w in apart], dtype=torch.float64)
    tokens = Tokens(old, torch.ones(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64))
    settings = ObjectiveSettings(
        ratio="proximal", importance="mask", importance_floor=0.5, importance_cap=5.0
    )
    found = gradient_of(logprobs, tokens, settings)
    np.testing.assert_allclose(found, [0.0, -0.6, -1.0, -4.0, 0.0], rtol=1e-12)
    terms = policy_loss(logprobs, torch.zeros_like(logprobs), tokens, settings)
    assert float(terms.sums["truncated"]) == 2


@pytest.mark.parametrize("seed", range(5))
def test_the_divergence_mask_is_its_formula_in_float64(seed: int) -> None:
    # J = Σ w · M · min(π_prox/π_old, cap) · r·A, M = 0 where |π_θ − π_old| > δ and A·(π_θ − π_old)
    # > 0 (DPPO, binary total variation); the clip is too wide to matter. By hand.
    rng = np.random.default_rng(seed)
    n = 60
    new, prox, old = (-rng.uniform(0.01, 3, n) for _ in range(3))
    advantages, weights = rng.normal(size=n), rng.uniform(0.1, 1, n)
    settings = ObjectiveSettings(
        ratio="proximal", importance="divergence", importance_divergence=0.15, importance_cap=20.0,
        name="one_sided", clip=1.0, clip_high=10.0,
    )  # fmt: skip
    logprobs = torch.tensor(new, requires_grad=True)
    tokens = Tokens(
        torch.tensor(old), torch.tensor(advantages), torch.tensor(weights),
        proximal=torch.tensor(prox),
    )  # fmt: skip
    terms = policy_loss(logprobs, torch.zeros(n, dtype=torch.float64), tokens, settings)
    terms.loss.backward()
    expected, masked, capped = np.zeros(n), 0, 0
    for t in range(n):
        w, r, a = math.exp(prox[t] - old[t]), math.exp(new[t] - prox[t]), advantages[t]
        apart = math.exp(new[t]) - math.exp(old[t])
        away = abs(apart) > 0.15 and (apart > 0) == (a > 0)
        masked += away
        kept = not away and not (a > 0 and r > 11.0)
        expected[t] = -weights[t] * min(w, 20.0) * r * a if kept else 0.0
        capped += w > 20.0 and not away
    assert 0 < masked < n
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, rtol=1e-9, atol=1e-14)
    assert float(terms.sums["truncated"]) == masked + capped


def test_a_token_far_from_the_engine_is_kept_where_the_update_brings_it_back() -> None:
    old = torch.full((4,), math.log(0.5), dtype=torch.float64)
    new = [math.log(p) for p in (0.7, 0.7, 0.3, 0.3)]
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    tokens = Tokens(old, advantages, torch.ones(4, dtype=torch.float64))
    settings = ObjectiveSettings(ratio="proximal", importance="divergence")
    found = gradient_of(logprobs, tokens, settings)
    np.testing.assert_allclose(found, [0.0, 1.4, -0.6, 0.0], rtol=1e-12)


def test_a_plugin_is_an_objective_with_settings_of_its_own(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, world: World
) -> None:
    def surrogate(
        log_ratio: torch.Tensor, tokens: Tokens, settings: ObjectiveSettings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        value = settings.parameters["slope"] * log_ratio
        return value, torch.zeros_like(log_ratio, dtype=torch.bool)

    mine = Objective(REGISTRY["grpo"].weights, surrogate, {"slope": 2.0})
    entry = EntryPoint("mine", f"{__name__}:PLUGIN", objectives.ENTRY_POINT_GROUP)
    monkeypatch.setattr(objectives, "entry_points", lambda group: EntryPoints([entry]))
    monkeypatch.setitem(globals(), "PLUGIN", mine)
    assert objective_of("mine") is mine
    logprobs, tokens, _ = a_batch(0)
    found = gradient_of(logprobs, tokens, ObjectiveSettings(name="mine", parameters={"slope": 3.0}))
    np.testing.assert_allclose(found, -3.0 * tokens.weights.numpy())
    used = kit.learner(model, tmp_path, world, objective=ObjectiveSettings(name="mine")).settings
    assert json.loads(used.training())["objective"]["parameters"] == {"slope": 2.0}
    for name, hint in (("mine", "its parameters: slope"), ("grpo", "its parameters: none")):
        wrong = ObjectiveSettings(name=name, parameters={"slop": 3.0})
        with pytest.raises(UserError, match=f"{name}' has no parameter 'slop'") as caught:
            kit.learner(model, tmp_path, world, objective=wrong)
        assert caught.value.hint == hint
    with pytest.raises(UserError, match="does not know") as caught:
        objective_of("other")
    assert "mine" in caught.value.hint
    monkeypatch.setitem(globals(), "PLUGIN", "not an objective")
    with pytest.raises(UserError, match="is not an Objective"):
        objective_of("mine")
    monkeypatch.delitem(globals(), "PLUGIN")
    with pytest.raises(UserError, match=r"the plugin 'mine' .* cannot be loaded: AttributeError"):
        objective_of("mine")


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - {"cispo"}))
def test_the_share_called_clipped_is_the_share_without_gradient(name: str) -> None:
    ratios = [0.5, 0.9, 1.1, 1.5, 3.9, 4.1, 150.0]
    advantages = [sign for sign in (1.0, -1.0) for _ in ratios]
    logprobs = torch.tensor([math.log(r) for r in ratios] * 2, requires_grad=True)
    count = len(advantages)
    tokens = Tokens(
        torch.zeros(count), torch.tensor(advantages), torch.ones(count), samples=torch.arange(count)
    )
    terms = policy_loss(logprobs, torch.zeros(count), tokens, ObjectiveSettings(name=name))
    terms.loss.backward()
    assert logprobs.grad is not None
    assert float(terms.sums["clipped"]) == int((logprobs.grad == 0).sum())


def test_without_a_recomputed_policy_the_present_one_is_proximal() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = Tokens(torch.tensor([-1.5, -1.0]), torch.ones(2), torch.ones(2))
    found = policy_loss(logprobs, torch.zeros(2), tokens, ObjectiveSettings(ratio="proximal"))
    found.loss.backward()
    assert logprobs.grad is not None
    weights = [min(math.e**0.5, 2.0), math.e**-1.0]
    torch.testing.assert_close(logprobs.grad, -torch.tensor(weights))
    assert float(found.ratio_max) == 1.0


def test_the_recomputed_policy_is_the_one_at_the_batchs_start(
    model: Path, tmp_path: Path, world: World
) -> None:
    wanted = ObjectiveSettings(ratio="proximal")
    learner = kit.learner(
        model, tmp_path, world, objective=wanted, row_tokens=40, optimizer_steps=3
    )
    rows = kit.rows()
    before = proximal_logprobs(learner, rows)
    assert [len(part) for part in before] == [len(row.output_tokens) for row in rows]
    line = train_step(learner, batch(rows), Stopwatch())
    assert line["optimizer_steps"] == 3
    # First step: the policy is its own proximal one. Later steps are compared with the start.
    assert line["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert line["ratio_max"] > 1.001
    after = proximal_logprobs(learner, rows)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def batch(rows: list[kit.Rollout], step: int = 0) -> TrainingBatch:
    groups = tuple(tuple(rows[i : i + 4]) for i in range(0, len(rows), 4))
    return TrainingBatch(Step(step), ZERO_DIGEST, groups, ())


@given(st.integers(1, 60), st.integers(1, 80))
def test_optimizer_steps_share_the_groups_each_once(groups: int, steps: int) -> None:
    shares = shares_of(groups, steps)
    assert sorted(g for share in shares for g in share) == list(range(groups))
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_an_unknown_objective_is_one_sentence_with_the_known_ones(
    model: Path, tmp_path: Path, world: World
) -> None:
    with pytest.raises(UserError, match="no_such_objective"):
        objective_of("no_such_objective")
    with pytest.raises(UserError, match="does not know") as caught:
        kit.learner(model, tmp_path, world, objective=ObjectiveSettings(name="no_such_objective"))
    assert all(name in caught.value.hint for name in REGISTRY)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_of_an_objective_that_is_not_finite_is_refused(tmp_path: Path, value: str) -> None:
    """NaN passes no comparison, so a bound does not refuse it, and a loss of NaN trains nothing."""
    numbers = [
        name for name, one in ObjectiveSettings.model_fields.items()
        if one.annotation in (float, float | None)
    ]  # fmt: skip
    assert "entropy" in numbers
    for name in [*numbers, "parameters.slope"]:
        (tmp_path / "trainer.toml").write_text(f"[objective]\n{name} = {value}\n")
        with pytest.raises(UserError, match=f"'objective.{name}' is wrong: .*finite number"):
            load_settings(Settings, {}, tmp_path / "trainer.toml")


def test_another_objective_is_one_line_of_registry(
    model: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTRY, "mine", REGISTRY["dr_grpo"])
    mine = kit.learner(model, tmp_path, world, objective=ObjectiveSettings(name="mine"))
    known = kit.learner(model, tmp_path, world, objective=ObjectiveSettings(name="dr_grpo"))
    backward(mine, kit.rows())
    backward(known, kit.rows())
    assert kit.relative_difference(kit.gradients(mine.policy), kit.gradients(known.policy)) == 0.0


def cut_rows(share: int) -> list[kit.Rollout]:
    return [
        replace(row, finish_reason="length" if row.sample < share else "end") for row in kit.rows()
    ]


def test_overlong_samples_are_kept_masked_or_penalised_and_always_counted() -> None:
    rows = cut_rows(1)
    groups = groups_of(rows, 4)
    kept = judge(groups, ObjectiveSettings(overlong="keep"))
    masked = judge(groups, ObjectiveSettings(overlong="mask"))
    penalised = judge(groups, ObjectiveSettings(overlong="penalise", overlong_penalty=0.5))
    assert kept.overlong == masked.overlong == penalised.overlong == 3
    assert all(kept.counted)
    assert masked.counted == [row.sample != 0 for row in rows]
    assert masked.advantages == kept.advantages  # its reward stays in its group's baseline
    for number, row in enumerate(rows):
        if row.sample == 0:
            assert penalised.advantages[number] < kept.advantages[number]


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_masked_sample_has_no_gradient_and_no_place_in_the_normalization(
    model: Path, tmp_path: Path, world: World, name: str
) -> None:
    wanted = ObjectiveSettings(name=name, overlong="mask", advantage="mean")
    rows = cut_rows(1)
    masked = kit.learner(model, tmp_path, world, objective=wanted)
    found = backward(masked, rows)
    assert found["masked"] == pytest.approx(0.25)
    # The numbers of a masked sample have no effect.
    wild = [replace(r, logprobs=(-1e4,) * len(r.logprobs)) if r.sample == 0 else r for r in rows]
    other = kit.learner(model, tmp_path, world, objective=wanted)
    backward(other, wild)
    assert kit.relative_difference(kit.gradients(other.policy), kit.gradients(masked.policy)) < 1e-6


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=40),
    st.sampled_from(sorted(REGISTRY)),
)
def test_weights_of_counted_samples_do_not_know_of_masked_ones(
    samples: list[tuple[int, bool]], name: str
) -> None:
    lengths, counted = [n for n, _ in samples], [c for _, c in samples]
    found = token_weights(lengths, name, 50, counted)
    alone = token_weights([n for n, c in samples if c], name, 50)
    assert [w for w, c in zip(found, counted, strict=True) if c] == alone
    assert all(w == 0.0 for w, c in zip(found, counted, strict=True) if not c)


def test_a_batch_of_masked_samples_alone_changes_nothing(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(
        model, tmp_path, world, objective=ObjectiveSettings(overlong="mask"), weight_decay=0.0
    )
    before = full_state(learner.policy)
    line = train_step(learner, batch(cut_rows(4)), Stopwatch())
    assert line["masked"] == 1.0
    after = full_state(learner.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_mismatch_is_measured_on_rows_of_the_very_policy_that_is_trained(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world)
    rows = kit.rows(version=3)
    exact = proximal_logprobs(learner, rows)
    rows = [
        replace(row, logprobs=tuple(float(v) for v in part))
        for row, part in zip(rows, exact, strict=True)
    ]
    assert backward(learner, rows, step=3)["kl_mismatch"] == pytest.approx(0.0, abs=1e-9)
    learner.policy.zero_grad()
    off = [replace(row, logprobs=tuple(v - 0.5 for v in row.logprobs)) for row in rows]
    expected = math.exp(0.5) - 1.0 - 0.5
    assert backward(learner, off, step=3)["kl_mismatch"] == pytest.approx(expected, rel=1e-3)
    learner.policy.zero_grad()
    assert "kl_mismatch" not in backward(learner, off, step=4)  # staleness is not a mismatch


def test_alarms_name_the_number_and_its_bound(model: Path, tmp_path: Path) -> None:
    settings = kit.settings(model, tmp_path, alarm_ratio=50.0, alarm_kl=0.5, alarm_entropy=0.1)
    quiet = {"ratio_max": 3.0, "kl_old": 0.01, "entropy": 1.0, "applied": True}
    assert alarms_of(quiet, settings) == []
    assert alarms_of({**quiet, "ratio_max": 148.4}, settings) == ["ratio_max 148.4 above 50"]
    assert alarms_of({**quiet, "kl_mismatch": 0.7}, settings) == ["kl_mismatch 0.7 above 0.5"]
    stale = {**quiet, "kl_mismatch_stale": {"1": 0.1, "2": 0.8}}
    assert alarms_of(stale, settings) == ["kl_mismatch_stale/2 0.8 above 0.5"]
    assert alarms_of({**quiet, "entropy": 0.01}, settings) == ["entropy 0.01 below 0.1"]
    assert len(alarms_of({**quiet, "kl_old": "nan", "applied": False}, settings)) == 2
