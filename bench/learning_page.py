"""The pictures and tables of docs/learning.md, from the runs kept in bench/results.

python -m bench.learning_page       writes docs/learning/*.svg and prints the tables
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.form import ROOT
from bench.learning import MAIN, kept, mean_interval
from bench.learning_run import GOAL, MODES, TARGETS, Record
from devnet.figures import axes_of, svg_of

INK = "#7a7f87"
"""The color of axes and letters: it is seen on a white page and on a black one."""
THIN: dict[str, Any] = {"linewidth": 1, "alpha": 0.45}
"""How one run of several is drawn."""
FOLDER = ROOT / "docs" / "learning"
NAMES = {
    "sync": "synchronous",
    "stale2": "2 policies stale",
    "stale4": "4 policies stale",
    "liars20": "2 stale, 20 % liars",
    "inject_two_sided": "two-sided clip",
    "inject_one_sided": "one-sided clip",
    "unfiltered": "online filter off",
    "twos": "groups of two",
    "twos_unfiltered": "groups of two, filter off",
    "clip_0.1": "gradient clip 0.1",
    "clip_off": "gradient clip off",
    "half_sync": "synchronous, step ×2",
    "half_stale2": "2 stale, step ×2",
    "half_stale4": "4 stale, step ×2",
    "demo_sync": "synchronous, step ×4",
    "demo_stale2": "2 stale, step ×4",
    "demo_stale4": "4 stale, step ×4",
}
CLIPPING = ("inject_two_sided", "inject_one_sided")
CLIPS = ("stale2", "clip_0.1", "clip_off")
FILTER = ("twos", "twos_unfiltered")
RATES = ("half_sync", "half_stale4", "demo_sync", "demo_stale4")


def pictures(records: Sequence[Record]) -> dict[str, Any]:
    """File name → figure; a picture whose runs are missing is left out."""
    figures = {
        "reward.svg": rewards(records, MAIN, "Held-out reward by samples generated"),
        "clipping.svg": rewards(
            records, CLIPPING, "Held-out reward where 2 % of the tokens have ratios near 150"
        ),
        "rates.svg": rewards(
            records,
            RATES,
            "Held-out reward by step size: rate and batch doubled, and the demo's own",
        ),
        "norms.svg": norms(records, CLIPPING),
        "clip.svg": rewards(records, CLIPS, "Held-out reward by the limit of the gradient norm"),
        "filter.svg": rewards(records, FILTER, "Held-out reward, groups of two samples"),
        "lengths.svg": lengths([r for r in records if r.mode == "stale2"]),
    }
    return {name: figure for name, figure in figures.items() if figure.axes[0].lines}


def rewards(records: Sequence[Record], modes: Sequence[str], title: str) -> Any:
    """Each run's held-out rewards, thin; where each mode's mean run reaches the goal, with its
    95 % interval."""
    figure, axes = axes_of("samples generated", "held-out reward")
    axes.set_title(title)
    for number, mode in enumerate(modes):
        mine = [r for r in records if r.mode == mode]
        _runs(axes, number, mode, [[(n, reward) for _, n, reward in r.curve] for r in mine])
        reached = [r.samples_to_goal for r in mine if r.samples_to_goal is not None]
        if len(reached) == len(mine) > 1:
            mean, half, _ = mean_interval(reached)
            height = GOAL + 0.012 * number
            axes.errorbar(mean, height, xerr=half, color=f"C{number}", fmt="o", linewidth=4)
    if axes.lines:
        axes.axhline(GOAL, color="black", linestyle="--", linewidth=1)
        axes.legend(fontsize=8, framealpha=0)
    return figure


def norms(records: Sequence[Record], modes: Sequence[str]) -> Any:
    """The gradient's norm before it is clipped, by step: the largest of the seeds, and each."""
    figure, axes = axes_of("step", "gradient norm")
    axes.set_title("Gradient norm by step, before the clip")
    axes.set_yscale("log")
    for number, mode in enumerate(modes):
        runs = [list(enumerate(r.gradient_norms)) for r in records if r.mode == mode]
        _runs(axes, number, mode, runs)
    if axes.lines:
        axes.legend(fontsize=8, framealpha=0)
    return figure


def _runs(axes: Any, number: int, mode: str, runs: Sequence[Sequence[tuple[float, float]]]) -> None:
    """Draws the runs of a mode, thin, in the color of its number, and names it once."""
    for place, points in enumerate(runs):
        xs, ys = zip(*points, strict=True)
        name = NAMES[mode] if place == 0 else None
        axes.plot(xs, ys, color=f"C{number}", label=name, **THIN)


def lengths(records: Sequence[Record]) -> Any:
    """Mean length where each target was asked, by policy, over the runs that came so far."""
    figure, axes = axes_of("policy", "mean dots")
    axes.set_title("Length given where a target was asked")
    for number, target in enumerate(TARGETS):
        by_policy: dict[int, list[float]] = {}
        for record in records:
            for (policy, _, _), actual in zip(
                record.curve, record.actual[str(target)], strict=True
            ):
                by_policy.setdefault(policy, []).append(actual)
        whole = {p: v for p, v in sorted(by_policy.items()) if len(v) == len(records)}
        if whole:
            means, color = [statistics.fmean(values) for values in whole.values()], f"C{number}"
            axes.plot([*whole], means, color=color, label=f"{target} asked")
            axes.plot([0, [*whole][-1]], [target, target], color=color, **THIN)
    if axes.lines:
        axes.legend(fontsize=8, framealpha=0)
    return figure


def table(records: Sequence[Record]) -> str:
    """Every mode's samples to the goal, and what else its runs say."""
    rows = ["| mode | runs | samples to 0.75 | largest gradient norm | samples rejected |"]
    rows.append("|---|---|---|---|---|")
    for mode in MODES:
        mine = [r for r in records if r.mode == mode]
        reached = [r.samples_to_goal for r in mine if r.samples_to_goal is not None]
        if not mine:
            continue
        if len(reached) == len(mine) > 1:
            mean, half, _ = mean_interval(reached)
            reported = f"{mean:,.0f} ± {half:,.0f}"
        else:
            reported = f"reached by {len(reached)} of {len(mine)}"
        norm = max(norm for r in mine for norm in r.gradient_norms)
        lost = sum(r.rejected for r in mine) / sum(r.samples for r in mine)
        rows.append(f"| {NAMES[mode]} | {len(mine)} | {reported} | {norm:.3g} | {lost:.1%} |")
    return "\n".join(rows)


def length_table(records: Sequence[Record]) -> str:
    """Asked against given, at the first and at each run's last evaluation."""
    rows = ["| asked | given at the start | distance | given at the end | distance |"]
    rows.append("|---|---|---|---|---|")
    for target in map(str, TARGETS):
        cells = [
            f"{statistics.fmean([getattr(r, what)[target][place] for r in records]):.1f}"
            for place in (0, -1)
            for what in ("actual", "lengths")
        ]
        rows.append(f"| {target} | {' | '.join(cells)} |")
    return "\n".join(rows)


def write(folder: Path, records: Sequence[Record]) -> list[Path]:
    """The pictures into `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in pictures(records).items():
        (folder / name).write_text(svg_of(figure).replace("currentColor", INK))
        paths.append(folder / name)
    return paths


def main() -> None:
    records = kept()
    for path in write(FOLDER, records):
        print(path.relative_to(ROOT))
    print(table(records))
    print()
    print(length_table([r for r in records if r.mode == "stale2"]))


if __name__ == "__main__":
    main()
