"""The plain engine takes the next policy into the weights that it has, or says that it cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_core.errors import UnavailableError
from prime_engine import held, policy_weights
from prime_engine.base import GenerationRequest, PolicyReplacing
from prime_engine.plain import PlainEngine
from prime_engine.tiny import write_tiny_model
from prime_engine.variants import quantizer
from prime_verify.proofs.sampling_torch import gumbel

WEIGHTS = "model.safetensors"


def _engine(folder: Path, **options: Any) -> PlainEngine:
    return PlainEngine(folder, noise=gumbel, **options)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("policies")
    return write_tiny_model(root / "0"), write_tiny_model(root / "1", seed=1)


@pytest.fixture(scope="module")
def tied(policies: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """The same policies with the embedding as their head, which then is not in the files."""
    made = []
    for policy in policies:
        folder = tmp_path_factory.mktemp("tied") / policy.name
        shutil.copytree(policy, folder)
        weights = load_file(folder / WEIGHTS)
        del weights["lm_head.weight"]
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        made.append(folder)
    return tuple(made)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
@pytest.mark.parametrize("head", ["policies", "tied"])
def test_an_engine_with_the_next_policy_in_place_is_that_of_a_new_one(
    request: pytest.FixtureRequest,
    head: str,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    native: bool,
    device: str,
) -> None:
    policies = request.getfixturevalue(head)
    monkeypatch.setattr(held, "native_bfloat16", lambda: native)
    monkeypatch.setattr(policy_weights, "SLICE_BYTES", 4096)  # tensors are copied in several pieces
    engine, new = _engine(policies[0], dtype=dtype, device=device), _engine(policies[1])
    before = engine.numeric_class()
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    assert engine.in_dtype(other).numeric_class() != before
    places = [each.data_ptr() for each in engine.model.parameters()]
    assert isinstance(engine, PolicyReplacing)
    assert engine.replace_policy(policies[1])
    assert [each.data_ptr() for each in engine.model.parameters()] == places
    for wanted in (dtype, other):
        found = engine.in_dtype(wanted).numeric_class()
        assert found.fingerprint == new.in_dtype(wanted).numeric_class().fingerprint


def test_what_is_loaded_later_is_of_the_next_policy(policies: tuple[Path, Path]) -> None:
    engine = _engine(policies[0])
    assert engine.replace_policy(policies[1])
    request = GenerationRequest((1, 2, 3), 8, 7)
    made = engine.in_dtype("bfloat16").generate([request], 1.0)  # which loads weights of its own
    assert made[0].output_tokens == (
        _engine(policies[1], dtype="bfloat16").generate([request], 1.0)[0].output_tokens
    )


def _rename(weights: dict[str, torch.Tensor]) -> None:
    weights["another"] = weights.pop("lm_head.weight")


def _reshape(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"][1:].clone()


def _widen(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"].float()


@pytest.mark.parametrize("change", [_rename, _reshape, _widen])
def test_other_tensors_take_a_new_engine_and_change_nothing(
    policies: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    shutil.copytree(policies[1], tmp_path / "2")
    weights = load_file(tmp_path / "2" / WEIGHTS)
    change(weights)
    save_file(weights, tmp_path / "2" / WEIGHTS, metadata={"format": "pt"})
    engine = _engine(policies[0])
    before = [each.clone() for each in engine.model.parameters()]
    assert not engine.replace_policy(tmp_path / "2")
    assert all(map(torch.equal, before, engine.model.parameters()))


def test_another_tokenizer_rows_or_changed_weights_take_a_new_engine(
    policies: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(policies[1], tmp_path / "2")
    (tmp_path / "2" / "tokenizer_config.json").write_text("{}")
    engine = _engine(policies[0])
    assert not engine.replace_policy(tmp_path / "2")
    rows = engine.add([GenerationRequest((1, 2, 3), 8, 7)], 1.0)
    assert not engine.replace_policy(policies[1])
    engine.cancel(rows)
    assert engine.replace_policy(policies[1])
    assert not _engine(policies[0], prepare=quantizer(4)).replace_policy(policies[1])


def test_a_policy_that_cannot_be_read_or_is_not_what_was_loaded_is_unavailable(
    policies: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(policies[1], tmp_path / "2")
    path = tmp_path / "2" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UnavailableError, match="no model can be loaded"):
        _engine(policies[0]).replace_policy(tmp_path / "2")
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, _values: self)
    with pytest.raises(UnavailableError, match="was not loaded as it is in the policy"):
        _engine(policies[0]).replace_policy(policies[1])
