"""Policies published from the parts of several ranks are those published from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forks import run_ranks
from safetensors.torch import save
from sharded_ranks import published

from bench.trainer_parts import bench_model
from prime_broadcast.sharded import bounds
from prime_trainer.snapshot import FileLayout


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 7 MB: several chunks of 1 MiB."""
    folder = tmp_path_factory.mktemp("larger") / "model"
    return bench_model(folder, hidden=256, layers=4, vocabulary=2047, positions=256)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "lora"), [(3, 0), (2, 4)])
def test_every_byte_of_a_policy_of_several_ranks_is_that_of_the_gathered_one(
    tmp_path: Path, larger: Path, ranks: int, lora: int
) -> None:
    run_ranks(ranks, published, larger, tmp_path, lora)
    files = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "parts", tmp_path / "whole")
    ]
    assert files[0] == files[1]
    assert sum("delta-" in str(name) for name in files[0]) == 3


def test_the_head_of_the_file_is_that_of_the_library() -> None:
    shapes = {"b.weight": (3, 5), "a.weight": (1,), "a": (2, 2), "é": (0, 4), "scalar": ()}
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    raw = save(tensors, metadata={"format": "pt"})
    layout = FileLayout.of(shapes)
    assert raw[: len(layout.head)] == layout.head
    assert layout.size == len(raw)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 1 << 20, (5 << 20) + 3])
def test_parts_cover_a_file_at_chunk_boundaries(size: int, parts: int) -> None:
    cuts = bounds(size, 1 << 20, parts)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, size, parts + 1)
    assert all(cut % (1 << 20) == 0 for cut in cuts[:-1] if cut != size)
    assert cuts == sorted(cuts)
