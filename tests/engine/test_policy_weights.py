"""Policies loaded in place: every tensor is compared once it is loaded, and parameters stay put."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from prime_core.errors import UnavailableError
from prime_engine.policy_weights import load_policy, require_policy

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


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="holds no weights"):
        load_policy(Model(), tmp_path, SimpleNamespace(), "float32", "cpu")
