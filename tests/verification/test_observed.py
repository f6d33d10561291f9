"""Limits that are proposed from observations: what they rest on, and what they cannot do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from observations import CARD, drift_of, seen_rows, table_of

from prime_core.calibration import CalibrationSignature
from prime_core.errors import MalformedError, UserError
from prime_core.ids import ZERO_ADDRESS, Address
from prime_core.verdict import VerdictTable
from prime_verify import observed, replay
from prime_verify.observed import LEAST_PROVIDERS, LEAST_ROWS, file_of, propose
from prime_verify.proofs.tails import MICRO
from prime_verify.proofs.thresholds import (
    FLOORS,
    SCOPES,
    STATISTICS,
    SetupLimits,
    explained,
    shipped,
)

ROWS, FILES = 128, 2
Tables = Mapping[Address, Sequence[VerdictTable]]


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LEAST_ROWS >= ROWS
    monkeypatch.setattr(observed, "LEAST_ROWS", ROWS)


def provider(number: int) -> Address:
    return Address(f"0x{number:040x}")


def files(number: int, scale: float = 0.02, count: int = FILES) -> list[VerdictTable]:
    return [table_of(1000 * number + file, scale) for file in range(count)]


@pytest.fixture(scope="module")
def honest() -> Tables:
    return {provider(number): files(number) for number in range(1, LEAST_PROVIDERS + 1)}


def limits(setup: SetupLimits) -> dict[tuple[str, str], int]:
    return {
        (scope, name): tail.limit
        for scope in SCOPES
        for name, tail in getattr(setup, scope).items()
    }


def proposed(tables: Tables) -> SetupLimits:
    found = propose(shipped(), CARD, tables).calibration
    (setup,) = found.setups[len(shipped().setups) :]
    assert found.setup("plain/1", "bfloat16", CARD) is None, "it accuses no one"
    return setup


def wide() -> SetupLimits:
    found = shipped().widest("plain/1", "bfloat16", CARD)
    assert found is not None
    return found


def test_a_table_states_the_rows_and_the_drift_that_the_file_s_dtype_explains() -> None:
    reference = drift_of(2.0)
    seen = file_of(table_of(7), wide())
    for found, made in zip(seen.rows, seen_rows(7, 0.02, reference, wide()), strict=True):
        assert (found.number, found.tokens, found.windows) == (made.number, made.tokens, 5)
        assert found.values == pytest.approx(dict(made.values), rel=1e-4)
    assert seen.reference.file == pytest.approx(dict(reference.file), rel=1e-4)
    assert seen.reference.row == pytest.approx(dict(reference.row), rel=1e-4)
    together = replay.combine(seen.rows)
    for name in STATISTICS:
        share = float(table_of(7).shares[name]) * wide().file[name].limit / MICRO
        assert share == pytest.approx(together[name] / explained(name, reference.file), rel=1e-3)


def test_without_drift_of_a_dtype_rows_are_compared_with_the_floors() -> None:
    """A file in the replay's own dtype, of which some statistics are zero."""
    table = table_of(7)
    zero = {"margin_mean": "0", "margin_max": "0", "twin_margin": "0"}
    table = table.model_copy(
        update={"statistics": table.statistics | zero, "shares": table.shares | zero}
    )
    seen = file_of(table, wide())
    assert seen.reference.row["margin_mean"] == 0
    assert explained("twin_margin", seen.reference.row) == FLOORS["margin_mean"]


def _changed(**changes: Any) -> VerdictTable:
    table = table_of(7)
    return table.model_copy(
        update={
            name: getattr(table, name) | change if isinstance(change, dict) else change
            for name, change in changes.items()
        }
    )


@pytest.mark.parametrize(
    "change",
    [
        {"rows": ()},
        {"rows_drawn": (*range(63),)},
        {"rows_drawn": (*range(63), 62)},
        {"row_statistics": {"sketch": ("0.1",) * 63}},
        {"row_statistics": {"sketch": ("nan",) * 64}},
        {"row_statistics": {"sketch": ("-1",) * 64}},
        {"row_statistics": {"sketch": ("x",) * 64}},
        {"row_statistics": {"sketch": ("1e308",) * 64}},
        {"shares": {"sketch": "inf"}},
        {"shares": {"sketch": "1e-200"}},
        {"statistics": {"sketch": ""}},
    ],
)
def test_a_table_that_states_no_measurement_of_each_row_counts_for_nothing(
    change: dict[str, Any],
) -> None:
    table = _changed(**change)
    with pytest.raises(MalformedError):
        file_of(table, wide())
    with pytest.raises(UserError, match="no accepted file of its family"):
        propose(shipped(), CARD, {provider(1): [table] * FILES})


