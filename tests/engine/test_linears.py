"""bfloat16 layers widened to float32: the same numbers, wherever the processor is slow at them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prime_engine import held
from prime_engine.linears import widen
from prime_engine.plain import PlainEngine
from prime_verify.proofs.sampling_torch import gumbel


def _layer(*, bias: bool) -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(96, 64, bias=bias).to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
def test_a_widened_layer_is_the_exact_product_rounded_once(bias: bool) -> None:
    layer = _layer(bias=bias)
    states = torch.randn(5, 7, 96).to(torch.bfloat16)
    exact = states.double() @ layer.weight.double().T
    if bias:
        exact += layer.bias.double()
    widen(torch.nn.Sequential(layer))
    found = layer(states)
    assert found.dtype is torch.bfloat16
    # Half a unit in the last of bfloat16's 8 bits, and the float32 sum's own rounding.
    assert torch.all((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5)


def test_hooks_of_a_widened_layer_still_see_what_it_gives() -> None:
    layer, seen = _layer(bias=False), []
    layer.register_forward_hook(lambda _layer, _inputs, output: seen.append(output))
    widen(torch.nn.Sequential(layer))
    found = layer(torch.ones(1, 96, dtype=torch.bfloat16))
    assert len(seen) == 1
    assert torch.equal(seen[0], found)


def test_float32_layers_stay_as_they_are() -> None:
    layer = torch.nn.Linear(4, 4)
    widen(torch.nn.Sequential(layer))
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("native", [True, False])
def test_only_a_processor_without_bfloat16_widens(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(held, "native_bfloat16", lambda: native)
    engine = PlainEngine(tiny_folder, noise=gumbel, dtype="bfloat16")
    assert ("forward" in vars(engine.model.get_output_embeddings())) is not native


@pytest.mark.parametrize("held_in", ["float32", "bfloat16"])
def test_a_processor_without_bfloat16_replays_the_same_in_both_dtypes_from_one_copy(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, held_in: str
) -> None:
    monkeypatch.setattr(held, "native_bfloat16", lambda: False)
    tokens = tuple(range(3, 40))
    one = PlainEngine(tiny_folder, noise=gumbel, dtype=held_in)
    for dtype in ("float32", "bfloat16"):
        loaded = PlainEngine(tiny_folder, noise=gumbel, dtype=dtype)
        assert one.in_dtype(dtype).model is one.model
        passes = [
            [
                part.tobytes()
                for parts in engine.proof_pass(tokens[:5], tokens[5:], 0.9)
                for part in parts
            ]
            for engine in (one.in_dtype(dtype), loaded)
        ]
        assert passes[0] == passes[1]
