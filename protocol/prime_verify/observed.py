"""Proposes limits for a card that has none, from accepted files of the pool's nodes.

    file_of    a verdict table → the replayed rows, and the drift that the file's dtype explains
    propose    files by provider → limits that calibrate.py fits for each provider alone; of each
               statistic the proposal takes the median provider's

A table states each statistic of each replayed row, and that of the file as a share of its limit.
The limits were the widest (Calibration.widest), so the explained drift follows:

    explained = statistic / (share × limit ratio)

The largest drift of single rows is not stated. That of all rows together takes its place, so limits
of rows for proofs and sketches come out wider than measured ones.

What observations cannot do: one provider sets no limit, with any number of keys. No limit exceeds
the widest, within which these files were accepted. The proposal states nothing about lies, so it
accuses no one and changes the limits of no card (Calibration.why_unlisted) until `orchestrator
calibrate --keep` has measured it on such a card.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prime_core.errors import MalformedError, UserError
from prime_core.ids import Address
from prime_core.known_cards import family_of, is_gpu
from prime_core.verdict import VerdictTable
from prime_verify import replay
from prime_verify.calibrate import Measured, limits_of
from prime_verify.proofs.activations import windows_of
from prime_verify.proofs.tails import MICRO, Tail
from prime_verify.proofs.thresholds import (
    FLOORS,
    SCOPES,
    STATISTICS,
    TWIN,
    Calibration,
    Reference,
    Scope,
    SetupLimits,
)

LEAST_PROVIDERS = 3
"""Providers whose files are needed for each setup, and for each statistic of it. The limit of the
median one counts, so one of three moves it no further than the other two are apart."""
LEAST_ROWS = 512
"""Observed rows that a provider needs to count, for each setup."""
SMALLEST, LARGEST = 1e-30, 1e30
"""A value other than 0 outside these is no measurement, and its square could overflow."""


@dataclass(frozen=True)
class Seen:
    """A file's replayed rows, in the order of their numbers, and the drift of its dtype."""

    rows: Sequence[replay.RowStatistics]
    reference: Reference


@dataclass(frozen=True)
class Proposal:
    """`calibration` with the setups of the card, not signed. `providers`: how many set the limits
    of each new setup, in its order. `outside`: provider → how many of its files are outside the
    proposed limits. `lacking`: a phrase for each setup that got no limits."""

    calibration: Calibration
    providers: Sequence[int]
    outside: Mapping[Address, int]
    lacking: Sequence[str]


def file_of(table: VerdictTable, wide: SetupLimits) -> Seen:
    """Returns what an accepted file's table states, which was judged by the limits `wide`. Raises
    MalformedError if it does not state every row, or something that is no measurement."""
    count = len(table.rows_drawn)
    if not 0 < count == len(table.rows) or {*table.rows_drawn} != {*range(count)}:
        raise MalformedError("the file was not replayed whole")
    values = {name: _numbers(table.row_statistics.get(name, ())) for name in STATISTICS}
    if any(len(found) != count for found in values.values()):
        raise MalformedError("the table does not state each statistic of each row")
    rows = []
    for number, place in sorted((number, i) for i, number in enumerate(table.rows_drawn)):
        tokens = table.rows[number].output_tokens
        if not tokens:
            raise MalformedError("a row without tokens")
        of_row = {name: found[place] for name, found in values.items()}
        rows.append(
            replay.RowStatistics(
                number=number,
                tokens=tokens,
                windows=windows_of(tokens),
                equal=1.0,
                values=of_row,
                inner_margin=0.0,
                ends_early=False,
                tail_observed=0,
                tail_expected=0.0,
            )
        )
    drift: dict[str, float] = {}
    for name, tail in wide.file.items():
        of = TWIN.get(name, name)
        value, share = _numbers([table.statistics.get(name, ""), table.shares.get(name, "")])
        if value > 0 and share > 0 and of not in drift:
            explained = value / (share * tail.limit / MICRO)
            drift[of] = math.sqrt(max(0.0, explained**2 - FLOORS[of] ** 2))
    largest = {"margin_mean": "margin_max", "logprob_mean": "logprob_max"}
    of_rows = {name: drift.get(largest.get(name, name), 0.0) for name in FLOORS}
    return Seen(rows, Reference(row=of_rows, file=drift))


def _numbers(texts: Iterable[str]) -> list[float]:
    """The numbers of a table's decimal texts; raises MalformedError if one is no number, or neither
    0 nor between SMALLEST and LARGEST."""
    try:
        found = [float(text) for text in texts]
    except ValueError as error:
        raise MalformedError("the table states what is no number") from error
    if not all(value == 0 or SMALLEST <= value <= LARGEST for value in found):
        raise MalformedError("the table states an impossible value")
    return found


