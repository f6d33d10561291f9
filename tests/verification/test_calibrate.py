"""Calibration: what is shipped is the command's, and limits follow from it by one formula."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core import encoding
from prime_core.errors import MalformedError, UnavailableError, UserError
from prime_core.ids import ZERO_DIGEST
from prime_core.known_cards import family_of
from prime_envs.registry import environment_for
from prime_verify import calibrate, replay
from prime_verify.engines import load_engine
from prime_verify.proofs import tails, thresholds
from prime_verify.proofs.tails import MICRO, QUANTILES, SAFETY, Tail
from prime_verify.proofs.thresholds import (
    FEW_TOKENS,
    FILE_ROWS,
    FLOORS,
    NO_REFERENCE,
    STATISTICS,
    UNSUSPECTED,
    Calibration,
    FewRows,
    Limits,
    Reference,
    counted,
)
from prime_verify.replay import Accusation, RowStatistics, accuse, few_tokens
from prime_verify.setups import Job, Setup, fitting, generate, run_of, synthetic_run


def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "BATCH_FILES", {64: 1})
    monkeypatch.setattr(calibrate, "LENGTHS", (24,))
    monkeypatch.setattr(calibrate, "OTHER_CPUS", ())


@pytest.mark.slow
def test_a_small_calibration_stays_within_the_shipped_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _small(monkeypatch)
    found, left_out = calibrate.calibrate([], python_of={"plain": None})
    assert all("fewer than 10 long files" in one for one in left_out)
    assert len(left_out) == 2
    assert {s.dtype for s in found.setups} == {"float32", "bfloat16"}
    for setup in found.setups:
        shipped = thresholds.shipped().setup(setup.engine, setup.dtype, setup.device)
        assert shipped is not None
        assert shipped.rows > setup.rows
        for here, there in ((setup.row, shipped.row), (setup.file, shipped.file)):
            for name in STATISTICS:
                assert here[name].largest <= there[name].limit, name
        assert setup.long == {}  # rows of 24 tokens make no long file
        assert set(shipped.long) == set(STATISTICS)


def test_limits_need_enough_values_to_leave_one_in_the_tail() -> None:
    """Three long files that happen to lie close together would give limits below honest drift."""
    for files, judged in ((9, False), (10, True)):
        measured = calibrate.Measured(batches={64}, device="cpu", engine="plain/1")
        measured.rows = measured.files = measured.tokens = 100
        sizes: dict[thresholds.Scope, int] = {"row": 800, "file": 100, "long": files}
        for scope, values in sizes.items():
            for name in STATISTICS:
                measured.ratios[scope][name] = [0.5 + 0.001 * n for n in range(values)]
        limits = calibrate.limits_of("bfloat16", measured)
        assert set(limits.row) == set(limits.file) == set(STATISTICS)
        assert set(limits.long) == (set(STATISTICS) if judged else set())


def test_lies_are_made_and_counted_where_the_limits_find_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "LENGTHS", (3, 8))
    monkeypatch.setattr(calibrate, "LIES", ("int4",))
    monkeypatch.setattr(calibrate, "LEAST_LIE_SETS", FILE_ROWS)
    model = calibrate.tiny_models(tmp_path)[0]
    measured = calibrate.Measured()
    setup = Setup("plain", "float32")
    calibrate.measure_lies(setup, {model: load_engine(model)}, 0.1, measured)
    shipped = thresholds.shipped().setup("plain/1", "float32", "cpu")
    assert shipped is not None
    (found,) = measured.found_by(shipped).lies
    assert (found.lie, found.sets, found.found) == ("int4", 8, 8)
    assert found.sets < thresholds.LEAST_LIE_SETS
    assert not found.separate, "too few sets"
    blind = shipped.model_copy(update={"row": {}, "file": {}, "long": {}})
    assert measured.found_by(blind).lies[0].found == 0
    rows, _ = measured.lies["int4"][0]
    assert {row.tokens for row in rows} <= set(range(1, 9))
    assert any(row.tokens > 3 for row in rows), "of the greatest length"


def test_lies_are_compared_with_the_limits_that_a_kept_calibration_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So limits that observations proposed too wide accuse no one after the measurement, either."""
    values = {name: 3 * FLOORS[thresholds.TWIN.get(name, name)] for name in STATISTICS}
    row = replay.RowStatistics(0, 24, 1, 1.0, values, 0.0, False, 0, 0.0)

    def measure(_setup: Setup, _verifiers: Any, _scale: float, into: calibrate.Measured) -> None:
        into.engine, into.device, into.batches = "plain/1", "NVIDIA H200", {64}
        into.rows = into.files = into.tokens = 100
        for scope in thresholds.SCOPES:
            for name in STATISTICS:
                into.ratios[scope][name] = [0.01 * n for n in range(50)]

    def measure_lies(_setup: Any, _verifiers: Any, _scale: Any, into: calibrate.Measured) -> None:
        for lie in thresholds.LIES:
            into.add_lie(lie, [row] * FILE_ROWS * thresholds.LEAST_LIE_SETS, [])

    monkeypatch.setattr(calibrate, "tiny_models", lambda _: [tmp_path])
    verifier = SimpleNamespace(name="plain/1", device="cpu")
    monkeypatch.setattr(calibrate, "load_engine", lambda *_, **__: verifier)
    monkeypatch.setattr(calibrate, "_measure", measure)
    monkeypatch.setattr(calibrate, "measure_lies", measure_lies)

    def measured(keep: Calibration | None) -> list[str]:
        found, _ = calibrate.calibrate(
            [], python_of={"plain": None}, device="cuda", dtypes=("float32",), keep=keep
        )
        (setup,) = (one for one in found.setups if family_of(one.device) == "h200")
        assert setup.device == "NVIDIA H200", "an observed card of its family is replaced"
        assert {lie.sets for lie in setup.lies} == {thresholds.LEAST_LIE_SETS}
        return setup.overlooked()

    assert measured(None) == []
    for device, limit, overlooked in (
        ("NVIDIA H200", 9, list(thresholds.LIES)),
        ("NVIDIA H200 NVL", 9, list(thresholds.LIES)),
        ("NVIDIA H200 NVL", 1, []),
    ):
        of = dict.fromkeys(STATISTICS, _tail(limit))
        proposal = thresholds.SetupLimits(
            engine="plain/1", dtype="float32", device=device, batches=(), rows=1, files=1,
            tokens=1, row=of, file=of, long=of,
        )  # fmt: skip
        others = [
            proposal.model_copy(update=update)
            for update in ({"device": "NVIDIA L4"}, {"dtype": "bfloat16", "device": "NVIDIA L4"})
        ]
        keep = thresholds.shipped().model_copy(update={"setups": (proposal, *others)})
        assert measured(keep) == overlooked
        lies = (thresholds.FoundLies(lie="int8", sets=1, found=1),)
        kept = proposal.model_copy(update={"lies": lies, "device": "NVIDIA H200 NVL"})
        key = ("plain/1", "float32", "NVIDIA H200 NVL")
        assert calibrate._replaced_by(kept, [proposal]) == key, "a measured one stays"


