"""Means and shares of graded answers, each with its 95 % interval, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL_95 = 1.959964


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % confidence interval over `count` problems: the normal approximation, or
    Wilson's score interval for shares."""

    mean: float
    low: float
    high: float
    count: int


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % interval. Raises ValueError if `values` is empty."""
    if not values:
        raise ValueError("no values to average")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = NORMAL_95 * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half, count)


def share(values: Sequence[float]) -> Interval:
    """Mean and 95 % Wilson score interval of values in [0, 1]; the interval stays within [0, 1]
    (Wilson 1927, doi 10.1080/01621459.1927.10502953). For values between 0 and 1 (several samples
    per problem) it is conservative, because their variance is at most p(1 - p). Raises ValueError
    if `values` is empty or outside [0, 1]."""
    if not values:
        raise ValueError("no values to average")
    if min(values) < 0.0 or max(values) > 1.0:
        raise ValueError("a share lies between 0 and 1")
    count, z2 = len(values), NORMAL_95**2
    mean = math.fsum(values) / count
    center = (mean + z2 / (2 * count)) / (1 + z2 / count)
    spread = math.sqrt(mean * (1 - mean) / count + z2 / (4 * count**2))
    half = NORMAL_95 * spread / (1 + z2 / count)
    return Interval(mean, max(0.0, center - half), min(1.0, center + half), count)


def pass_at_k(samples: int, passes: int, k: int) -> float:
    """1 − C(n − c, k)/C(n, k): the unbiased estimate of the probability that at least one of k
    answers passes, from c passes among n (Chen et al., arXiv 2107.03374). Raises ValueError unless
    k ≤ n."""
    if not 1 <= k <= samples or not 0 <= passes <= samples:
        raise ValueError(f"pass@{k} cannot be had of {passes} passes among {samples}")
    return 1.0 - math.comb(samples - passes, k) / math.comb(samples, k)
