"""Length budgets: the reward for answering in the length that was asked for.

Three forms, in integer millionths so that every machine gets the same bits:

- exact: `task − α·|target − actual|` (LCPO-Exact, arXiv 2503.04697; INTELLECT-2)
- clip:  `max(0, task − α·|target − actual|)`: never below a wrong answer's zero
- max:   `task · clamp(α·(target − actual) + 1/2, 0, 1)` (LCPO-Max): shorter is never worse
"""

from __future__ import annotations

from protocol.core.run import MICRO, LengthForm


def length_reward(
    task_micro: int, *, target: int, actual: int, penalty_micro: int, form: LengthForm
) -> int:
    """Reward in millionths; `penalty_micro` is α per token. Rounds towards minus infinity."""
    if form == "exact":
        return task_micro - penalty_micro * abs(target - actual)
    if form == "clip":
        return max(0, task_micro - penalty_micro * abs(target - actual))
    share = min(MICRO, max(0, penalty_micro * (target - actual) + MICRO // 2))
    return task_micro * share // MICRO
