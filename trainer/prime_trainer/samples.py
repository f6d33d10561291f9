"""`trainer samples`: prompts and answers of a local run's policy, with rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_core.errors import UserError
from prime_core.printing import printable
from prime_envs.samples import Style, reward_text, sample_text
from prime_trainer.metrics import read_lines

ORDERS = ("written", "best", "worst")


def chosen_samples(
    folder: Path, *, step: int | None, order: str, count: int
) -> list[dict[str, Any]]:
    """At most `count` samples of a step (None: the last one) in the folder of a `trainer local`.

    Raises UserError if there are none, `order` is not one of ORDERS, or the file is damaged.
    """
    if order not in ORDERS:
        raise UserError(f"the order {order!r} is none of {', '.join(ORDERS)}")
    path = folder / "samples.jsonl"
    lines = read_lines(path)
    known = sorted({int(line["step"]) for line in lines})
    wanted = known[-1] if step is None and known else step
    found = [line for line in lines if line["step"] == wanted]
    if not found:
        steps = f"it has steps {known[0]} to {known[-1]}" if known else "there are none in it"
        raise UserError(
            f"{path} has no samples of {'any step' if wanted is None else f'step {wanted}'}",
            hint=f"{steps}; name the folder that `trainer local --out` wrote",
        )
    if order != "written":
        found.sort(key=lambda line: float(line["reward"]), reverse=order == "best")
    return found[:count]


def samples_text(samples: Sequence[Mapping[str, Any]], style: Style) -> str:
    """The samples as text, separated by blank lines."""
    return "\n\n".join(
        f"step {sample['step']}, policy {sample['policy']}, {printable(sample['problem'])}: "
        f"{reward_text(sample['reward'], sample['parts'], sample['reason'])}\n"
        + sample_text(
            sample["prompt"],
            sample["turns"],
            tokens=sample["tokens"],
            finish=sample["finish"],
            style=style,
        )
        for sample in samples
    )
