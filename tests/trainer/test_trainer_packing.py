"""Packing: every sample once, rows within their size, ranks balanced and in step."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
import trainer_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_kit import block_causal_mask

from prime_core.rollout import model_ranges
from prime_trainer.model import PAD
from prime_trainer.packing import collate, cost, pack_rows, plan, quality

lengths = st.lists(st.integers(1, 90), min_size=1, max_size=120)


@given(lengths, st.integers(1, 100), st.integers(1, 5), st.integers(1, 400))
def test_every_sample_is_planned_exactly_once(
    sizes: list[int], row_tokens: int, ranks: int, micro_tokens: int
) -> None:
    found = plan(sizes, ranks=ranks, row_tokens=row_tokens, micro_tokens=micro_tokens)
    seen = Counter(
        sample for rank in found.ranks for micro in rank for row in micro for sample in row
    )
    assert seen == Counter(range(len(sizes)))
    assert len(found.ranks) == ranks
    assert len({len(rank) for rank in found.ranks}) == 1  # a collective waits for every rank


@given(lengths, st.integers(1, 100), st.integers(1, 400))
def test_rows_and_micro_batches_keep_their_bounds(
    sizes: list[int], row_tokens: int, micro_tokens: int
) -> None:
    found = plan(sizes, ranks=2, row_tokens=row_tokens, micro_tokens=micro_tokens)
    for rank in found.ranks:
        for micro in rank:
            widths = [sum(sizes[i] for i in row) for row in micro]
            assert all(
                w <= row_tokens or len(row) == 1 for w, row in zip(widths, micro, strict=True)
            )
            assert len(micro) <= 1 or len(micro) * max(widths) <= micro_tokens


@given(lengths)
def test_rows_are_at_least_half_full_on_average(sizes: list[int]) -> None:
    rows = pack_rows(sizes, 90)
    assert len(rows) <= 2 * sum(sizes) / 90 + 1


@given(st.lists(st.integers(1, 40), min_size=60, max_size=200), st.integers(2, 4))
def test_no_rank_carries_much_more_than_another(sizes: list[int], ranks: int) -> None:
    found = plan(sizes, ranks=ranks, row_tokens=40, micro_tokens=200)
    work = [
        sum(cost(sizes[i]) for micro in rank for row in micro for i in row) for rank in found.ranks
    ]
    assert max(work) - min(work) <= 1.5 * max(cost(40), 45)


def test_the_ranks_micro_batches_cost_alike_one_by_one() -> None:
    # Rows are equally wide, but a few long samples attend more than many short ones.
    rng = random.Random(0)
    sizes = [rng.randint(10, 1600) for _ in range(1500)]
    found = plan(sizes, ranks=4, row_tokens=3000, micro_tokens=3000, attention_cost=1 / 200)
    used = quality(found, sizes, 1 / 200)
    assert used.imbalance < 0.01
    assert used.lockstep < 0.03
    assert used.fill > 0.97


def test_a_sample_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        plan([3, 0], ranks=1, row_tokens=8, micro_tokens=8)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(10, 60))
def test_collate_puts_each_samples_own_numbers_on_its_own_tokens(
    seed: int, row_tokens: int
) -> None:
    # An ancestor dropped prompts from one list only: every later reward sat on the wrong sample.
    rollouts = kit.conversations(kit.rows(3, 3, seed=seed))
    advantages = [float(i) for i in range(len(rollouts))]
    weights = [1.0 / (1 + i) for i in range(len(rollouts))]
    sizes = [len(r.prompt_tokens) + len(r.output_tokens) for r in rollouts]
    layout = plan(sizes, ranks=1, row_tokens=row_tokens, micro_tokens=120)
    taken = Counter[int]()
    for micro in layout.ranks[0]:
        batch, tokens = collate(micro, rollouts, advantages, weights, torch.device("cpu"))
        flat = batch.inputs.flatten()
        assert tokens.turns is not None
        for place, target, old, advantage, weight, turn in zip(
            batch.predict.tolist(),
            batch.targets.tolist(),
            tokens.old_logprobs.tolist(),
            tokens.advantages.tolist(),
            tokens.weights.tolist(),
            tokens.turns.tolist(),
            strict=True,
        ):
            sample = int(batch.sequences.flatten()[place])
            position = int(batch.positions.flatten()[place])
            rollout = rollouts[sample]
            number = position + 1 - len(rollout.prompt_tokens)
            whole = (*rollout.prompt_tokens, *rollout.output_tokens)
            assert int(flat[place]) == whole[position]
            assert target == rollout.output_tokens[number]
            assert old == pytest.approx(rollout.logprobs[number])
            assert advantage == sample
            assert weight == pytest.approx(weights[sample])
            start, end = model_ranges(rollout.spans, len(rollout.output_tokens))[turn]
            assert start <= number < end
            taken[sample] += 1
    assert taken == Counter({i: r.generated for i, r in enumerate(rollouts)})


def test_attention_never_crosses_samples_and_no_softmax_is_empty() -> None:
    sequences = torch.tensor([[4, 4, 4, 9, 9, PAD], [2, 2, 2, 2, 2, 2]])
    mask = block_causal_mask(sequences)[:, 0]
    for row in range(2):
        for query in range(6):
            for key in range(6):
                same = sequences[row, query] == sequences[row, key] != PAD
                expected = query == key or (same and key <= query)
                assert bool(mask[row, query, key]) == bool(expected)
    assert mask.any(-1).all()