@pytest.mark.slow
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


@pytest.mark.slow
def test_files_of_another_interpreter_are_those_of_this_one(tmp_path: Path) -> None:
    model = calibrate.tiny_models(tmp_path)[0]
    jobs = [Job(model, 64, 2), Job(model, 1, 1)]
    here = Setup("plain", "float32")
    there = Setup("plain", "float32", python=Path(sys.executable))
    assert list(generate(here, jobs, (5, 3))) == list(generate(there, jobs, (5, 3)))
    with pytest.raises(UnavailableError, match="other float32 on cpu does not run"):
        list(generate(Setup("other", "float32", python=Path(sys.executable)), jobs, (5,)))


@pytest.mark.slow
def test_an_earlier_calibrations_other_setups_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _small(monkeypatch)
    shipped = thresholds.shipped()
    found, _ = calibrate.calibrate([], python_of={"plain": None}, dtypes=("float32",), keep=shipped)
    assert {(s.engine, s.dtype) for s in found.setups} == {
        (s.engine, s.dtype) for s in shipped.setups
    }
    kept = found.setup("plain/1", "bfloat16", "cpu")
    assert kept == shipped.setup("plain/1", "bfloat16", "cpu")
    both, before = (one.setup("plain/1", "float32", "cpu") for one in (found, shipped))
    assert both is not None
    assert before is not None
    assert both.rows > before.rows
    assert shipped.source in found.source
    assert found.replay_device == "cpu"
    for elsewhere in ({"replay_dtype": "bfloat16"}, {"replay_device": "NVIDIA H200"}):
        other = shipped.model_copy(update=elsewhere)
        with pytest.raises(UnavailableError, match="to keep is for replays by"):
            calibrate.calibrate([], python_of={"plain": None}, dtypes=("float32",), keep=other)


