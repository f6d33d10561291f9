"""Uses a node's history: how many rows of a file to replay, and the drift of its statistics over
many files.

Rows: the run's share is the minimum. A node's first NEWCOMER_FILES files get twice as many. Later,
one file in FULL_EVERY is replayed whole, selected by the file's own secret, so it cannot be
predicted.

Sums: a single file made with 8-bit weights, or with a policy one step old, looks honest. Its
statistics are slightly above other nodes', and over many files the difference shows: `excess`, in
standard errors. The reference is the pool's other nodes, not the calibration, because the level
depends on the model; the result means little if most nodes cheat. Files of one kind are compared,
and old ones fade (store.drift). It rejects no file. A node beyond MOST_EXCESS has every later file
replayed whole, and only a file that this rejects is slashed.

Proof passes: a node whose files differ from them more often than those of the other nodes of its
exact class also has every later file replayed whole (`mismatching`).
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prime_core.ids import Address, Digest, to_bytes
from prime_core.run import RunDefinition
from prime_core.verdict import VerdictTable
from prime_orchestrator.store import Connection, drift, exact_classes
from prime_orchestrator.store.drift import DriftRow

NEWCOMER_FILES = 8
FULL_EVERY = 16
LEAST_FILES = 8
MOST_EXCESS = 6.0
"""Standard errors. An honest node's mean exceeds the others' by this much with a chance of 1e-9, as
far as means of LEAST_FILES files and more are normal; being wrong costs a validator's time."""
TOTALS_SECONDS = 60.0
SMOOTH = frozenset(
    {
        *("logprob_mean", "exponent", "sign", "mantissa", "sketch"),
        *("twin_logprob", "twin_mantissa", "twin_sketch"),
    }
)
"""Statistics whose means over files are nearly normal. Maxima are excluded because they are not
means: honest nodes differ by 8 standard errors in them."""
MARGINS = frozenset({"margin_mean", "twin_margin"})
"""Statistics that are 0 for most tokens, and for every token of many short files. Only they reveal
a node that samples with other weights but computes states and proof passes with the true ones."""
LARGEST_ERROR = 1 / 7
"""A mean of MARGINS is compared only if its standard error is at most this share of it. That takes
about 100 tokens with a margin above 0, after which the mean is nearly normal. The larger of the
node's and the others' variance is used, because fewer rows may be drawn from the node's files."""

LEAST_MISMATCHES = 2
MOST_TIMES = 3
PRIOR_MISMATCHES, PRIOR_FILES = 1, 100
"""A node with LEAST_MISMATCHES is compared with the other nodes' share of files with a mismatch,
to which the prior is added: more than MOST_TIMES as many are too many."""

Totals = Mapping[tuple[str, str, str], tuple[int, float, float]]
"""Files, totals and squares of all nodes by (setup, kind, statistic), as drift.totals returns them.
"""


def draw_count(run: RunDefinition, accepted_before: int, secret: Digest) -> int:
    """Returns how many rows of a file to replay, given its node's accepted files and the file's
    draw secret.

    Never less than the run's share.
    """
    rows = run.rows_per_lease
    floor = run.least_drawn(rows)
    if accepted_before < NEWCOMER_FILES:
        return min(rows, 2 * floor)
    lot = hashlib.sha256(b"prime/draw-count/v1" + to_bytes(secret)).digest()
    return rows if int.from_bytes(lot[:8], "big") % FULL_EVERY == 0 else floor


def kind_of(run: RunDefinition, table: VerdictTable) -> str:
    """Returns the kind of an accepted file: its revision of the run, and the number of its replayed
    tokens, within a factor of 2. Other prompts, other lengths and more drawn rows change means or
    variances of statistics, so only files of one kind are compared."""
    drawn = frozenset(table.rows_drawn)
    tokens = sum(row.output_tokens for number, row in enumerate(table.rows) if number in drawn)
    return f"{run.digest()} {tokens.bit_length()}"


