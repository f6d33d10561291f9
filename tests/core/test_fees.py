"""What planted files cost validators: a pure function of recorded opinions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core.encoding import sha256
from prime_core.errors import MalformedError
from prime_core.fees import FAULT_FEES, TOLERATED, Fault, FeeRecord, chargeable, withhold
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
            assert 0 <= taken <= fees[Address(record.validator)], "amounts never shrink"
            assert not int(record.due) or taken == fees[Address(record.validator)]
            assert int(record.due) + int(record.withheld) == record.charged * FAULT_FEES * FEE
            assert record.charged >= chargeable(record.lies, record.missed, record.accused)
            assert record.charged <= record.missed + record.accused
        records = after


@given(st.integers(0, 5000), st.floats(0, 1))
def test_a_validator_that_misses_few_lies_pays_nothing_and_one_that_accepts_all_loses(
    lies: int, share: float
) -> None:
    missed = int(lies * share)
    if missed * TOLERATED <= lies:
        assert chargeable(lies, missed, 0) == 0
    assert chargeable(lies, missed, 3) == chargeable(lies, missed, 0) + 3
    files = 100 * lies  # one file in 50 is planted, half of these lie
    if lies > TOLERATED:
        assert chargeable(lies, lies, 0) * FAULT_FEES > files, "more fees than it saves replays"


def test_records_that_contradict_each_other_are_refused() -> None:
    me = VALIDATORS[0]
    missed = fault(1, me, Outcome.ACCEPTED)
    with pytest.raises(MalformedError, match="two faults"):
        withhold((), {me: 2}, [missed, missed], {})
    with pytest.raises(MalformedError, match="more planted lies than it judged"):
        withhold((), {me: 0}, [missed], {})
    with pytest.raises(MalformedError, match="accepts or rejects"):
        withhold((), {me: 1}, [fault(1, me, Outcome.VOID)], {})
