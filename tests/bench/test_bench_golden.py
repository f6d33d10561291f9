"""Kept work of the detection bench counts by a number; these values are what it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from bench import golden
from prime_verify.proofs import thresholds

VECTOR: dict[str, Any] = json.loads(golden.VECTOR.read_bytes())
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.2}
"""Of log-probabilities and sums of states by another processor's kernels."""


def test_no_statistic_limit_or_accusation_changes_without_its_number() -> None:
    """If this fails on purpose: raise golden.STATISTICS, then python -m bench.golden."""
    assert VECTOR["statistics"] == golden.STATISTICS
    assert json.loads(json.dumps(golden.values())) == VECTOR["values"]


def test_the_plain_engine_finds_what_it_found_in_either_dtype() -> None:
    found, known = golden.engine_values(), VECTOR["engine"]
    assert found.keys() == known.keys()
    for name, columns in known.items():
        if name.endswith("drawn"):
            assert found[name] == columns
            continue
        for column, values in columns.items():
            within = TOLERANCE[name.partition(" ")[0]]
            np.testing.assert_allclose(found[name][column], values, rtol=within, atol=within)


def test_the_vector_holds_every_statistic_scope_and_ending() -> None:
    values = VECTOR["values"]
    assert set(thresholds.STATISTICS) <= values["together"].keys()
    assert {name.partition(".")[0] for name in values["limits"]} == {*thresholds.SCOPES}
    endings = {*values["accusations"].values(), *values["lies"].values()}
    assert endings >= {
        *("", "WRONG_ACTIVATIONS", "WRONG_SAMPLING", "FORGED_PROOF", "WRONG_SKETCH"),
        *("EARLY_END", "TAMPERED_LOGPROBS"),
    }


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("prime_verify.replay", "MARGIN_CAP", 3.9),
        ("prime_verify.replay", "BROKEN", {"exponent": 2.0, "sign": 2.0, "sketch": 2.0}),
        ("prime_verify.replay", "LONG_TOKENS", 9999),
        ("prime_verify.proofs.thresholds", "FLOORS", {**thresholds.FLOORS, "sketch": 2.0**-8}),
        ("prime_verify.proofs.sampling", "END_PROBABILITY", 0.01),
    ],
)
def test_a_changed_constant_changes_a_value(
    where: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the values would show it."""
    monkeypatch.setattr(f"{where}.{name}", value)
    assert json.loads(json.dumps(golden.values())) != VECTOR["values"]


def test_other_values_are_not_written_under_the_same_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "vector.json"
    path.write_text(json.dumps({**VECTOR, "values": {}}))
    monkeypatch.setattr(golden, "engine_values", dict)
    monkeypatch.setattr(golden, "values", lambda: {"changed": 1})
    assert golden.main(path) == 1
    assert json.loads(path.read_bytes())["values"] == {}
    monkeypatch.setattr(golden, "STATISTICS", golden.STATISTICS + 1)
    assert golden.main(path) == 0
    assert json.loads(path.read_bytes())["values"] == {"changed": 1}
