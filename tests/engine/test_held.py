"""A model held once: long rows in chunks, two dtypes from one copy, layers on several devices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_core.errors import UnavailableError
from prime_engine import held, plain
from prime_engine.base import GenerationRequest, Replay, ReplayRequest
from prime_engine.held import HeldModel
from prime_engine.plain import CPU_PREFILL, PlainEngine
from prime_engine.sizing import placed
from prime_engine.tiny import write_tiny_model
from prime_engine.variants import quantizer
from prime_verify.engines import load_engine
from prime_verify.proofs.sampling_torch import gumbel

NAME = "model.safetensors"
LAYERS, LENGTH = 3, CPU_PREFILL + 700
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("long"), layers=LAYERS, positions=LENGTH)


def _engine(folder: Path, **options: Any) -> PlainEngine:
    return PlainEngine(folder, noise=gumbel, **options)


def _row(length: int) -> ReplayRequest:
    return ReplayRequest((1, 2, 3), tuple((i * i * 7 + 3) % 50 for i in range(length - 3)), 5)


def _same(one: Replay, other: Replay) -> bool:
    return one.end_probability == other.end_probability and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("logprobs", "winners", "margins", "contrasts", "tail_mass", "states")
    )


def _passed(engine: PlainEngine) -> bytes:
    row = _row(600)
    parts = engine.proof_pass(row.prompt_tokens, row.output_tokens, 0.7)
    return b"".join(part.tobytes() for both in parts for part in both)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_row_is_replayed_in_chunks_with_the_numbers_of_one_prefill(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    engine, row = _engine(folder, dtype=dtype), _row(LENGTH)
    seen: list[int] = []
    for layer in engine.model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _layer, given: seen.append(given[0].shape[1]))
    (chunked,) = engine.replay([row], 0.9)
    assert seen == [CPU_PREFILL, LENGTH - 1 - CPU_PREFILL] * LAYERS
    monkeypatch.setattr(plain, "CPU_PREFILL", LENGTH)
    (whole,) = _engine(folder, dtype=dtype).replay([row], 0.9)
    bound = 1e-4 if dtype == "float32" else 0.1
    assert np.abs(chunked.logprobs - whole.logprobs).max() < bound
    if dtype == "float32":
        assert np.array_equal(chunked.winners, whole.winners)


def test_a_prefill_keeps_keys_and_values_of_one_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[Any] = []

    def noted(**options: Any) -> Any:
        caches.append(made(**options))
        return caches[-1]

    made = held.DynamicCache
    monkeypatch.setattr(held, "DynamicCache", noted)
    _engine(folder).replay([_row(LENGTH)], 1.0)
    _counting, *each = caches  # the first one counts tokens, for the masks
    filled = [[layer for layer in cache.layers if layer.keys is not None] for cache in each]
    assert [len(layers) for layers in filled] == [1] * LAYERS
    assert all(layers[0].keys.shape[2] == LENGTH - 1 for layers in filled)


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_copy_of_the_weights_replays_in_both_dtypes_to_the_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, loaded: torch.dtype | None, dtype: str
) -> None:
    monkeypatch.setattr(
        PlainEngine, "_load", lambda self, _dtype, _prepare: HeldModel(folder, (CPU,), loaded)
    )
    one = _engine(folder, dtype="float32").in_dtype(dtype)
    assert one.dtype == dtype
    monkeypatch.undo()
    other = _engine(folder, dtype=dtype)
    assert _passed(one) == _passed(other)
    assert one.numeric_class() == other.numeric_class()
    rows = [_row(40), _row(300)]
    pairs = zip(one.replay(rows, 0.8), other.replay(rows, 0.8), strict=True)
    assert all(_same(*pair) for pair in pairs)


def test_dtypes_share_the_weights_unless_these_were_changed_or_rounded(
    folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    engine = _engine(folder)
    assert engine.in_dtype("bfloat16").model is engine.model
    assert engine.in_dtype("bfloat16").in_dtype("float32").model is engine.model
    changed = _engine(folder, prepare=quantizer(4))
    assert changed.in_dtype("bfloat16").model is not changed.model
    wide = write_tiny_model(tmp_path, positions=700)
    weights = {name: each.float() + 1e-6 for name, each in load_file(wide / NAME).items()}
    save_file(weights, wide / NAME, metadata={"format": "pt"})
    rounded = _engine(wide, dtype="bfloat16")
    assert rounded.in_dtype("float32").model is not rounded.model
    assert _passed(rounded.in_dtype("float32")) == _passed(_engine(wide))


def test_generation_takes_weights_in_its_dtype(folder: Path) -> None:
    request = GenerationRequest((1, 2, 3), 12, 7)
    half = _engine(folder).in_dtype("bfloat16")
    (one,) = half.generate([request], 1.0)
    assert {each.dtype for each in half.model.parameters()} == {torch.bfloat16}
    (other,) = _engine(folder, dtype="bfloat16").generate([request], 1.0)
    assert one.output_tokens == other.output_tokens
    assert np.array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_on_two_devices_compute_the_bits_of_one(folder: Path, dtype: str) -> None:
    one = _engine(folder, dtype=dtype)
    split: Any = load_engine(folder, dtype=dtype, device="cpu:0,cpu:1")
    assert split.numeric_class() == one.numeric_class()  # no class of its own
    assert _passed(split) == _passed(one)
    rows = [_row(30), _row(LENGTH)]
    pairs = zip(split.replay(rows, 0.8), one.replay(rows, 0.8), strict=True)
    assert all(_same(*pair) for pair in pairs)
    with pytest.raises(UnavailableError, match="one device"):
        split.generate([GenerationRequest((1, 2), 3, None)], 1.0)


def test_states_move_to_the_device_of_each_layer(folder: Path) -> None:
    """The second device is one where tensors have no values: what is left behind would fail."""
    model = HeldModel(folder, (CPU, torch.device("meta")), None)
    parts = model.prefill(torch.tensor([[1, 2, 3]]), torch.float32, 2)
    assert [(part.shape[1], part.device.type) for part in parts] == [(2, "meta"), (1, "meta")]
    assert model.head(torch.float32)(parts[0]).device.type == "meta"


def test_each_device_gets_only_its_consecutive_layers(folder: Path) -> None:
    model = HeldModel(folder, (CPU, torch.device("meta")), None)
    kinds = [next(layer.parameters()).device.type for layer in model.decoder.layers]
    assert kinds == sorted(kinds)  # cpu before meta
    assert set(kinds) == {"cpu", "meta"}
    for part in model.decoder.layers:
        assert len({each.device for each in part.parameters()}) == 1
    assert model.decoder.embed_tokens.weight.device.type == "cpu"
    assert model.model.lm_head.weight.device.type == "meta"
    held_bytes = Counter[torch.device]()
    for parameter in model.model.parameters():
        held_bytes[parameter.device] += parameter.nbytes
    assert max(held_bytes.values()) < 0.7 * held_bytes.total()


def test_parts_are_divided_in_order_and_about_equally() -> None:
    assert placed([1] * 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert placed([10, 1, 1, 10], 2) == [0, 0, 1, 1]
    assert placed([5], 3) == [1]
    assert placed([], 2) == []


def test_devices_of_one_engine_are_of_one_kind(folder: Path) -> None:
    with pytest.raises(UnavailableError, match="one kind"):
        _engine(folder, device="cpu,meta")
    for unknown in ("tpu", "cuda:x", "cpu,", ""):
        with pytest.raises(UnavailableError, match="is not a device"):
            load_engine(folder, device=unknown)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["all", "cuda", "cuda:0,cuda:1"])
def test_cards_that_are_not_here_are_unavailable(folder: Path, device: str) -> None:
    with pytest.raises(UnavailableError, match="choose --device cpu"):
        load_engine(folder, device=device)
