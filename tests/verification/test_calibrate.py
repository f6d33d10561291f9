"""Calibration: what is shipped was made by the script, and limits follow from it by one formula."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.core.errors import MalformedError
from protocol.proofs import thresholds
from protocol.proofs.thresholds import FLOORS, MARGIN, STATISTICS, Calibration, Limits, Reference
from protocol.verification import calibrate


def test_a_small_calibration_stays_within_the_shipped_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "BATCH_FILES", {64: 1})
    monkeypatch.setattr(calibrate, "LENGTHS", (24,))
    out = tmp_path / "calibration.json"
    assert calibrate.main(["--out", str(out)]) == 0
    found = thresholds.load(out)
    assert {s.dtype for s in found.setups} == {"float32", "bfloat16"}
    for setup in found.setups:
        shipped = thresholds.shipped().setup(setup.engine, setup.dtype, setup.device)
        assert shipped is not None
        assert shipped.rows > setup.rows
        for here, there in ((setup.row, shipped.row), (setup.file, shipped.file)):
            for name in STATISTICS:
                assert here[name] <= max(1e6, MARGIN * there[name]), name


def test_an_unusable_model_ends_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = calibrate.main(["--model", str(tmp_path / "none"), "--out", str(tmp_path / "c.json")])
    assert code == 69
    assert capsys.readouterr().err.startswith("calibrate: no model can be loaded")


def test_limits_are_the_explained_drift_times_the_margin() -> None:
    setup = thresholds.SetupLimits(
        engine="plain/1", dtype="bfloat16", device="cpu", rows=1, files=1, tokens=1,
        row=dict.fromkeys(STATISTICS, 3_000_000), file=dict.fromkeys(STATISTICS, 100_000),
    )  # fmt: skip
    limits = setup.limits(Reference(row={"sketch": 0.01}, file={"sketch": 0.02}))
    assert limits.row["sketch"] == pytest.approx(3 * MARGIN * (FLOORS["sketch"] + 0.01))
    assert limits.file["sketch"] == pytest.approx(FLOORS["sketch"] + 0.02)
    assert limits.file["mantissa"] == FLOORS["mantissa"]


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


def test_the_calibration_has_one_encoding() -> None:
    shipped = thresholds.shipped()
    again = Calibration.model_validate_json(shipped.model_dump_json())
    assert again.digest() == shipped.digest()
    assert again.setup("plain/1", "float32", "cpu") is not None
    assert again.setup("plain/1", "float32", "NVIDIA H200") is None
