"""Ranks that share rows train what one process does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import trainer_kit as kit
from context_ranks import CASES, shared, trained
from forks import run_ranks
from torch import Tensor

from prime_core.errors import UserError
from prime_engine.tiny import write_tiny_model
from prime_trainer.attention import packed_attention
from prime_trainer.context import Context
from prime_trainer.parallel import World

SEGMENTS = ((0, 0, 5), (0, 5, 17), (0, 17, 18), (1, 0, 24))
"""Two rows of 24 tokens, the first with padding: samples that one or all cuts go through."""


def changed_model(folder: Path, **changes: object) -> Path:
    """A tiny model with changes of its configuration."""
    write_tiny_model(folder, hidden=32, layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.slow
def test_ranks_that_share_rows_give_the_gradients_and_metrics_of_one_process(
    model: Path, tmp_path: Path, world: World
) -> None:
    window = {"use_sliding_window": True, "sliding_window": 5}
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    sliding = changed_model(tmp_path / "sliding", **window, **kinds)
    models = {"plain": model, "sliding": sliding}
    run_ranks(4, shared, models, tmp_path)
    together = torch.load(tmp_path / "found.pt", weights_only=True)
    alone = trained(models, tmp_path, world, 1)
    for size in (2, 4):
        for case in CASES:
            one, found = alone[case], together[size][case]
            torch.testing.assert_close(found["scored"], one["scored"], rtol=1e-5, atol=1e-5)
            assert kit.relative_difference(found["gradients"], one["gradients"]) < 1e-5
            assert found["line"] == pytest.approx(one["line"], rel=1e-5, abs=1e-6)


@dataclass(frozen=True)
class Known(Context):
    """One rank of a group whose keys and values `rows` has, of whole rows."""

    rows: Tensor | None = None

    def gather(self, part: Tensor) -> Tensor:
        assert self.rows is not None
        return torch.stack([own(self.rows, Context(i, self.size)) for i in range(self.size)])


def own(whole: Tensor, context: Context) -> Tensor:
    """(R, H, L, D) → a rank's tokens of it."""
    pieces = context.pieces(whole.shape[2])
    return torch.cat([whole[:, :, start:end] for start, end in pieces], dim=2)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_a_ranks_attention_is_its_part_of_the_whole(size: int, window: int | None) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 24, 8, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(2, 2, 24, width, dtype=torch.float64, requires_grad=True) for width in (8, 6)
    )
    wanted = {"segments": SEGMENTS, "scaling": 0.3, "sliding_window": window}
    module = torch.nn.Module()
    whole, _ = packed_attention(module, query, key, value, None, **wanted)
    weights = torch.randn_like(whole)
    weights[0, 18:] = 0.0  # what padding attends to is not defined
    expected = torch.autograd.grad((whole * weights).sum(), (query, key, value))
    total = [torch.zeros_like(part) for part in (query, key, value)]
    for rank in range(size):
        context = Known(rank, size, rows=torch.cat([key, value], dim=3))
        mine = (own(part, context) for part in (query, key, value))
        found, _ = packed_attention(module, *mine, None, context=context, **wanted)
        part, of_part = (
            own(each.transpose(1, 2), context).transpose(1, 2) for each in (whole, weights)
        )
        inside = of_part != 0.0
        torch.testing.assert_close(found[inside], part[inside])
        loss = (found * of_part).sum()
        for sum_, gradient in zip(
            total, torch.autograd.grad(loss, (query, key, value)), strict=True
        ):
            sum_ += gradient
    torch.testing.assert_close(total, list(expected))


def test_ranks_cannot_share_the_rows_of_a_process_that_is_alone(
    model: Path, tmp_path: Path, world: World
) -> None:
    with pytest.raises(UserError, match="context_parallel is 2, which does not divide"):
        kit.learner(model, tmp_path, world, context_parallel=2)


def test_positions_that_depend_on_the_longest_sample_are_refused(
    tmp_path: Path, world: World
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = changed_model(tmp_path / "model", rope_parameters=rope)
    kit.learner(model, tmp_path, world)
    with pytest.raises(UserError, match="dynamic positions, which depend on the longest sample"):
        kit.learner(model, tmp_path, world, context_parallel=2)
