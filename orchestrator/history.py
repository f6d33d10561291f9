"""What a node's history changes: how many of a file's rows are replayed, and what its files say
together. Pure.

Rows: the run's share is the floor. A node's first NEWCOMER_FILES files get twice as many; later,
one file in FULL_EVERY, by the file's own secret, is replayed whole: nobody can know which before.

Sums: a file of 8-bit weights, or of a policy one step old, looks honest by itself. Its statistics
lie above the honest median all the same, and over many files that shows: `excess` in standard
errors of the honest distribution. It is published and accuses nobody.
"""

from __future__ import annotations

import hashlib
import math

from orchestrator.store.drift import DriftRow
from protocol.core.ids import Digest, to_bytes
from protocol.core.run import RunDefinition
from protocol.proofs.thresholds import Calibration
from protocol.verification.verify import least_drawn

NEWCOMER_FILES = 8
FULL_EVERY = 16
_NINETY = 1.2816
"""Standard normal quantile of 90 %: how far the 90th percentile lies from the median."""


def draw_count(run: RunDefinition, accepted_before: int, secret: Digest) -> int:
    """How many rows of a file to replay, by its node's accepted files and the file's draw secret.

    Never below the run's share.
    """
    rows = run.rows_per_lease
    floor = least_drawn(run, rows)
    if accepted_before < NEWCOMER_FILES:
        return min(rows, 2 * floor)
    lot = hashlib.sha256(b"prime/draw-count/v1" + to_bytes(secret)).digest()
    return rows if int.from_bytes(lot[:8], "big") % FULL_EVERY == 0 else floor


def excess(sums: DriftRow, calibration: Calibration) -> float | None:
    """By how many standard errors the node's mean lies above the honest median; None where the
    calibration does not cover the set-up, or saw no spread."""
    engine, dtype, device = sums.setup.split(" ", 2)
    honest = calibration.setup(engine, dtype, device)
    if honest is None or sums.statistic not in honest.file:
        return None
    tail = honest.file[sums.statistic]
    median, ninety = (quantile / tail.limit for quantile in tail.quantiles[:2])
    deviation = (ninety - median) / _NINETY
    if deviation <= 0:
        return None
    return (sums.mean - median) / deviation * math.sqrt(sums.files)
