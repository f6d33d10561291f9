"""What planted files cost validators: a pure function of recorded opinions."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core.encoding import sha256
from prime_core.errors import MalformedError
from prime_core.fees import (
    FAULT_FEES,
    FREE_MISSES,
    TOLERATED,
    Fault,
    FeeRecord,
    chargeable,
    withhold,
)
from prime_core.ids import ZERO_DIGEST, Address, Digest, Signature, address
from prime_core.verdict import Law, Opinion, Outcome, SignedOpinion

VALIDATORS = [address("0x" + f"{n + 1:040x}") for n in range(3)]
FEE = 7
_LAW = Law(
    lease=ZERO_DIGEST, run=ZERO_DIGEST, verification_class=ZERO_DIGEST, verifier=ZERO_DIGEST,
    draws=ZERO_DIGEST,
)  # fmt: skip


def fault(number: int, validator: Address, outcome: Outcome, fee: int = FEE) -> Fault:
    said = Opinion(
        pool=1, submission=sha256(b"%d" % number), law=_LAW.struct_hash(), outcome=int(outcome),
        reason=Digest(ZERO_DIGEST), table=ZERO_DIGEST, evidence=ZERO_DIGEST, judged_at=1,
    )  # fmt: skip
    signature = Signature("0x" + "11" * 65)
    signed = SignedOpinion(opinion=said, law=_LAW, validator=validator, signature=signature)
    return Fault(opinion=signed, fee=str(fee))


@st.composite
def epochs(
    draw: st.DrawFn,
) -> list[tuple[dict[Address, int], list[Fault], dict[Address, int]]]:
    """Settlements in a row: planted lies by validator, faults, fees earned."""
    made, number = [], 0
    for _ in range(draw(st.integers(1, 5))):
        lies: dict[Address, int] = {}
        faults: list[Fault] = []
        fees: dict[Address, int] = {}
        for name in VALIDATORS:
            lies[name] = draw(st.integers(0, 30))
            fees[name] = draw(st.integers(0, 3 * FAULT_FEES * FEE))
            for outcome, most in ((Outcome.ACCEPTED, lies[name]), (Outcome.REJECTED, 2)):
                for _ in range(draw(st.integers(0, most))):
                    faults.append(fault(number, name, outcome))
                    number += 1
        made.append((lies, faults, fees))
    return made


@given(epochs(), st.randoms())
def test_what_is_charged_is_withheld_or_due_and_never_more_than_the_fees(
    made: list[tuple[dict[Address, int], list[Fault], dict[Address, int]]], shuffle: random.Random
) -> None:
    records: tuple[FeeRecord, ...] = ()
    for lies, faults, fees in made:
        before = {record.validator: record for record in records}
        after = withhold(records, lies, faults, fees)
        shuffle.shuffle(faults)
        assert withhold(records[::-1], lies, faults, fees) == after
        for record in after:
            old = before.get(record.validator)
            taken = int(record.withheld) - (int(old.withheld) if old else 0)
            assert taken <= fees[Address(record.validator)], "amounts never shrink"
            assert taken >= 0 or (old and record.charged < old.charged)
            assert not int(record.due) or taken == fees[Address(record.validator)]
            assert int(record.due) + int(record.withheld) == record.charged * FAULT_FEES * FEE
            assert record.charged == chargeable(record.lies, record.missed, record.accused)
            assert record.charged <= record.missed + record.accused
        records = after


@given(st.integers(0, 5000), st.floats(0, 1))
def test_a_validator_that_misses_few_lies_pays_nothing_and_one_that_accepts_all_loses(
    lies: int, share: float
) -> None:
    missed = int(lies * share)
    if (missed - FREE_MISSES) * TOLERATED <= lies:
        assert chargeable(lies, missed, 0) == 0
    assert chargeable(lies, missed, 3) == chargeable(lies, missed, 0) + 3
    files = 100 * lies  # one file in 50 is planted, half of these lie
    if lies > 42:
        assert chargeable(lies, lies, 0) * FAULT_FEES > files, "more fees than it saves replays"


def ever_charged(miss_rate: float, most_lies: int) -> float:
    """The probability that a record is ever charged within so many lies, lie by lie."""
    uncharged = {0: 1.0}  # misses: probability
    for lies in range(1, most_lies + 1):
        after: dict[int, float] = {}
        for missed, chance in uncharged.items():
            for more, share in ((0, 1 - miss_rate), (1, miss_rate)):
                if not chargeable(lies, missed + more, 0):
                    after[missed + more] = after.get(missed + more, 0.0) + chance * share
        uncharged = {missed: chance for missed, chance in after.items() if chance > 1e-12}
    return 1 - sum(uncharged.values())


def test_bad_luck_charges_fewer_than_the_stated_share_of_records() -> None:
    assert ever_charged(0.05, 500) < 1e-4
    assert ever_charged(0.10, 1000) < 1e-3
    assert ever_charged(0.20, 1000) > 0.99
    # far beyond: 1 / exp(15 t) bounds a record of any length
    t, rate = 0.486, 1 / 10
    assert rate * math.exp(t * 7 / 8) + (1 - rate) * math.exp(-t / 8) <= 1
    assert math.exp(-t * FREE_MISSES) < 1e-3


def test_hardly_a_simulated_record_with_one_miss_in_twenty_is_ever_charged() -> None:
    chance, charged = random.Random(1), 0
    for _ in range(500):
        missed = 0
        for lies in range(1, 501):
            missed += chance.random() < 0.05
            if chargeable(lies, missed, 0):
                charged += 1
                break
    assert charged < 5


def test_what_bad_luck_cost_is_paid_back_when_the_record_improves() -> None:
    me, missed = VALIDATORS[0], [fault(n, VALIDATORS[0], Outcome.ACCEPTED) for n in range(20)]
    (unlucky,) = withhold((), {me: 20}, missed, {me: 300 * FEE})
    assert (unlucky.charged, int(unlucky.withheld)) == (2, 300 * FEE)
    assert int(unlucky.due) == 100 * FEE
    (better,) = withhold((unlucky,), {me: 12}, [], {me: 50 * FEE})
    assert (better.charged, int(better.due), int(better.withheld)) == (1, 0, 200 * FEE)
    (good,) = withhold((better,), {me: 8}, [], {})
    assert (good.charged, int(good.due), int(good.withheld)) == (0, 0, 0)


def test_records_that_contradict_each_other_are_refused() -> None:
    me = VALIDATORS[0]
    missed = fault(1, me, Outcome.ACCEPTED)
    with pytest.raises(MalformedError, match="two faults"):
        withhold((), {me: 2}, [missed, missed], {})
    with pytest.raises(MalformedError, match="more planted lies than it judged"):
        withhold((), {me: 0}, [missed], {})
    with pytest.raises(MalformedError, match="accepts or rejects"):
        withhold((), {me: 1}, [fault(1, me, Outcome.VOID)], {})
