"""How many validators must agree before a verdict counts, and on what. Pure.

    rejected, or looked at a second time   two of different keys (a slash takes stake)
    accepted                               one; two for a share of files, by the file's own secret
    void                                   one: anybody can see it

Where the others are away, the two differ on purpose. An *acceptance* whose lot asks for a second
opinion stands alone after `Patience.lone_seconds` (its author judges the file once more): 15 in 16
do anyway, and no honest node should lose its pay to our outage. A *rejection* waits for as long as
the file is valid, then ends void, unpaid and unpunished, counted as `prime_rejections_lapsed`: what
takes stake never rests on one key where the lease names two, or whoever silences one validator
could slash with the other. The liar gains nothing meanwhile: no file of its is paid or trained on.

A second opinion on a rejection replays the very rows that the evidence names, by its secret: it
asks whether the evidence holds on another machine. One on an acceptance draws rows of its own. Who
may be asked are the validators whose draws the lease names; where there is one alone, it decides
alone, and only a dispute on chain can ask another. Two that contradict each other wait for a third;
without one the file ends void by our fault when its validity does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from protocol.core.ids import Digest, to_bytes
from protocol.core.verdict import Outcome

ACCEPTED_ONE_IN = 16
"""One accepted file in so many is judged by a second validator as well."""


def needed(outcome: Outcome, earlier: Sequence[Outcome], validators: int, secret: Digest) -> int:
    """How many opinions of one outcome make the verdict. `earlier` were given by others,
    `validators` is how many the lease names, `secret` the file's own draw secret."""
    if validators < 2 and not earlier:
        return 1
    if earlier or outcome is Outcome.REJECTED:
        return 2
    if outcome is Outcome.ACCEPTED:
        lot = hashlib.sha256(b"prime/second-opinion/v1" + to_bytes(secret)).digest()
        return 2 if int.from_bytes(lot[:8], "big") % ACCEPTED_ONE_IN == 0 else 1
    return 1


def agreed(outcome: Outcome, earlier: Sequence[Outcome], wanted: int) -> bool:
    """Whether `outcome`, given now, is the verdict: with itself, `wanted` opinions say it."""
    return 1 + sum(other is outcome for other in earlier) >= wanted
