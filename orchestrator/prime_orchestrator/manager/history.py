"""What a node's history changes: how many of a file's rows are replayed, and what its files say
together. Pure.

Rows: the run's share is the floor. A node's first NEWCOMER_FILES files get twice as many; later,
one file in FULL_EVERY, by the file's own secret, is replayed whole: nobody can know which before.

Sums: a file of 8-bit weights, or of a policy one step old, looks honest by itself. Its statistics
lie a little above other nodes' all the same, and over many files that shows: `excess`, in standard
errors. The pool's other nodes are the measure, not the calibration, because the level depends on
the model; so it means little where most nodes lie. It is published and accuses nobody.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from prime_core.ids import Digest, to_bytes
from prime_core.run import RunDefinition
from prime_orchestrator.store.drift import DriftRow

NEWCOMER_FILES = 8
FULL_EVERY = 16
LEAST_FILES = 8
SMOOTH = frozenset(
    {
        *("logprob_mean", "exponent", "sign", "mantissa", "sketch"),
        *("twin_logprob", "twin_mantissa", "twin_sketch"),
    }
)
"""Statistics whose means over files are nearly normal. Margins are nearly always 0, and maxima are
not means: honest nodes lie 8 standard errors apart in them."""


def draw_count(run: RunDefinition, accepted_before: int, secret: Digest) -> int:
    """How many rows of a file to replay, by its node's accepted files and the file's draw secret.

    Never below the run's share.
    """
    rows = run.rows_per_lease
    floor = run.least_drawn(rows)
    if accepted_before < NEWCOMER_FILES:
        return min(rows, 2 * floor)
    lot = hashlib.sha256(b"prime/draw-count/v1" + to_bytes(secret)).digest()
    return rows if int.from_bytes(lot[:8], "big") % FULL_EVERY == 0 else floor


def excess(sums: DriftRow, others: Sequence[DriftRow]) -> float | None:
    """By how many standard errors the node's mean lies above that of `others`: the same statistic
    of the pool's other nodes with the same set-up. None for statistics that are not SMOOTH, before
    either has LEAST_FILES files, or where the others' files do not differ."""
    if sums.statistic not in SMOOTH:
        return None
    files = sum(row.files for row in others)
    if min(files, sums.files) < LEAST_FILES:
        return None
    mean = sum(row.total for row in others) / files
    variance = sum(row.squares for row in others) / files - mean * mean
    if variance <= 0:
        return None
    return (sums.mean - mean) / math.sqrt(variance * (1 / files + 1 / sums.files))


def others_of(sums: DriftRow, every: Sequence[DriftRow]) -> list[DriftRow]:
    """The rows of `every` to compare a node's with."""
    return [
        row
        for row in every
        if row.node != sums.node and (row.setup, row.statistic) == (sums.setup, sums.statistic)
    ]
