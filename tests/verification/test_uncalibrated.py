"""Files of cards without limits of their own, and validators on such cards: they accept within the
widest limits, and accuse no one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core.calibration import CalibrationSignature
from prime_core.known_cards import family_of, is_gpu
from prime_core.verdict import Evidence, Outcome, Reason
from prime_engine.variants import VARIANTS
from prime_verify import replay_checks
from prime_verify.audit import compare_replays
from prime_verify.audit_compare import Audit
from prime_verify.engines import load_engine
from prime_verify.finding import Finding
from prime_verify.proofs.tails import MICRO, Tail
from prime_verify.proofs.thresholds import (
    FOUND_LIES,
    LEAST_LIE_SETS,
    LIES,
    SCOPES,
    STATISTICS,
    WIDENED,
    Calibration,
    FoundLies,
    Reference,
    SetupLimits,
    shipped,
    widest,
)

TRAINED = Path(__file__).parents[2] / "devnet" / "model"
H200 = {"device": "NVIDIA H200"}
SECOND = CalibrationSignature(made_at=1, signer="0x" + "2" * 40, signature="0x" + "00" * 65)
DEVICES = ("cpu", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA L4", "a card of tomorrow")


@pytest.fixture
def world(world: Any) -> Any:
    """The run's tasks get GPUs."""
    task = world.run.task.model_copy(update={"gpus": True})
    return replace(world, run=world.run.model_copy(update={"task": task}))


def _tail(limit: int) -> Tail:
    return Tail(count=1, quantiles=(0, 0, 0), largest=0, start=0, scale=0, limit=limit)


def _setup(
    device: str, limit: int = MICRO, engine: str = "plain/1", dtype: str = "bfloat16"
) -> SetupLimits:
    of = dict.fromkeys(STATISTICS, _tail(limit))
    return SetupLimits(
        engine=engine, dtype=dtype, device=device, batches=(1,), rows=1, files=1, tokens=1,
        row=of, file=of, long=of, lies=_lies(LEAST_LIE_SETS),
    )  # fmt: skip


def _lies(found: int, sets: int = LEAST_LIE_SETS, names: Sequence[str] = LIES) -> Any:
    return tuple(FoundLies(lie=lie, sets=sets, found=found) for lie in names)


def _calibration(*setups: SetupLimits, replay_device: str = "cpu") -> Calibration:
    """Signed by a second party, so that cards whose limits find lies are listed."""
    update = {"setups": setups, "replay_device": replay_device, "second": SECOND}
    return shipped().model_copy(update=update)


_TAILS = st.dictionaries(
    st.sampled_from(STATISTICS), st.integers(1, 10 * MICRO).map(_tail), min_size=1
)
_SETUPS = st.builds(
    lambda device, row, file, long: _setup(device).model_copy(
        update={"row": row, "file": file, "long": long}
    ),
    st.sampled_from(DEVICES), _TAILS, _TAILS, _TAILS,
)  # fmt: skip
_VALUES = st.fixed_dictionaries({name: st.floats(0, 20) for name in STATISTICS})


@given(
    st.lists(_SETUPS, min_size=1, max_size=4), _VALUES, _VALUES, st.sampled_from(DEVICES[1:]),
    st.floats(0, 1),
)  # fmt: skip
def test_the_widest_limits_accept_what_the_limits_of_any_card_accept(
    setups: list[SetupLimits],
    values: dict[str, float],
    drift: dict[str, float],
    device: str,
    share: float,
) -> None:
    """For any setups in the calibration, and any drift that the file's dtype explains."""
    calibration = _calibration(*setups)
    reference = Reference(row=drift, file={name: share * one for name, one in drift.items()})
    found = calibration.widest("plain/1", "bfloat16", device)
    assert found is not None
    wide = found.limits(reference)
    cards = [one for one in setups if is_gpu(one.device)]
    for setup in cards or setups:
        own = setup.limits(reference)
        for scope in SCOPES:
            assert wide.exceeded(values, scope) <= own.exceeded(values, scope)
    if own_family := calibration.setup("plain/1", "bfloat16", device):
        for scope in SCOPES:
            exceeded = own_family.limits(reference).exceeded(values, scope)
            assert wide.exceeded(values, scope) <= exceeded


@given(st.lists(_SETUPS, min_size=1, max_size=4))
def test_the_widest_limits_are_a_stated_multiple_and_no_looser(setups: list[SetupLimits]) -> None:
    found = widest(setups, WIDENED)
    for scope in SCOPES:
        for name, tail in getattr(found, scope).items():
            largest = max(getattr(one, scope)[name].limit for one in setups)
            assert WIDENED * largest <= tail.limit <= WIDENED * largest + 1
    assert widest(setups).row.keys() == set.intersection(*({*one.row} for one in setups))