def test_measured_on_two_machines_a_setup_has_the_wider_limits_of_both() -> None:
    def measured(limit: dict[str, float], batch: int) -> thresholds.SetupLimits:
        of = {name: _tail(value) for name, value in limit.items()}
        return thresholds.SetupLimits(
            engine="plain/1", dtype="float32", device="cpu", batches=(batch,), rows=3, files=2,
            tokens=1, row=of, file=of, long=of, few=(FewRows(tokens=64 * batch, of=of),),
        )  # fmt: skip

    here = measured({"sketch": 2, "mantissa": 1}, 64)
    there = measured({"sketch": 1, "mantissa": 3, "sign": 1}, 1)
    for both in (thresholds.wider(here, there), thresholds.wider(there, here)):
        for tails_of in (both.row, both.file, both.long):
            assert {name: tail.limit / MICRO for name, tail in tails_of.items()} == {
                "sketch": 2, "mantissa": 3, "sign": 1,
            }  # fmt: skip
        assert (both.batches, both.rows, both.files, both.tokens) == ((1, 64), 6, 4, 2)
        few = [
            (one.tokens, {n: tail.limit / MICRO for n, tail in one.of.items()}) for one in both.few
        ]
        assert few == [
            (64, {"sketch": 2, "mantissa": 3, "sign": 1}), (4096, {"sketch": 2, "mantissa": 3}),
        ], "by ascending tokens, none tighter than a file's"  # fmt: skip
    wider = thresholds.wider(here, here.model_copy(update={"few": there.few[:0]}))
    assert wider.few == here.few


def test_lengths_that_a_model_has_no_positions_for_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 256}')
    assert fitting(tmp_path, (24, 224, 225)) == [24, 224]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnavailableError, match="no model can be loaded"):
        fitting(tmp_path, (24,))


@pytest.mark.slow
def test_files_made_as_on_an_older_cpu_are_asked_of_a_process_of_their_own(tmp_path: Path) -> None:
    model = calibrate.tiny_models(tmp_path)[0]
    older = Setup("plain", "float32", settings=(("ONEDNN_MAX_CPU_ISA", "AVX2"),))
    assert older.words == "plain float32 on cpu, ONEDNN_MAX_CPU_ISA=AVX2"
    ((_, length, file),) = generate(older, [Job(model, 1, 1)], (3,))
    run = run_of(Job(model, 1, 1), length)
    found, drifts = calibrate.replay_rows(file, run, environment_for(run), load_engine(model))
    assert len(found) == FILE_ROWS == run.rows_per_lease
    assert drifts == []


def _tail(limit: float, largest: float = 0.0) -> Tail:
    micro = round(limit * MICRO)
    return Tail(
        count=1, quantiles=(0, 0, 0), largest=round(largest * MICRO), start=0, scale=0, limit=micro
    )


def test_limits_are_the_explained_drift_times_the_limit_ratio() -> None:
    setup = thresholds.SetupLimits(
        engine="plain/1", dtype="bfloat16", device="cpu", batches=(64,), rows=1, files=1, tokens=1,
        row=dict.fromkeys(STATISTICS, _tail(6)), file=dict.fromkeys(STATISTICS, _tail(1, 0.25)),
        long={"sketch": _tail(0.5)},
    )  # fmt: skip
    limits = setup.limits(Reference(row={"sketch": 0.01}, file={"sketch": 0.02}))
    explained = math.hypot(FLOORS["sketch"], 0.02)
    assert limits.of["row"]["sketch"] == pytest.approx(6 * math.hypot(FLOORS["sketch"], 0.01))
    assert limits.of["file"]["sketch"] == pytest.approx(explained)
    assert limits.of["file"]["twin_sketch"] == pytest.approx(explained)  # the sketch's reference
    assert limits.of["long"] == {"sketch": pytest.approx(0.5 * explained)}
    assert limits.honest["sketch"] == pytest.approx(UNSUSPECTED * 0.25 * explained)
    assert limits.of["file"]["mantissa"] == FLOORS["mantissa"]


