"""Extrapolates limits beyond the measured honest values, from their tail.

Inputs are n honest values of one statistic, the probability p of falsely rejecting one, and the
value u that a share ζ of them exceeds. The excess over u is modeled as exponential (the
peaks-over-threshold model of Pickands and Balkema–de Haan at shape 0) with their mean excess β:

    P(X > x) = ζ · exp(−(x − u)/β)          limit = u + β⁺ · ln(ζ / p)

β⁺ = β · 2k/χ²(2k; UNLUCKY) for k excesses: an upper confidence bound on the mean, since 2kβ̂/β is
distributed as χ² with 2k degrees of freedom. Few values leave a wide margin: β⁺/β is 1.2 for k =
100, 2.1 for 10, 4.9 for 3. The limit is never below SAFETY × the largest measured value, nor below
`least`: 1 is what storage and dtype explain (thresholds.py).

Limitation: tails heavier than exponential beyond the measured range are not detected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from prime_core.errors import MalformedError
from prime_core.signing import Strict

SHARE = 0.1
"""ζ: the share of values that belongs to the tail."""
SAFETY = 1.25
UNLUCKY = 0.025
"""Probability that the measured excesses are as small as they are although the true mean is β⁺."""
_UNLUCKY_SIGMA = 1.959964
"""The same in standard deviations of a normal distribution."""
QUANTILES = (50, 90, 99)
LEAST_CHANCE = 1e-15
"""Smallest probability reported: the tail is unknown that far out, and 0 means "not a matter of
chance"."""
MICRO = 1_000_000


class Tail(Strict):
    """The honest distribution of one statistic, in millionths: `quantiles` at QUANTILES percent,
    `largest`, the exponential's `start` u and `scale` β⁺, and the resulting `limit`."""

    count: int = Field(ge=1)
    quantiles: tuple[int, ...] = Field(min_length=len(QUANTILES), max_length=len(QUANTILES))
    largest: int = Field(ge=0)
    start: int = Field(ge=0)
    scale: int = Field(ge=0)
    limit: int = Field(ge=1)

    def chance(self, value: float) -> float:
        """Probability that an honest value exceeds `value`; at least LEAST_CHANCE, and SHARE for
        values below the tail."""
        excess = value * MICRO - self.start
        if excess <= 0:
            return SHARE
        known = SHARE * math.exp(-excess / self.scale) if self.scale else 0.0
        return max(LEAST_CHANCE, known)


def fit(values: Sequence[float], chance: float, least: float = 1.0) -> Tail:
    """Fits the tail of honest `values` (each ≥ 0). The limit is exceeded with probability `chance`,
    but is never below `least` (> 0).

    Raises MalformedError if there are no values, or one is negative or not finite.
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


def fit_groups(groups: Sequence[Sequence[float]], chance: float, least: float = 1.0) -> Tail:
    """As `fit`, of honest values of several models or machines, whose levels differ more than
    their tails. Each group has its own start; the mean excess is that of all groups. The largest
    start gives the limit, so different levels are not taken for one long tail."""
    starts = [float(np.quantile(group, 1 - SHARE)) for group in groups]
    excess = [
        value - start
        for group, start in zip(groups, starts, strict=True)
        for value in group
        if value > start
    ]
    scale = float(np.mean(excess)) * left_open(len(excess)) if excess else 0.0
    largest = max(max(group) for group in groups)
    reach = max(starts) + scale * math.log(max(1.0, SHARE / chance))
    return fit([value for group in groups for value in group], chance, least).model_copy(
        update={
            "start": _micro(max(starts)),
            "scale": _micro(scale),
            "limit": _micro(max(least, SAFETY * largest, reach)),
        }
    )


def left_open(count: int) -> float:
    """β⁺/β: the factor by which the mean of `count` ≥ 1 exponential values may underestimate the
    true mean, with probability UNLUCKY. The χ² quantile is approximated by Wilson and Hilferty
    (PNAS 17, 1931): within 1 % from five values on, conservative below."""
    ninth = 1 / (9 * count)
    return (1 - ninth - _UNLUCKY_SIGMA * math.sqrt(ninth)) ** -3


def _micro(value: float) -> int:
    return math.ceil(value * MICRO)
