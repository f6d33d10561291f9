"""Length budgets: the reward for meeting a target length, and the targets for each speed class.

Three forms, in integer millionths so that all machines get the same bits:

- exact: `task − α·|target − actual|` (LCPO-Exact, arXiv 2503.04697; INTELLECT-2)
- clip:  `max(0, task − α·|target − actual|)`: never below a wrong answer's zero
- max:   `task · clamp(α·(target − actual) + 1/2, 0, 1)` (LCPO-Max): shorter is never worse
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from prime_core.errors import UserError
from prime_core.run import MICRO, LengthForm

MAX_MENU = 16
TOLERANCE = Fraction(5, 4)
"""Maximum ratio between the file times of any two speed classes."""
_EVEN = Fraction(21, 20)
"""Times within this ratio count as equal, so that a class can keep more targets to draw from."""


def length_reward(
    task_micro: int, *, target: int, actual: int, penalty_micro: int, form: LengthForm
) -> int:
    """Reward in millionths; `penalty_micro` is α per token. Rounds toward minus infinity."""
    if form == "exact":
        return task_micro - penalty_micro * abs(target - actual)
    if form == "clip":
        return max(0, task_micro - penalty_micro * abs(target - actual))
    share = min(MICRO, max(0, penalty_micro * (target - actual) + MICRO // 2))
    return task_micro * share // MICRO


def file_seconds(targets: Sequence[int], speed: Fraction, answer_tokens: int) -> Fraction:
    """Average time of a row with these targets, in seconds at `speed` tokens per second: thinking
    of the target length, followed by the answer."""
    return (Fraction(sum(targets), len(targets)) + answer_tokens) / speed


def balanced_targets(
    menu: Sequence[int], speeds: Mapping[int, Fraction], *, answer_tokens: int = 0
) -> dict[str, tuple[int, ...]]:
    """Selects the targets of `menu` for each speed class so that files of all classes take about
    equally long: small budgets for slow nodes, large ones for fast nodes.

    `speeds`: class → tokens per second (any unit; only ratios count). Each class gets adjacent
    targets on the menu, as many as keep the times together. Raises UserError if no choice brings
    them within TOLERANCE, because the menu is too narrow for these machines.
    """
    choices = sorted(set(menu))
    if not 1 <= len(choices) <= MAX_MENU or choices[0] < 0 or answer_tokens < 0 or not speeds:
        raise UserError(f"a menu has 1 to {MAX_MENU} targets of 0 tokens or more, and some speed")
    if any(speed <= 0 for speed in speeds.values()):
        raise UserError("a speed is more than 0 tokens a second")
    if choices[0] + answer_tokens == 0:
        raise UserError("a target of 0 tokens and an answer of none is not work at all")
    count = len(choices)
    windows = [tuple(choices[a:b]) for a in range(count) for b in range(a + 1, count + 1)]
    times = {known: _whole_times(windows, speed, speeds, answer_tokens)
             for known, speed in sorted(speeds.items())}  # fmt: skip
    fastest = max(speeds, key=lambda known: (speeds[known], known))
    found: tuple[tuple[Fraction, int, int, Fraction], dict[str, tuple[int, ...]]] | None = None
    for reference in sorted(set(times[fastest])):
        picks = {known: _nearest(windows, own, reference) for known, own in times.items()}
        taken = [times[known][pick] for known, pick in picks.items()]
        spread = Fraction(max(taken), min(taken))
        sizes = [len(windows[pick]) for pick in picks.values()]
        worth = (max(spread, _EVEN), -min(sizes), -sum(sizes), spread)
        if found is None or worth < found[0]:
            found = (worth, {str(known): windows[pick] for known, pick in picks.items()})
    assert found is not None
    (_, _, _, spread), chosen = found
    if spread > TOLERANCE:
        ratio = float(max(speeds.values()) / min(speeds.values()))
        raise UserError(
            "no targets of this menu bring files of all classes within 25 % of one another (at "
            f"best {float(spread):.2f} times): the fastest class is {ratio:.3g} times as fast as "
            "the slowest",
            hint="add smaller or larger targets to the menu, or fewer classes",
        )
    return chosen


def _whole_times(
    windows: Sequence[tuple[int, ...]],
    speed: Fraction,
    speeds: Mapping[int, Fraction],
    answer_tokens: int,
) -> list[int]:
    """`file_seconds` of every window, in a common unit that makes them integers."""
    scale = math.lcm(*range(1, MAX_MENU + 1))
    unit = math.lcm(*(known.numerator for known in speeds.values()))
    factor = int(unit / speed * math.lcm(*(known.denominator for known in speeds.values())))
    return [
        (sum(window) * scale // len(window) + answer_tokens * scale) * factor for window in windows
    ]


def _nearest(windows: Sequence[tuple[int, ...]], times: Sequence[int], wanted: int) -> int:
    """Index of the widest window whose time is close to `wanted`, or of the closest if none is."""

    def apart(index: int) -> Fraction:
        return Fraction(max(times[index], wanted), min(times[index], wanted))

    bound = _EVEN
    close = [
        index
        for index, time in enumerate(times)
        if time * bound.denominator <= wanted * bound.numerator
        and wanted * bound.denominator <= time * bound.numerator
    ]
    if close:
        return max(close, key=lambda index: (len(windows[index]), -apart(index)))
    return min(range(len(windows)), key=apart)


def budgets_from(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a TOML's `[budgets]`. If it has `menu`, `speeds` (class → tokens per second) and
    `answer_tokens`, `by_class` and `targets` are computed from them. Raises UserError."""
    if "menu" not in values:
        return dict(values)
    if "by_class" in values or "targets" in values or "speeds" not in values:
        raise UserError("budgets name either targets (and by_class), or menu and speeds")
    kept = {k: v for k, v in values.items() if k not in ("menu", "speeds", "answer_tokens")}
    try:
        speeds = {int(name): Fraction(str(speed)) for name, speed in values["speeds"].items()}
        menu = [int(target) for target in values["menu"]]
        answer = int(values.get("answer_tokens", 0))
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"budgets: menu, speeds or answer_tokens is not a number: {error}"
        ) from error
    chosen = balanced_targets(menu, speeds, answer_tokens=answer)
    targets = tuple(sorted({target for some in chosen.values() for target in some}))
    return {**kept, "targets": targets, "by_class": chosen}
