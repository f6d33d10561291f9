"""How far honest values reach: a limit beyond what was measured, from the tail that was.

Given n honest values of one statistic, the chance p at which one may be called a lie, and u the
value that a share ζ of them exceeds, the excess over u is taken as exponential (the peaks-over-
threshold model of Pickands and Balkema–de Haan at shape 0) with the mean β of those seen:

    P(X > x) = ζ · exp(−(x − u)/β)          limit = u + β⁺ · ln(ζ / p)

β⁺ = β · 2k/χ²(2k; UNLUCKY) for k excesses: the mean that these would come from with a chance of
UNLUCKY, since 2kβ̂/β is distributed as χ² with 2k degrees of freedom. Few values leave much open:
β⁺/β is 1.2 for k = 100, 2.1 for 10, 4.9 for 3. The limit is never below SAFETY × the largest value
seen, nor below `least`: 1 is what storage and dtype explain (thresholds.py).

What it does not know: a tail heavier than exponential beyond what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from prime_core.errors import MalformedError
from prime_core.signing import Strict

SHARE = 0.1
"""ζ: the share of values that counts as tail."""
SAFETY = 1.25
UNLUCKY = 0.025
"""Chance at which the excesses seen are smaller than their true mean lets expect."""
_UNLUCKY_SIGMA = 1.959964
"""The same in standard deviations of a normal distribution."""
QUANTILES = (50, 90, 99)
LEAST_CHANCE = 1e-15
"""No chance is stated below it: nobody knows a tail that far, and 0 says that it is none."""
MICRO = 1_000_000


class Tail(Strict):
    """One statistic's honest distribution, in millionths: `quantiles` at QUANTILES percent,
    `largest`, the exponential's `start` u and `scale` β⁺, and the `limit` that follows."""

    count: int = Field(ge=1)
    quantiles: tuple[int, ...] = Field(min_length=len(QUANTILES), max_length=len(QUANTILES))
    largest: int = Field(ge=0)
    start: int = Field(ge=0)
    scale: int = Field(ge=0)
    limit: int = Field(ge=1)

    def chance(self, value: float) -> float:
        """Chance that an honest value exceeds `value`: at least LEAST_CHANCE, since nobody knows a
        tail that far, and SHARE where `value` lies before it."""
        excess = value * MICRO - self.start
        if excess <= 0:
            return SHARE
        known = SHARE * math.exp(-excess / self.scale) if self.scale else 0.0
        return max(LEAST_CHANCE, known)


def fit(values: Sequence[float], chance: float, least: float = 1.0) -> Tail:
    """The tail of honest `values` (each ≥ 0) and the limit exceeded with probability `chance`, but
    never below `least` (> 0).

    Raises MalformedError if there is no value, or one is not finite.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if not len(ordered) or not np.isfinite(ordered).all() or ordered[0] < 0:
        raise MalformedError("a calibration needs finite honest values of every statistic")
    start = float(np.quantile(ordered, 1 - SHARE))
    excess = ordered[ordered > start] - start
    scale = float(excess.mean()) * left_open(len(excess)) if len(excess) else 0.0
    largest = float(ordered[-1])
    limit = max(least, SAFETY * largest, start + scale * math.log(max(1.0, SHARE / chance)))
    return Tail(
        count=len(ordered),
        quantiles=tuple(_micro(float(np.percentile(ordered, q))) for q in QUANTILES),
        largest=_micro(largest),
        start=_micro(start),
        scale=_micro(scale),
        limit=_micro(limit),
    )


def left_open(count: int) -> float:
    """β⁺/β: by how much the mean of `count` ≥ 1 exponential values may understate the true one,
    with chance UNLUCKY. The quantile of χ² is Wilson and Hilferty's (PNAS 17, 1931): within 1 %
    from five values on, too cautious below."""
    ninth = 1 / (9 * count)
    return (1 - ninth - _UNLUCKY_SIGMA * math.sqrt(ninth)) ** -3


def _micro(value: float) -> int:
    return math.ceil(value * MICRO)
