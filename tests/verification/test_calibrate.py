"""Calibration: what is shipped is the command's, and limits follow from it by one formula."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.core.errors import MalformedError, UnavailableError
from protocol.proofs import tails, thresholds
from protocol.proofs.tails import MICRO, QUANTILES, SAFETY, Tail
from protocol.proofs.thresholds import FLOORS, STATISTICS, Calibration, Limits, Reference
from protocol.verification import calibrate
from protocol.verification.setups import Job, Setup, generate, synthetic_run


def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "BATCH_FILES", {64: 1})
    monkeypatch.setattr(calibrate, "LENGTHS", (24,))


def test_a_small_calibration_stays_within_the_shipped_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _small(monkeypatch)
    found, left_out = calibrate.calibrate([], python_of={"plain": None})
    assert not left_out
    assert {s.dtype for s in found.setups} == {"float32", "bfloat16"}
    for setup in found.setups:
        shipped = thresholds.shipped().setup(setup.engine, setup.dtype, setup.device)
        assert shipped is not None
        assert shipped.rows > setup.rows
        for here, there in ((setup.row, shipped.row), (setup.file, shipped.file)):
            for name in STATISTICS:
                assert here[name].largest <= there[name].limit, name


def test_an_engine_that_is_missing_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _small(monkeypatch)
    python_of = {"plain": None, "vllm": Path("/nowhere/python")}
    found, left_out = calibrate.calibrate([], python_of=python_of, dtypes=("float32",))
    assert [setup.engine for setup in found.setups] == ["plain/1"]
    assert left_out[0].startswith("vllm float32 on cpu does not run")


def test_an_unusable_model_ends_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no model can be loaded"):
        calibrate.calibrate([tmp_path / "none"], python_of={"plain": None})


def test_files_of_another_interpreter_are_those_of_this_one(tmp_path: Path) -> None:
    model = calibrate.tiny_models(tmp_path)[0]
    jobs = [Job(model, 64, 2), Job(model, 1, 1)]
    here = Setup("plain", "float32")
    there = Setup("plain", "float32", python=Path(sys.executable))
    assert list(generate(here, jobs, (5, 3))) == list(generate(there, jobs, (5, 3)))
    with pytest.raises(UnavailableError, match="other float32 on cpu does not run"):
        list(generate(Setup("other", "float32", python=Path(sys.executable)), jobs, (5,)))


def _tail(limit: float, largest: float = 0.0) -> Tail:
    micro = round(limit * MICRO)
    return Tail(
        count=1, quantiles=(0, 0, 0), largest=round(largest * MICRO), start=0, scale=0, limit=micro
    )


def test_limits_are_the_explained_drift_times_the_limit_ratio() -> None:
    setup = thresholds.SetupLimits(
        engine="plain/1", dtype="bfloat16", device="cpu", batches=(64,), rows=1, files=1, tokens=1,
        row=dict.fromkeys(STATISTICS, _tail(6)), file=dict.fromkeys(STATISTICS, _tail(1, 0.25)),
    )  # fmt: skip
    limits = setup.limits(Reference(row={"sketch": 0.01}, file={"sketch": 0.02}))
    assert limits.row["sketch"] == pytest.approx(6 * (FLOORS["sketch"] + 0.01))
    assert limits.file["sketch"] == pytest.approx(FLOORS["sketch"] + 0.02)
    assert limits.honest_sketch == pytest.approx(0.5 * (FLOORS["sketch"] + 0.02))
    assert limits.file["mantissa"] == FLOORS["mantissa"]


def test_the_extrapolated_limit_of_exponential_values_is_near_the_true_quantile() -> None:
    values = np.random.default_rng(0).exponential(0.3, 4000).tolist()
    true = -0.3 * np.log(1e-6)
    assert true <= tails.fit(values, 1e-6).limit / MICRO <= 1.3 * true


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.floats(1e-12, 1e-2))
def test_a_limit_is_never_below_what_honest_values_reached(
    values: list[float], chance: float
) -> None:
    found = tails.fit(values, chance)
    assert found.limit >= MICRO
    assert found.limit >= SAFETY * max(values) * MICRO - 1
    assert len(found.quantiles) == len(QUANTILES)
    assert list(found.quantiles) == sorted(found.quantiles)
    assert found.quantiles[-1] <= found.largest
    assert tails.fit(values, chance / 100).limit >= found.limit


@pytest.mark.parametrize("values", [[], [float("nan")], [float("inf")], [-1.0]])
def test_a_tail_needs_finite_values(values: list[float]) -> None:
    with pytest.raises(MalformedError):
        tails.fit(values, 1e-6)


def test_the_chances_of_all_statistics_and_rows_add_up_to_the_aim() -> None:
    rows = thresholds.ROWS_OF_A_FILE * len(STATISTICS) * thresholds.chance_of_one("row")
    file = len(STATISTICS) * thresholds.chance_of_one("file")
    assert rows + file == pytest.approx(thresholds.AIM)


def test_a_nan_exceeds_every_limit() -> None:
    limits = Limits(row=FLOORS, file=FLOORS, honest_sketch=0.0)
    values = {**dict.fromkeys(STATISTICS, 0.0), "sketch": float("nan")}
    assert limits.exceeded(values, "row") == {"sketch"}


def test_a_broken_calibration_file_is_malformed(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(MalformedError):
        thresholds.load(tmp_path / "c.json")
    with pytest.raises(MalformedError):
        thresholds.load(tmp_path / "none.json")


def test_the_calibration_has_one_encoding_and_says_what_it_aims_at() -> None:
    shipped = thresholds.shipped()
    again = Calibration.model_validate_json(shipped.model_dump_json())
    assert again.digest() == shipped.digest()
    assert again.aim_per_billion == 1000
    assert "exponential tail" in again.extrapolation
    assert again.setup("plain/1", "float32", "cpu") is not None
    assert again.setup("plain/1", "float32", "NVIDIA H200") is None
    assert json.loads(shipped.canonical())["version"] == 2


def test_synthetic_runs_are_pinned_by_their_length() -> None:
    assert synthetic_run(5).digest() != synthetic_run(6).digest()


def test_how_sure_an_accusation_is_follows_from_the_tail() -> None:
    values = np.random.default_rng(1).exponential(0.3, 4000).tolist()
    tail = tails.fit(values, 1e-6)
    chances = [tail.chance(value) for value in (0.1, 1, 3, 1e9)]
    assert chances[0] == tails.SHARE
    assert chances == sorted(chances, reverse=True)
    assert chances[2] == pytest.approx(np.exp(-10), rel=0.8)
    assert chances[3] == tails.LEAST_CHANCE
    assert tail.chance(tail.limit / MICRO) == pytest.approx(1e-6, rel=0.01)


def test_the_chance_for_a_file_counts_its_rows_and_all_statistics() -> None:
    tail = tails.fit(np.random.default_rng(1).exponential(0.3, 4000).tolist(), 1e-9)
    setup = thresholds.SetupLimits(
        engine="plain/1", dtype="float32", device="cpu", batches=(64,), rows=1, files=1, tokens=1,
        row=dict.fromkeys(STATISTICS, tail), file=dict.fromkeys(STATISTICS, tail),
    )  # fmt: skip
    limits = setup.limits(thresholds.NO_REFERENCE)
    at_limit = limits.honest_chance("sketch", limits.row["sketch"], "row", 16)
    assert at_limit == pytest.approx(16 * len(STATISTICS) * 1e-9, rel=0.01)
    assert Limits(row=FLOORS, file=FLOORS, honest_sketch=0).honest_chance("sign", 1, "row", 1) == 1
