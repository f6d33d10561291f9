"""Policies loaded in place: every tensor is compared once it is loaded, and parameters stay put."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from prime_core.errors import UnavailableError
from prime_engine import policy_weights
from prime_engine.policy_weights import load_policy, require_policy, tensor_names

Q, K, V = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
SIZES = {EMBEDDING: (12, 8), Q: (8, 8), K: (4, 8), V: (4, 8), NORM: (8,), HEAD: (12, 8)}
PARTS = {Q: (0, 8), K: (8, 4), V: (12, 4)}


class Fused(nn.Module):
    """vLLM's attributes of a fused projection on one card."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 8))
        self.output_partition_sizes = [8, 4, 4]
        self.tp_rank = 0
        self.num_kv_head_replicas = 1


class Model(nn.Module):
    """A model laid out as vLLM's, which loads every tensor but those in `ignored`."""

    def __init__(self, ignored: tuple[str, ...] = (), tied: bool = False) -> None:
        super().__init__()
        layer = nn.Module()
        layer.self_attn = nn.Module()
        layer.self_attn.qkv_proj = Fused()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(12, 8)
        self.model.layers = nn.ModuleList([layer])
        self.model.norm = nn.LayerNorm(8, bias=False)
        self.lm_head = self.model.embed_tokens if tied else nn.Linear(8, 12, bias=False)
        self._ignored = (*ignored, HEAD) if tied else ignored

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        fused = self.get_submodule("model.layers.0.self_attn.qkv_proj").weight
        for name, tensor in weights:
            if name in PARTS and name not in self._ignored:
                start, count = PARTS[name]
                fused[start : start + count].copy_(tensor)
            elif name not in self._ignored:
                self.get_parameter(name).copy_(tensor)


def _policy(folder: Path, seed: int, tied: bool = False) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
    if tied:
        tensors[HEAD] = tensors[EMBEDDING].clone()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:3]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[3:]}, folder / "b.safetensors")
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_the_next_policy_is_loaded_into_the_same_parameters(tmp_path: Path, tied: bool) -> None:
    config = SimpleNamespace(tie_word_embeddings=tied)
    first, second = (_policy(tmp_path / str(i), i, tied) for i in range(2))
    model = Model(tied=tied)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    for policy, other in ((first, second), (second, first)):
        count = load_policy(model, policy, config, "float32", "cpu")
        assert count == require_policy(model, policy, config, "float32") == 8 * (12 + 12 + 16 + 1)
        with pytest.raises(UnavailableError, match=r"did not load .* as it is in the policy"):
            require_policy(model, other, config, "float32")
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


@pytest.mark.parametrize("name", [EMBEDDING, K, NORM, HEAD])
def test_a_tensor_that_is_not_loaded_is_named(tmp_path: Path, name: str) -> None:
    config = SimpleNamespace(tie_word_embeddings=False)
    with pytest.raises(UnavailableError, match=f"did not load {name}"):
        load_policy(Model((name,)), _policy(tmp_path / "0", 3), config, "float32", "cpu")


@pytest.mark.parametrize("ahead", [0, 128, 512])
def test_large_tensors_are_loaded_and_compared_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(policy_weights, "SLICE_BYTES", 64)
    monkeypatch.setattr(policy_weights, "READ_BYTES", 40)
    monkeypatch.setattr(policy_weights, "AHEAD_BYTES", ahead)
    config = SimpleNamespace(tie_word_embeddings=False)
    policy = _policy(tmp_path / "0", 4)
    model = Model()
    assert load_policy(model, policy, config, "float32", "cpu") == 8 * (12 + 12 + 16 + 1)
    require_policy(model, policy, config, "float32")
    with torch.no_grad():
        model.lm_head.weight[11, 7] += 1
    with pytest.raises(UnavailableError, match=f"did not load {HEAD}"):
        require_policy(model, policy, config, "float32")


def test_no_thread_is_left_when_loading_fails(tmp_path: Path) -> None:
    class Failing(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            next(iter(weights))
            raise ValueError("half-way")

    config, policy = SimpleNamespace(tie_word_embeddings=False), _policy(tmp_path / "0", 5)
    with pytest.raises(ValueError, match="half-way") as caught:
        load_policy(Failing(), policy, config, "float32", "cpu")
    assert caught.value is not None  # its traceback is alive
    assert not [one for one in threading.enumerate() if one.name.startswith("weights")]


def test_the_names_of_tensors_are_those_of_all_files(tmp_path: Path) -> None:
    assert tensor_names(_policy(tmp_path / "0", 6)) == set(SIZES)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="holds no weights"):
        load_policy(Model(), tmp_path, SimpleNamespace(), "float32", "cpu")