def test_a_calibration_of_one_card_serves_its_family_and_no_other() -> None:
    sxm, pcie = "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"
    assert family_of(sxm) == family_of(pcie) == family_of("NVIDIA H100 NVL") == "h100"
    assert family_of("NVIDIA H200") == "h200"
    assert family_of("cpu aarch64") == "cpu aarch64"
    one = _calibration(_setup(sxm, 2 * MICRO))
    of_pcie = one.setup("plain/1", "bfloat16", pcie)
    assert of_pcie is not None
    assert of_pcie.row == one.setups[0].row
    assert one.covers(pcie)
    for engine, dtype, device in (
        ("vllm/1", "bfloat16", pcie),
        ("plain/1", "float32", pcie),
        ("plain/1", "bfloat16", "NVIDIA H200"),
        ("plain/1", "bfloat16", "cpu"),
    ):
        assert one.setup(engine, dtype, device) is None
    both = _calibration(_setup(sxm, 2 * MICRO), _setup(pcie, 3 * MICRO))
    assert both.setup("plain/1", "bfloat16", sxm) == both.setups[0]
    of_family = both.setup("plain/1", "bfloat16", "NVIDIA H100 NVL")
    assert of_family is not None
    assert {tail.limit for tail in of_family.row.values()} == {3 * MICRO}


@pytest.mark.parametrize(
    ("lies", "because"),
    [
        ((), "int8, int4, old10_1e-4"),
        (_lies(LEAST_LIE_SETS, names=LIES[1:]), "find int8$"),
        (_lies(LEAST_LIE_SETS - 1, LEAST_LIE_SETS - 1), "int8, int4, old10_1e-4"),
        (_lies(round(FOUND_LIES * LEAST_LIE_SETS) - 1), "int8, int4, old10_1e-4"),
        (_lies(round(FOUND_LIES * LEAST_LIE_SETS)), ""),
    ],
)
def test_a_family_whose_limits_do_not_find_known_lies_has_no_limits(
    lies: tuple[FoundLies, ...], because: str
) -> None:
    """Neither does another card of its family, and it widens the limits of no other card."""
    card, sibling = (
        _setup("NVIDIA H100 PCIe", 9 * MICRO).model_copy(update={"lies": lies}),
        _setup("NVIDIA H100 80GB HBM3"),
    )
    found = _calibration(_setup("cpu"), card, sibling)
    alone = _calibration(_setup("cpu"), sibling)
    if not because:
        assert found.setup("plain/1", "bfloat16", card.device) == card
        assert found.unlisted() == []
        return
    for device in (card.device, sibling.device, "NVIDIA H100 NVL"):
        assert alone.setup("plain/1", "bfloat16", device) is not None
        assert found.setup("plain/1", "bfloat16", device) is None
        assert not found.covers(device)
    wide = found.widest("plain/1", "bfloat16", "NVIDIA L4")
    assert wide == _calibration(_setup("cpu")).widest("plain/1", "bfloat16", "NVIDIA L4")
    for sentence in found.unlisted():
        assert re.search(because, sentence)
        assert "accuses no one: its limits on NVIDIA H100 PCIe are not shown to find" in sentence
    assert len(found.unlisted()) == 2


def test_limits_of_a_card_that_one_party_signed_accuse_no_one() -> None:
    both = _calibration(_setup("cpu"), _setup("NVIDIA L4"))
    one = both.model_copy(update={"second": None})
    assert both.covers("NVIDIA L4")
    assert not one.covers("NVIDIA L4")
    assert one.covers("cpu"), "limits of processors take one"
    assert one.unlisted() == [
        "plain/1 bfloat16 on NVIDIA L4 is judged like a card without limits and accuses no one: no "
        "second party signed the calibration"
    ]
    assert shipped().unlisted() == []


def test_limits_of_cards_go_before_those_of_processors() -> None:
    cpu, card = _setup("cpu", 5 * MICRO), _setup("NVIDIA L4", 2 * MICRO)
    other = _setup("NVIDIA L4", 9 * MICRO, engine="vllm/1")

    def limit(*setups: SetupLimits) -> set[int]:
        found = _calibration(*setups).widest("plain/1", "bfloat16", "NVIDIA H200")
        return set() if found is None else {tail.limit for tail in found.row.values()}

    assert limit(cpu, card, other) == {round(2 * WIDENED * MICRO)}
    assert limit(cpu, other) == {round(5 * WIDENED * MICRO)}
    assert limit(other) == set()
    assert _calibration(cpu, card).widest("plain/1", "bfloat16", "cpu aarch64") is None