def test_honest_files_propose_limits_that_accept_them_within_the_widest(honest: Tables) -> None:
    found = propose(shipped(), CARD, honest)
    setup = proposed(honest)
    assert (setup.engine, setup.dtype, setup.device) == ("plain/1", "bfloat16", CARD)
    assert (setup.rows, setup.files) == (3 * ROWS, 3 * FILES)
    assert (found.providers, found.outside, found.lacking) == ([3], {}, [])
    bounds = limits(wide())
    assert {*limits(setup)} == {*bounds}
    assert all(limit <= bounds[key] for key, limit in limits(setup).items())
    assert any(limit < bounds[key] for key, limit in limits(setup).items())


def test_one_provider_cannot_move_a_limit_beyond_those_of_the_others(honest: Tables) -> None:
    """With three of them the median lies between the other two, however large its values are."""
    alone = [limits(proposed({**honest, provider(3): files(3, scale)})) for scale in (0.0002, 0.1)]
    low, high = alone
    of_each = []
    for number in (1, 2):
        same = {provider(10 + copy): honest[provider(number)] for copy in range(3)}
        of_each.append(limits(proposed(same)))
    for key in low:
        assert min(one[key] for one in of_each) <= low[key] <= high[key]
        assert high[key] <= max(one[key] for one in of_each)
    found = propose(shipped(), CARD, {**honest, provider(3): files(3, 0.1)})
    assert {*found.outside} == {provider(3)}


def test_all_providers_together_cannot_propose_more_than_the_widest_limits() -> None:
    """Neither do these limits count with two signatures: they are not shown to find lies."""
    wild = {provider(number): files(number, 9.0) for number in range(1, 4)}
    bounds = limits(wide())
    assert limits(proposed(wild)) == bounds
    both = CalibrationSignature(made_at=1, signer=ZERO_ADDRESS, signature="0x" + "00" * 65)
    signed = propose(shipped(), CARD, wild).calibration.model_copy(
        update={"signed": both, "second": both}
    )
    assert signed.setup("plain/1", "bfloat16", CARD) is None
    assert not signed.covers(CARD)
    for device in (CARD, "NVIDIA L4"):
        assert signed.widest("plain/1", "bfloat16", device) == shipped().widest(
            "plain/1", "bfloat16", device
        )
    (sentence,) = signed.unlisted()
    assert "are not shown to find int8, int4, old10_1e-4" in sentence


@pytest.mark.parametrize(
    ("counts", "refused"),
    [
        ({}, "no accepted file of its family was measured"),
        ({1: 3 * FILES}, "1 provider.s. with 128 or more observed rows, and 3 are needed"),
        ({1: FILES, 2: FILES, 3: FILES - 1}, "plain/1 bfloat16: 2 provider"),
    ],
)
def test_too_few_rows_or_providers_propose_nothing(counts: dict[int, int], refused: str) -> None:
    with pytest.raises(UserError, match=refused):
        propose(shipped(), CARD, {provider(n): files(n, count=k) for n, k in counts.items()})


@pytest.mark.parametrize("device", ["NVIDIA L4", f"{CARD} exact"])
def test_files_of_other_cards_and_of_exact_leases_propose_nothing(device: str) -> None:
    """Log-probabilities of a proof pass are closer to a replay than those of decoding."""
    table = table_of(7, setup=f"plain/1 bfloat16 {device}")
    with pytest.raises(UserError, match="no accepted file of its family"):
        propose(shipped(), CARD, {provider(n): [table] * FILES for n in (1, 2, 3)})


def test_observations_change_no_measurement(honest: Tables) -> None:
    setup = shipped().setups[0].model_copy(update={"device": "NVIDIA H200 NVL"})
    measured = shipped().model_copy(update={"setups": (*shipped().setups, setup)})
    with pytest.raises(UserError, match="which observations never change"):
        propose(measured, CARD, honest)
    for name in ("cpu", "cpu aarch64", f"{CARD} exact", ""):
        with pytest.raises(UserError, match="names no card"):
            propose(shipped(), name, honest)
    assert observed.LEAST_PROVIDERS >= 3