def excess(own: Sequence[DriftRow], totals: Totals) -> float | None:
    """Returns by how many standard errors a node's files exceed other nodes' files of the same
    kinds. `own`: the node's sums of one statistic and setup, one for each kind.

    Each kind is compared alone, and the differences are added, weighted by the node's files. So a
    new kind, as after a revision, forgets nothing. The others' deviation is an estimate from their
    files: Student's t becomes the standard errors of a normal value with nearly the same chance.

    None for statistics that are neither SMOOTH nor MARGINS; if the node has fewer than LEAST_FILES
    files of kinds that can be compared; or if its mean of MARGINS is less certain than
    LARGEST_ERROR.
    """
    margins = own[0].statistic in MARGINS
    if not margins and own[0].statistic not in SMOOTH:
        return None
    pairs = [
        (mine, others)
        for mine in own
        if (others := others_of(mine, totals)) is not None
        and others.files >= LEAST_FILES
        and others.variance > 0
        and not (margins and _relative_error([others]) > LARGEST_ERROR)
    ]
    compared = [mine for mine, _ in pairs]
    if sum(mine.files for mine in compared) < LEAST_FILES:
        return None
    if margins and _relative_error(compared) > LARGEST_ERROR:
        return None
    difference = sum(mine.files * (mine.mean - others.mean) for mine, others in pairs)
    errors = []
    for mine, others in pairs:
        variance = max(others.variance, mine.variance) if margins else others.variance
        errors.append(mine.files**2 * variance * (1 / others.files + 1 / mine.files))
    error = sum(errors)
    doubt = sum(
        (part / error) ** 2 / (others.files - 1)
        for part, (_, others) in zip(errors, pairs, strict=True)
    )
    t = abs(difference) / math.sqrt(error)
    return math.copysign(math.sqrt(math.log1p(t * t * doubt) / doubt), difference)


def _relative_error(sums: Sequence[DriftRow]) -> float:
    """The standard error of the mean of all these files, as a share of the mean, which is not
    negative. Infinite where the total's square is 0: validators state the numbers, so it may be
    tiny."""
    files, total, squares = (
        sum(getattr(row, name) for row in sums) for name in ("files", "total", "squares")
    )
    square = total * total
    return math.sqrt(max(squares / square - 1 / files, 0.0)) if square > 0 else math.inf


def mismatching(connection: Connection, nodes: Collection[Address]) -> frozenset[Address]:
    """Returns the given nodes whose files of exact leases differ from their proof passes clearly
    more often than those of the other nodes, in any class."""
    found = set()
    for own in exact_classes.records_of(connection, nodes):
        if own.mismatched < LEAST_MISMATCHES:
            continue
        files, mismatched = exact_classes.totals(connection, own.key)
        others = mismatched - own.mismatched + PRIOR_MISMATCHES
        share = others / (files - own.files + PRIOR_FILES)
        if own.mismatched > MOST_TIMES * share * own.files:
            found.add(own.node)
    return frozenset(found)


@dataclass
class Drifting:
    """Which nodes drift. The pool's totals are read once in TOTALS_SECONDS."""

    _totals: Totals = field(default_factory=dict)
    _read_at: float = -math.inf

    def among(
        self, connection: Connection, nodes: Collection[Address], now: float
    ) -> frozenset[Address]:
        """Returns the given nodes whose files together are beyond MOST_EXCESS in any
        statistic."""
        own = by_statistic(drift.of_those(connection, nodes))
        if all(sum(row.files for row in rows) < LEAST_FILES for rows in own):
            return frozenset()
        if now - self._read_at >= TOTALS_SECONDS:
            self._totals, self._read_at = drift.totals(connection), now
        return frozenset(
            rows[0].node for rows in own if (excess(rows, self._totals) or 0.0) > MOST_EXCESS
        )


def by_statistic(sums: Iterable[DriftRow]) -> list[list[DriftRow]]:
    """Returns the sums of each node, setup and statistic, in the order in which each first
    occurs."""
    found: dict[tuple[str, str, str], list[DriftRow]] = defaultdict(list)
    for row in sums:
        found[row.node, row.setup, row.statistic].append(row)
    return list(found.values())


def others_of(sums: DriftRow, totals: Totals) -> DriftRow | None:
    """Returns what sums of a node are compared with: those of all other nodes, in one row; None if
    there are no others."""
    files, total, squares = totals.get((sums.setup, sums.kind, sums.statistic), (0, 0.0, 0.0))
    if files <= sums.files:
        return None
    return replace(
        sums,
        files=files - sums.files,
        total=total - sums.total,
        squares=squares - sums.squares,
    )