def test_without_other_limits_those_of_cards_that_accuse_no_one_are_the_widest() -> None:
    """In calibrations older than lies and second signatures. They are not widened: observed limits
    already are."""
    old = [
        _setup(device, limit * MICRO).model_copy(update={"lies": ()})
        for device, limit in (("NVIDIA L4", 2), ("NVIDIA H200", 3))
    ]
    found = _calibration(*old).model_copy(update={"second": None})
    for device in ("NVIDIA L4", "NVIDIA H100 PCIe"):
        assert found.setup("plain/1", "bfloat16", device) is None, "it accuses no one"
        wide = found.widest("plain/1", "bfloat16", device)
        assert wide is not None
        assert {tail.limit for tail in wide.row.values()} == {3 * MICRO}
    assert found.widest("plain/1", "bfloat16", "cpu") is None
    assert found.widest("vllm/1", "bfloat16", "NVIDIA L4") is None


def test_a_slash_by_limits_that_one_party_signed_is_not_overturned_if_they_still_find_it(
    world: Any,
) -> None:
    """Its authors followed the rules of an older version. False ones are overturned as ever."""
    measured = shipped().setup("plain/1", "float32", "cpu")
    assert measured is not None
    card = measured.model_copy(update={"device": "NVIDIA H200"})
    old = _calibration(card).model_copy(update={"second": None})
    lie = world.made(22, engine=load_engine(TRAINED, prepare=VARIANTS["int8"]), metadata=H200)
    honest = world.made(22, metadata=H200)
    now, before = (world.judge(lie, calibration=old, as_listed=listed) for listed in (False, True))
    assert (now.reason, before.outcome) == (Reason.UNCALIBRATED, Outcome.REJECTED)
    assert world.judge(honest, calibration=old).outcome is Outcome.ACCEPTED
    evidence = Evidence.model_construct(
        reason=int(before.reason), rows_drawn=before.rows_drawn, row_statistics={}, detail="",
        statistics=before.decimal_statistics(), chance=before.decimal_chance(), lease=lie.signed,
    )  # fmt: skip

    def audit(evidence: Evidence, calibration: Calibration, file: Any = lie) -> Audit:
        def judge(listed: bool) -> Finding:
            if file is lie and calibration is old:
                return before if listed else now
            found: Finding = world.judge(file, calibration=calibration, as_listed=listed)
            return found

        return compare_replays(evidence, calibration, judge, ())

    found = audit(evidence, old)
    assert found.result == "cannot tell"
    assert "accuse no one now: its limits on NVIDIA H200 are not shown" in found.detail
    assert audit(evidence, old, honest).result == "mismatch"
    inflated = {"statistics": {**evidence.statistics, "sketch": "99"}}
    assert audit(evidence.model_copy(update=inflated), old).result == "mismatch"
    raised = {"reason": int(Reason.TAMPERED_REWARD)}
    assert audit(evidence.model_copy(update=raised), old).result == "mismatch"
    never = old.model_copy(update={"setups": (measured,)})
    assert audit(evidence, never).result == "mismatch", "a card that was never measured"


def test_an_honest_file_of_an_unmeasured_card_is_replayed_whole_and_accepted(world: Any) -> None:
    for number in (20, 21):
        found = world.judge(world.made(number, metadata=H200))
        assert (found.outcome, found.reason) == (Outcome.ACCEPTED, Reason.NONE), found
        assert len(found.rows_drawn) == world.run.rows_per_lease
        assert found.whole
        assert found.units > 0
        assert found.setup == "plain/1 float32 NVIDIA H200"
        assert len(world.judge(world.honest(number)).rows_drawn) < world.run.rows_per_lease


@pytest.mark.parametrize("lie", ["int8", "moved"])
def test_far_outside_the_widest_limits_a_file_is_void_and_never_rejected(
    world: Any, lie: str
) -> None:
    """The same file of a measured processor is rejected."""
    made: dict[str, Any] = {"engine": load_engine(TRAINED, prepare=VARIANTS["int8"])}
    if lie == "moved":
        made = {"change": lambda rows, *_: [replace(r, logprobs=r.logprobs - 1) for r in rows]}
    assert world.judge(world.made(22, **made)).outcome is Outcome.REJECTED
    found = world.judge(world.made(22, **made, metadata=H200))
    assert (found.outcome, found.reason) == (Outcome.VOID, Reason.UNCALIBRATED)
    assert (found.chance, found.units, found.table) == (None, 0, ())
    assert "on NVIDIA H200: outside the widest limits, " in found.detail