def propose(
    base: Calibration, card: str, tables: Mapping[Address, Sequence[VerdictTable]]
) -> Proposal:
    """Returns limits for `card` (a device's name) and its family, from the tables of accepted files
    by provider, which were judged by `base`. Tables of other cards, of exact leases and without
    measurements are left out.

    Raises UserError with one sentence if `card` is no card, `base` has measured its family, or no
    setup has enough rows of enough providers.
    """
    if not is_gpu(card):
        raise UserError(f"{card!r} names no card", hint="limits of processors are measured")
    if any(family_of(one.device) == family_of(card) for one in base.setups):
        raise UserError(
            f"the calibration has a measurement of {card} or its family, which observations never "
            "change",
            hint="measure it again: orchestrator calibrate --keep",
        )
    seen = _seen(base, card, tables)
    setups, providers, lacking = [], [], []
    outside: dict[Address, int] = {}
    for (engine, dtype), files in sorted(seen.items()):
        wide = base.widest(engine, dtype, card)
        fitted = {
            provider: limits_of(dtype, measured)
            for provider, found in files.items()
            if (measured := _measured(engine, card, found)).rows >= LEAST_ROWS
        }
        if wide is None or len(fitted) < LEAST_PROVIDERS:
            lacking.append(
                f"{engine} {dtype}: {len(fitted)} provider(s) with {LEAST_ROWS} or more observed "
                f"rows, and {LEAST_PROVIDERS} are needed"
            )
            continue
        setups.append(_median(list(fitted.values()), wide))
        providers.append(len(fitted))
        for provider, found in files.items():
            beyond = sum(_is_outside(one, setups[-1]) for one in found)
            outside[provider] = outside.get(provider, 0) + beyond
    if not setups:
        raise UserError(
            f"no limits can be proposed for {card}: "
            + ("; ".join(lacking) or "no accepted file of its family was measured"),
            hint="wait for more files, or measure such a card (orchestrator calibrate)",
        )
    source = f"{base.source}; observed: {card}, files of {min(providers)} or more providers"
    made = base.unsigned().model_copy(update={"setups": (*base.setups, *setups), "source": source})
    return Proposal(made, providers, {p: n for p, n in outside.items() if n}, lacking)


def _seen(
    base: Calibration, card: str, tables: Mapping[Address, Sequence[VerdictTable]]
) -> dict[tuple[str, str], dict[Address, list[Seen]]]:
    """(engine, dtype) → provider → its files of the card's family that state measurements."""
    found: dict[tuple[str, str], dict[Address, list[Seen]]] = defaultdict(lambda: defaultdict(list))
    for provider, of_provider in tables.items():
        for table in of_provider:
            engine, dtype, device = (*table.setup.split(" ", 2), "", "")[:3]
            wide = base.widest(engine, dtype, device)
            if wide is None or family_of(device) != family_of(card):
                continue
            try:
                seen = file_of(table, wide)
            except MalformedError:
                continue
            found[engine, dtype][provider].append(seen)
    return found


def _measured(engine: str, card: str, files: Sequence[Seen]) -> Measured:
    measured = Measured(engine=engine, device=card)
    for one in files:
        measured.add(one.rows, (), one.reference)
    return measured


def _median(fitted: Sequence[SetupLimits], wide: SetupLimits) -> SetupLimits:
    """Returns for each statistic that LEAST_PROVIDERS and `wide` judge the distribution with the
    median limit (the lower of two), which is at most that of `wide`."""

    def of(scope: Scope) -> dict[str, Tail]:
        most: dict[str, Tail] = getattr(wide, scope)
        found = {}
        for name in most:
            tails = [t for one in fitted if (t := getattr(one, scope).get(name)) is not None]
            if len(tails) >= LEAST_PROVIDERS:
                tail = sorted(tails, key=lambda tail: tail.limit)[(len(tails) - 1) // 2]
                limit = min(tail.limit, most[name].limit)
                found[name] = tail.model_copy(update={"limit": limit})
        return found

    return fitted[0].model_copy(
        update={
            "rows": sum(one.rows for one in fitted),
            "files": sum(one.files for one in fitted),
            "tokens": sum(one.tokens for one in fitted),
            **{scope: of(scope) for scope in SCOPES},
        }
    )


def _is_outside(seen: Seen, setup: SetupLimits) -> bool:
    """Whether a file's rows, or all of them together, are outside the limits."""
    limits, together = setup.limits(seen.reference), replay.combine(seen.rows)
    return any(limits.exceeded(row.values, "row") for row in seen.rows) or any(
        limits.exceeded(together, scope) for scope in replay.file_scopes(seen.rows)
    )