def _rows(count: int, tokens: int, sketch: float) -> list[RowStatistics]:
    values = dict.fromkeys(STATISTICS, 0.0) | {"sketch": sketch * FLOORS["sketch"]}
    return [RowStatistics(i, tokens, 1, 1.0, values, 0.0, False, 0, 0.0) for i in range(count)]


@pytest.mark.parametrize(
    ("rows", "tokens", "drift", "found"),
    [
        (1, 63, 1.9, False),  # fewer tokens than any set that was measured
        (1, 64, 1.9, True),
        (2, 32, 1.5, False),
        (2, 128, 1.5, True),
        (2, 128, 1.25, False),
        (7, 32, 1.5, False),
        (1, 5000, 1.5, False),  # one row counts for no more tokens than were measured
    ],
)
def test_a_drift_that_no_row_shows_alone_is_found_in_few_rows(
    rows: int, tokens: int, drift: float, found: bool
) -> None:
    of = {limit: {"sketch": _tail(limit)} for limit in (1.2, 1.3, 1.6, 2)}
    old = thresholds.SetupLimits(
        engine="plain/1", dtype="bfloat16", device="cpu", batches=(64,), rows=1, files=1, tokens=1,
        row=of[2], file=of[1.2],
    )  # fmt: skip
    few = (FewRows(tokens=64, of=of[1.6]), FewRows(tokens=256, of=of[1.3]))
    new = old.model_copy(update={"few": few})
    replayed = _rows(rows, tokens, drift)

    def accusation(setup: thresholds.SetupLimits) -> Accusation | None:
        return accuse(replayed, setup.limits(NO_REFERENCE, few_tokens(replayed)))

    assert accusation(old) is None, "older calibrations judge few rows alone"
    assert (accusation(new) is not None) == found
    assert few_tokens(_rows(FILE_ROWS, tokens, drift)) == 0, "a file's limits are its own"


def test_limits_of_few_rows_are_no_tighter_than_those_of_more_tokens_or_files() -> None:
    """Of 256 tokens, fewer than ten sets were measured; of 512, by chance narrower ones than a file
    has, and of 128 narrower ones than of 512."""
    measured = calibrate.Measured(batches={64}, device="cpu", engine="plain/1")
    measured.rows = measured.files = measured.tokens = 100
    drawn = np.random.default_rng(0).exponential(0.1, 100)
    measured.ratios["file"] = {"sketch": list(0.5 + drawn), "sign": list(drawn)}
    spread = {64: 0.5, 128: 0.02, 256: 9.0, 512: 0.1}
    for tokens, scale in spread.items():
        values = drawn[:9] if tokens == 256 else drawn
        measured.few[tokens] = {"sketch": list(0.2 + 10 * scale * values), "margin_mean": [0.0]}
    found = calibrate.limits_of("bfloat16", measured)
    assert [one.tokens for one in found.few] == [64, 128, 512]
    limits = [one.of["sketch"].limit for one in found.few] + [found.file["sketch"].limit]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > limits[1] == limits[2] >= limits[3] > MICRO
    assert all(one.of.keys() == {"sketch"} for one in found.few), "no statistic of too few sets"


@given(st.lists(st.integers(1, 400), max_size=40), st.sampled_from(FEW_TOKENS))
def test_few_rows_are_measured_in_the_smallest_sets_with_so_many_tokens(
    lengths: list[int], tokens: int
) -> None:
    end = 0
    for one in calibrate.few_rows(lengths, tokens):
        assert end <= one.start < one.stop <= len(lengths)
        end = one.stop
        counts = [counted(length) for length in lengths[one]]
        assert len(counts) < FILE_ROWS
        assert sum(counts) >= tokens > sum(counts[:-1])
    starts = range(end, len(lengths), FILE_ROWS - 1)
    left = [lengths[start : start + FILE_ROWS - 1] for start in starts]
    assert all(sum(map(counted, one)) < tokens for one in left)


