"""Committed ABI and bytecode are what the sources give, and fit on chain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forge_kit import ROOT, need_forge
from programs import load_script

ABI = ROOT / "protocol" / "prime_chain" / "abi"
MAX_CODE = 24_576  # EIP-170
MAX_INITCODE = 49_152  # EIP-3860


SCRIPT = load_script(ROOT / "scripts" / "build_contracts.py")


@pytest.mark.forge
@pytest.mark.slow
def test_committed_abi_and_bytecode_are_what_the_sources_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_forge()
    monkeypatch.setattr(SCRIPT, "OUT", tmp_path / "out")
    monkeypatch.setattr(SCRIPT, "CACHE", tmp_path / "cache")
    SCRIPT.compile_contracts()
    assert SCRIPT.stale() == [], "run `make contracts` and commit protocol/prime_chain/abi"


def test_stale_names_a_file_that_differs_is_missing_or_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SCRIPT, "ABI", tmp_path)
    monkeypatch.setattr(SCRIPT, "artifacts", lambda: {"A.json": "a", "B.json": "b", "C.json": "c"})
    monkeypatch.setattr(SCRIPT, "LAYOUT", tmp_path / "elsewhere" / "layout.json")
    monkeypatch.setattr(SCRIPT, "layout", lambda: "slots")
    monkeypatch.setattr(SCRIPT, "KINDS", tmp_path / "elsewhere" / "kinds.py")
    monkeypatch.setattr(SCRIPT, "event_kinds", lambda: "classes")
    (tmp_path / "A.json").write_text("a")
    (tmp_path / "B.json").write_text("other")
    (tmp_path / "D.json").write_text("d")
    assert SCRIPT.stale() == ["B.json", "C.json", "D.json", "kinds.py", "layout.json"]


@pytest.mark.parametrize("name", SCRIPT.CONTRACTS)
def test_contracts_fit_on_chain_with_margin(name: str) -> None:
    body = json.loads((ABI / f"{name}.json").read_text())
    assert len(bytes.fromhex(body["deployedBytecode"][2:])) < 0.85 * MAX_CODE
    assert len(bytes.fromhex(body["bytecode"][2:])) < 0.85 * MAX_INITCODE
