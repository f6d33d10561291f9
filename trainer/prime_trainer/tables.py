"""Evaluations and plans as text tables."""

from __future__ import annotations

from collections.abc import Sequence

from prime_trainer.dryrun import PlanRow, in_bytes
from prime_trainer.evaluate import Comparison, Evaluation, Interval


def evaluation_table(found: Evaluation) -> str:
    """Overall figures, then by environment and by budget."""
    k = found.samples
    lines = [
        f"{name:13} {_show(value)}"
        for name, value in (
            ("reward", found.reward),
            ("task", found.task),
            ("length_error", found.length_error),
            ("pass@1", found.pass_1),
            (f"pass@{k}", found.pass_k),
        )[: 5 if k > 1 else 4]
    ]
    groups = [("environment", name, part) for name, part in found.by_environment.items()]
    budgets = sorted(found.by_budget.items(), key=lambda item: int(item[0]))
    groups += [("target", name, part) for name, part in budgets]
    for kind, name, part in groups:
        whole = f"pass@{k} {_show(part.pass_k)}  " if k > 1 else ""
        lines.append(
            f"  {kind} {name:>8}  reward {_show(part.reward)}  pass@1 {_show(part.pass_1)}  "
            f"{whole}({part.reward.count} problems)"
        )
    return "\n".join(lines)


def comparison_table(both: Comparison) -> str:
    """Base, trained, and the paired gains."""
    lines = [f"{'':13} {'base':26} {'trained':26} gain"]
    rows = (
        ("reward", both.base.reward, both.trained.reward, both.reward_gain),
        ("pass@1", both.base.pass_1, both.trained.pass_1, both.pass_1_gain),
        (f"pass@{both.base.samples}", both.base.pass_k, both.trained.pass_k, both.pass_k_gain),
    )
    for name, one, two, gain in rows[: 3 if both.base.samples > 1 else 2]:
        lines.append(f"{name:13} {_show(one):26} {_show(two):26} {_show(gain)}")
    for name, part in sorted(both.trained.by_budget.items(), key=lambda item: int(item[0])):
        before = both.base.by_budget[name]
        lines.append(
            f"  target {name:>5} {_show(before.reward):26} {_show(part.reward):26} "
            f"({part.reward.count} problems)"
        )
    return "\n".join(lines)


def _show(value: Interval) -> str:
    return f"{value.mean:7.4f}  [{value.low:.4f}, {value.high:.4f}]"


def plan_table(rows: Sequence[PlanRow]) -> str:
    """One line per number of ranks."""
    columns = ("ranks", "kept", "peak", "host", "fits", "micro-batches", "traffic", "computing")
    words = {True: "yes", False: "no", None: "?"}
    lines = [columns]
    for row in rows:
        seconds = row.seconds_per_batch
        lines.append((
            str(row.step.ranks), in_bytes(row.step.kept), in_bytes(row.step.peak),
            in_bytes(row.step.host),
            words[row.fits], str(row.micro_batches), in_bytes(row.traffic),
            "?" if seconds is None else f"{seconds:.3g} s",
        ))  # fmt: skip
    return "\n".join("  ".join(f"{cell:>13}" for cell in line) for line in lines)