def test_a_statistic_that_was_not_measured_is_not_judged() -> None:
    setup = thresholds.SetupLimits(
        engine="plain/1", dtype="bfloat16", device="cpu", batches=(64,), rows=1, files=1, tokens=1,
        row={"sketch": _tail(1)}, file={"sketch": _tail(1)},
    )  # fmt: skip
    limits = setup.limits(Reference(row={}, file={}))
    worst = dict.fromkeys(STATISTICS, 99.0)
    assert limits.exceeded(worst, "file") == limits.exceeded(worst, "row") == {"sketch"}
    assert limits.exceeded(worst, "long") == set()
    assert limits.honest_chance("mantissa", 99.0, "file", 1) == 1
    assert set(limits.named()) == {"row.sketch", "file.sketch"}


def test_the_extrapolated_limit_of_exponential_values_is_near_the_true_quantile() -> None:
    values = np.random.default_rng(0).exponential(0.3, 4000).tolist()
    true = -0.3 * np.log(1e-6)
    assert true <= tails.fit(values, 1e-6).limit / MICRO <= 1.3 * true


@pytest.mark.parametrize("count", [1, 3, 5, 20, 200])
def test_an_unlucky_few_values_still_leave_their_true_mean_within_the_bound(count: int) -> None:
    """Three honest files that lay close together once gave a limit that honest files exceeded."""
    drawn = np.random.default_rng(count).exponential(1.0, (20_000, count)).mean(axis=1)
    missed = float((drawn * tails.left_open(count) < 1).mean())
    assert missed <= 1.1 * tails.UNLUCKY
    assert count < 5 or missed >= 0.8 * tails.UNLUCKY  # no more cautious than need be


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.floats(1e-12, 1e-2))
def test_a_limit_is_never_below_what_honest_values_reached(
    values: list[float], chance: float
) -> None:
    found = tails.fit(values, chance)
    assert found.limit >= MICRO
    assert tails.fit(values, chance, 0.1).limit <= found.limit
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
    long = len(STATISTICS) * thresholds.chance_of_one("long")
    few = len(STATISTICS) * thresholds.chance_of_one("few")
    assert rows + file + long == pytest.approx(thresholds.AIM)
    assert rows + few == pytest.approx(thresholds.AIM), "few rows are not judged as a file too"


def test_a_nan_exceeds_every_limit() -> None:
    limits = Limits(of={"row": FLOORS})
    values = {**dict.fromkeys(STATISTICS, 0.0), "sketch": float("nan")}
    assert limits.exceeded(values, "row") == {"sketch"}


def test_a_broken_calibration_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(UserError, match="is not a calibration"):
        thresholds.load(tmp_path / "c.json")
    with pytest.raises(UserError, match="there is no calibration"):
        thresholds.load(tmp_path / "none.json")


def test_the_calibration_has_one_encoding_and_says_what_it_aims_at() -> None:
    shipped = thresholds.shipped()
    again = Calibration.model_validate_json(shipped.model_dump_json())
    assert again.digest() == shipped.digest()
    assert again.aim_per_billion == 1000
    assert "exponential tail" in again.extrapolation
    assert again.setup("plain/1", "float32", "cpu") is not None
    assert again.setup("plain/1", "float32", "NVIDIA H200") is None
    assert json.loads(shipped.canonical())["version"] == 3


