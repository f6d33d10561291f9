"""What validators lose of their fees for planted files that they judged wrongly.

    missed    a planted lie that a validator accepted
    accused   an honest planted file that it rejected

Each accusation costs FAULT_FEES fees, and so does each missed lie beyond FREE_MISSES and one in
TOLERATED of all lies that it judged. They are withheld from the validator's fees of this settlement
and, as far as these do not suffice, of later ones. Nothing else is taken. Counted is the whole
record: if its share of missed lies falls, what was withheld too much is paid. Settlement and
rebuild call `withhold` alike.

A validator that misses at most one lie in ten is ever charged for a miss with a probability below
one in a thousand, however long its record. With X = 1 for a miss, E[exp(t·(X − 1/8))] = 1 at
t = 0.486 for that share, so exp(t·(missed − lies/8)) is a supermartingale, and by Ville's
inequality it ever exceeds exp(15·t) with a probability of at most exp(−15·t) < 1/1000.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from pydantic import Field

from prime_core.errors import MalformedError
from prime_core.ids import Address
from prime_core.signing import AddressField, Strict
from prime_core.verdict import Outcome, SignedOpinion

FAULT_FEES = 200
TOLERATED = 8
"""One missed lie in TOLERATED costs nothing: a validator replays some rows of most files."""
FREE_MISSES = 15
"""Further misses that cost nothing: they may be bad luck."""
MAX_FAULTS = 1000
"""Most faults in one settlement."""


class Fault(Strict):
    """A validator's wrong opinion on a planted file: it accepts a lie or rejects an honest file.
    `fee` is what the file's run pays for a judged file, in wei."""

    opinion: SignedOpinion
    fee: str = Field(pattern=r"^(0|[1-9][0-9]*)$", max_length=78)

    @property
    def validator(self) -> Address:
        return Address(self.opinion.validator)

    @property
    def missed(self) -> bool:
        """Whether a lie was missed; else an honest file was accused. Raises MalformedError if the
        opinion does neither."""
        outcome = self.opinion.opinion.outcome
        if outcome not in (Outcome.ACCEPTED, Outcome.REJECTED):
            raise MalformedError("only an opinion that accepts or rejects is a fault")
        return outcome == Outcome.ACCEPTED


class FeeRecord(Strict):
    """A validator's planted files in all settlements so far. `lies`: planted lies that it judged;
    `missed`, `accused`: see above; `charged`: faults that cost it fees now. In wei: `due`, which
    later fees pay; `withheld` in all, less what was paid back."""

    validator: AddressField
    lies: int = Field(ge=0)
    missed: int = Field(ge=0)
    accused: int = Field(ge=0)
    charged: int = Field(ge=0)
    due: str = Field(pattern=r"^(0|[1-9][0-9]*)$", max_length=78)
    withheld: str = Field(pattern=r"^(0|[1-9][0-9]*)$", max_length=78)


def chargeable(lies: int, missed: int, accused: int) -> int:
    """Returns how many of a validator's faults cost it fees."""
    return accused + max(0, missed - FREE_MISSES - -(-lies // TOLERATED))


def withhold(
    before: Sequence[FeeRecord],
    lies: Mapping[Address, int],
    faults: Sequence[Fault],
    fees: Mapping[Address, int],
) -> tuple[FeeRecord, ...]:
    """Returns the records after a settlement, by address. `before`: those of the previous one;
    `lies`: planted lies that each validator judged since; `faults` of these and of honest planted
    files; `fees`: what each validator earned since, in wei.

    Independent of the order of its inputs. Raises MalformedError if they contradict each other.
    """
    known = {Address(record.validator): record for record in before}
    named = Counter((fault.opinion.opinion.submission, fault.validator) for fault in faults)
    if any(times > 1 for times in named.values()):
        raise MalformedError("a validator has two faults on one planted file")
    missed, accused = Counter[Address](), Counter[Address]()
    price: dict[Address, int] = defaultdict(int)
    for fault in faults:
        (missed if fault.missed else accused)[fault.validator] += 1
        price[fault.validator] = max(price[fault.validator], int(fault.fee))
    records = []
    for name in sorted({*known, *lies, *missed, *accused}):
        old = known.get(name) or FeeRecord(
            validator=name, lies=0, missed=0, accused=0, charged=0, due="0", withheld="0"
        )
        more = lies.get(name, 0)
        if more < missed[name]:
            raise MalformedError(f"{name} missed more planted lies than it judged")
        total = (old.lies + more, old.missed + missed[name], old.accused + accused[name])
        charged, cost = chargeable(*total), int(old.due) + int(old.withheld)
        if charged < old.charged:  # each at the mean price of those charged so far
            cost = cost * charged // old.charged
        else:
            cost += (charged - old.charged) * FAULT_FEES * price[name]
        withheld = min(cost, int(old.withheld) + fees.get(name, 0))
        records.append(
            FeeRecord(
                validator=name, lies=total[0], missed=total[1], accused=total[2], charged=charged,
                due=str(cost - withheld), withheld=str(withheld),
            )
        )  # fmt: skip
    return tuple(records)