def test_a_lie_that_no_hardware_explains_is_rejected_on_any_card(world: Any) -> None:
    raised = world.made(
        23, change=lambda rows, *_: [replace(row, reward=row.reward + 1) for row in rows],
        metadata=H200,
    )  # fmt: skip
    assert world.judge(raised).reason is Reason.TAMPERED_REWARD


@pytest.mark.parametrize("made", [{}, H200])
def test_a_validator_on_an_unmeasured_card_accepts_and_abstains_instead_of_rejecting(
    world: Any, monkeypatch: pytest.MonkeyPatch, made: dict[str, str]
) -> None:
    honest = world.made(24, metadata={"device": "cpu", **made})
    lie = world.made(
        24, change=lambda rows, *_: [replace(r, logprobs=r.logprobs - 1) for r in rows],
        metadata={"device": "cpu", **made},
    )  # fmt: skip
    monkeypatch.setattr(type(world.engine), "device", "NVIDIA L4")
    assert world.judge(honest, on_any_card=True).outcome is Outcome.ACCEPTED
    found = world.judge(lie, on_any_card=True)
    if made:  # its opinion counts: a void accuses no one, and takes two
        assert (found.outcome, found.reason) == (Outcome.VOID, Reason.UNCALIBRATED)
    else:
        assert (found.outcome, found.reason) == (Outcome.ABSTAINED, Reason.UNKNOWN_SETUP)
        assert "for replays by plain/1, float32 on NVIDIA L4: outside" in found.detail
    for file in (honest, lie):
        assert world.judge(file).outcome is Outcome.ABSTAINED, "an audit cannot tell"


def test_without_gpus_in_the_run_stating_a_card_gains_nothing(world: Any) -> None:
    task = world.run.task.model_copy(update={"gpus": False})
    on_cpus = replace(world, run=world.run.model_copy(update={"task": task}))
    found = on_cpus.judge(on_cpus.made(27, metadata=H200))
    assert (found.outcome, found.reason) == (Outcome.VOID, Reason.UNCALIBRATED)
    assert "measured only" in found.detail


@pytest.mark.parametrize("device", ["", " ", "exact", "NVIDIA H100 80GB HBM3 exact"])
def test_a_name_that_could_be_read_as_another_device_has_no_limits(device: str) -> None:
    assert not is_gpu(device)
    assert shipped().widest("plain/1", "float32", device) is None


def test_a_card_of_the_replaying_family_judges_as_the_measured_one() -> None:
    of_h100 = _calibration(_setup("cpu"), replay_device="NVIDIA H100 PCIe")
    assert of_h100.replayed_by("plain/1", "float32", "NVIDIA H100 80GB HBM3")
    assert not of_h100.replayed_by("plain/1", "float32", "NVIDIA L4")
    assert of_h100.replayed_widely_by("plain/1", "float32", "NVIDIA L4")
    for engine, dtype, device in (
        ("plain/1", "float32", "cpu"),
        ("plain/1", "bfloat16", "NVIDIA L4"),
        ("vllm/1", "float32", "NVIDIA L4"),
    ):
        assert not of_h100.replayed_widely_by(engine, dtype, device)


def test_a_proven_exact_class_accuses_on_an_unmeasured_card_too(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bits are evidence without limits."""
    lie = world.made(
        25, change=lambda rows, *_: [replace(r, logprobs=r.logprobs - 1) for r in rows],
        metadata=H200,
    )  # fmt: skip

    class Differs:
        def ruling(self, proven_to: int) -> tuple[Reason, str]:
            return (Reason.WRONG_PROOF_PASS if proven_to else Reason.UNPROVEN_MISMATCH), ""

        def statistics(self) -> dict[str, float]:
            return {}

    class OfClass:
        def numeric_class(self) -> Any:
            return type("Class", (), {"key": "0x" + "1" * 64, "words": ""})

    monkeypatch.setattr(replay_checks, "_of_class", lambda *_: nullcontext(OfClass()))
    monkeypatch.setattr(replay_checks, "_compare_exactly", lambda *_: Differs())
    assert world.judge(lie).reason is Reason.UNCALIBRATED
    monkeypatch.setattr(Calibration, "proven_to", lambda *_: 9999)
    assert world.judge(lie).reason is Reason.WRONG_PROOF_PASS


def test_a_card_with_a_dtype_that_was_never_measured_has_no_limits(world: Any) -> None:
    found = world.judge(world.made(26, metadata={**H200, "dtype": "float8"}))
    assert (found.outcome, found.reason) == (Outcome.VOID, Reason.UNCALIBRATED)
    assert "measured only" in found.detail
    assert len(found.rows_drawn) < world.run.rows_per_lease