def test_the_newest_calibration_has_the_shipped_limits_and_those_of_few_rows() -> None:
    shipped, newest = thresholds.shipped(), thresholds.newest()
    assert newest.digest() == NEWEST_DIGEST
    assert thresholds.shipped_as(NEWEST_DIGEST) is newest
    assert thresholds.shipped_as(SHIPPED_DIGEST) is thresholds.shipped_as(ZERO_DIGEST) is shipped
    assert thresholds.shipped_as("0x" + "11" * 32) is None
    bare = [one.model_copy(update={"few": ()}) for one in newest.setups]
    assert bare == list(shipped.setups)
    for dtype, measured in (("bfloat16", FEW_TOKENS[:3]), ("float32", FEW_TOKENS[:1])):
        setup = newest.setup("plain/1", dtype, "cpu")
        assert setup is not None
        assert tuple(one.tokens for one in setup.few) == measured
        for name in set(STATISTICS) - thresholds.MAXIMA:
            limits = [one.of[name].limit for one in setup.few] + [setup.file[name].limit]
            assert limits == sorted(limits, reverse=True), name
            for one in setup.few:
                tail = one.of[name]
                chance = thresholds.chance_of_one("few")
                reach = tail.start + tail.scale * math.log(tails.SHARE / chance)
                assert tail.count >= calibrate.LEAST_SETS
                assert tail.limit >= max(SAFETY * tail.largest, reach) - 30  # millionths


def test_different_levels_of_models_are_not_taken_for_one_long_tail() -> None:
    drawn = np.random.default_rng(2).exponential(0.02, 900)
    groups = [drawn[:400].tolist(), (0.3 + drawn[400:800]).tolist(), (0.6 + drawn[860:]).tolist()]
    found = tails.fit_groups(groups, 1e-7, 0.1)
    mixed = tails.fit([value for group in groups for value in group], 1e-7, 0.1)
    assert 0.6 + 0.02 * math.log(1e7) < found.limit / MICRO < 1.1 < 2 < mixed.limit / MICRO
    assert (found.count, found.largest) == (mixed.count, mixed.largest)
    assert found.chance(found.limit / MICRO) == pytest.approx(1e-7, rel=0.01)
    assert tails.fit_groups(groups[:1], 1e-7) == tails.fit(groups[0], 1e-7)


NEWEST_DIGEST = "0x43f00225cdabc3311742eaf2bd617c9ca87fcb31378c7849ccb7fce5d05d31a8"
"""Of the calibration that new runs name since 2026-11-30."""
SHIPPED_DIGEST = "0x69a9be3caa59ebf5526c5fa2f908e0b24a4202ce5564cd612667459b8f0a5ce1"
"""Of the calibration that pools without one of their own are judged by since protocol 1."""


def test_an_older_object_keeps_its_name_and_is_taken_for_a_cpus() -> None:
    shipped = thresholds.shipped()
    assert shipped.digest() == SHIPPED_DIGEST, "a new field changes no object that lacks it"
    assert "replay_device" in shipped.model_fields_set
    older = json.loads(shipped.canonical())
    del older["replay_device"]
    raw = encoding.canonical_json(older)
    found = Calibration.model_validate_json(raw)
    assert found.digest() == encoding.sha256(raw) != shipped.digest()
    assert found.replayed_by("plain/1", "float32", "cpu")
    assert not found.replayed_by("plain/1", "float32", "NVIDIA H200")


OFF_FORMULA = {("vllm/1", "bfloat16", "row", "margin_max")}
"""Estimated from the maxima of 608 files, which bound those of rows (docs/verification.md)."""


def test_every_shipped_limit_but_one_follows_from_its_own_distribution() -> None:
    shipped, off = thresholds.shipped(), set()
    for setup in shipped.setups:
        for scope, tails_of in (("row", setup.row), ("file", setup.file), ("long", setup.long)):
            chance = thresholds.chance_of_one(scope)  # type: ignore[arg-type]
            for name, tail in tails_of.items():
                least = thresholds.least_ratio(name, setup.dtype, shipped.replay_dtype) * MICRO
                reach = tail.start + tail.scale * math.log(tails.SHARE / chance)
                if abs(tail.limit - max(least, SAFETY * tail.largest, reach)) > 30:  # millionths
                    off.add((setup.engine, setup.dtype, scope, name))
    assert off == OFF_FORMULA


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
    limits = setup.limits(NO_REFERENCE)
    at_limit = limits.honest_chance("sketch", limits.of["row"]["sketch"], "row", 16)
    assert at_limit == pytest.approx(16 * len(STATISTICS) * 1e-9, rel=0.01)
    assert Limits(of={"row": FLOORS}).honest_chance("sign", 1, "row", 1) == 1
