"""The pictures and tables of docs/learning.md, from the runs kept in bench/results.

python -m bench.learning_page       writes docs/learning/*.svg and prints the tables
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bench.form import ROOT
from bench.learning import MAIN, kept, mean_interval
from bench.learning_run import GOAL, MODES, TARGETS, Record

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 44, 44
COLORS = ("#2f6fd6", "#d9822b", "#3a9d5d", "#b0476f", "#7a5cc4")
INK, GRID = "#7a7f87", "#7a7f8740"


@dataclass(frozen=True)
class Line:
    """One line: its points; `color` is a number of COLORS, `name` "" has no entry in the legend,
    `thin` is one run of several."""

    points: Sequence[tuple[float, float]]
    color: int
    name: str = ""
    thin: bool = False


@dataclass(frozen=True)
class Span:
    """A horizontal interval with a dot at its middle, at height `y`."""

    low: float
    middle: float
    high: float
    y: float
    color: int


@dataclass(frozen=True)
class Chart:
    """What is drawn. `log`: the vertical axis counts in powers of ten; `goal`: a dashed level."""

    title: str
    across: str
    up: str
    lines: Sequence[Line]
    spans: Sequence[Span] = ()
    goal: float | None = None
    log: bool = False

    def svg(self) -> str:
        """The picture. Raises ValueError if there is nothing to draw."""
        points = [point for line in self.lines for point in line.points]
        points += [(span.high, span.y) for span in self.spans]
        if not points:
            raise ValueError(f"{self.title}: nothing to draw")
        xs = ticks(0.0, max(x for x, _ in points))
        heights = [self._height(y) for _, y in points]
        if self.goal is not None:
            heights.append(self._height(self.goal))
        low, high = min(heights), max(heights)
        ys = [float(n) for n in range(math.floor(low), math.ceil(high) + 1)] if self.log else (
            ticks(low, high)
        )  # fmt: skip

        def at(x: float, height: float) -> tuple[float, float]:
            across = (x - xs[0]) / (xs[-1] - xs[0])
            up = (height - ys[0]) / (ys[-1] - ys[0])
            return (
                LEFT + across * (WIDTH - LEFT - RIGHT),
                HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
            )

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="sans-serif" font-size="12" fill="{INK}">',
            f"<title>{escape(self.title)}</title>",
        ]
        for x in xs:
            across, _ = at(x, ys[0])
            parts.append(_text(across, HEIGHT - BOTTOM + 16, _number(x), "middle"))
        for y in ys:
            _, up = at(xs[0], y)
            parts.append(f'<path d="M{LEFT} {up:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
            label = f"10^{y:g}" if self.log else _number(y)
            parts.append(_text(LEFT - 6, up + 4, label, "end"))
        parts.append(_text(LEFT, 14, self.up, "start"))
        parts.append(_text(WIDTH - RIGHT, HEIGHT - 8, self.across, "end"))
        if self.goal is not None:
            _, up = at(xs[0], self._height(self.goal))
            parts.append(
                f'<path d="M{LEFT} {up:.1f}H{WIDTH - RIGHT}" stroke="{INK}" '
                'stroke-dasharray="5 4"/>'
            )
        for line in self.lines:
            if line.points:
                parts.append(self._line(line, [at(x, self._height(y)) for x, y in line.points]))
        for span in self.spans:
            (a, up), (b, _), (c, _) = (
                at(x, self._height(span.y)) for x in (span.low, span.middle, span.high)
            )
            color = COLORS[span.color]
            parts.append(
                f'<path d="M{a:.1f} {up:.1f}H{c:.1f}" stroke="{color}" stroke-width="4" '
                f'stroke-linecap="round"/><circle cx="{b:.1f}" cy="{up:.1f}" r="5" '
                f'fill="{color}"/>'
            )
        parts += self._legend()
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _height(self, y: float) -> float:
        return math.log10(max(y, 1e-9)) if self.log else y

    @staticmethod
    def _line(line: Line, places: Sequence[tuple[float, float]]) -> str:
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        style = 'stroke-width="1" opacity="0.45"' if line.thin else 'stroke-width="2"'
        return f'<polyline points="{drawn}" fill="none" stroke="{COLORS[line.color]}" {style}/>'

    def _legend(self) -> list[str]:
        found, x = [], float(LEFT)
        for line in self.lines:
            if line.name:
                found.append(
                    f'<path d="M{x:.0f} 28h16" stroke="{COLORS[line.color]}" stroke-width="3"/>'
                )
                found.append(_text(x + 21, 32, line.name, "start"))
                x += 36 + 6.4 * len(line.name)
        return found


def ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers, the first at or below `low`, the last at or above `high`."""
    span = max(high - low, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if span / (power * m) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


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


def pictures(records: Sequence[Record]) -> dict[str, str]:
    """File name → SVG; a picture whose runs are missing is left out."""
    charts = {
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
    return {name: chart.svg() for name, chart in charts.items() if chart.lines}


def rewards(records: Sequence[Record], modes: Sequence[str], title: str) -> Chart:
    """Each run's held-out rewards, thin; where each mode's mean run reaches the goal, with its
    95 % interval."""
    lines, spans = [], []
    for color, mode in enumerate(modes):
        mine = [r for r in records if r.mode == mode]
        for number, record in enumerate(mine):
            points = [(samples, reward) for _, samples, reward in record.curve]
            lines.append(Line(points, color, "" if number else NAMES[mode], thin=True))
        reached = [r.samples_to_goal for r in mine if r.samples_to_goal is not None]
        if len(reached) == len(mine) > 1:
            mean, half, _ = mean_interval(reached)
            spans.append(Span(mean - half, mean, mean + half, GOAL + 0.012 * color, color))
    return Chart(title, "samples generated", "held-out reward", lines, spans, goal=GOAL)


def norms(records: Sequence[Record], modes: Sequence[str]) -> Chart:
    """The gradient's norm before it is clipped, by step: the largest of the seeds, and each."""
    lines = []
    for color, mode in enumerate(modes):
        for number, record in enumerate(r for r in records if r.mode == mode):
            points = [(float(step), norm) for step, norm in enumerate(record.gradient_norms)]
            lines.append(Line(points, color, "" if number else NAMES[mode], thin=True))
    return Chart("Gradient norm by step, before the clip", "step", "gradient norm", lines, log=True)


def lengths(records: Sequence[Record]) -> Chart:
    """Mean length where each target was asked, by policy, over the runs that came so far."""
    lines = []
    for color, target in enumerate(TARGETS):
        by_policy: dict[int, list[float]] = {}
        for record in records:
            for (policy, _, _), actual in zip(
                record.curve, record.actual[str(target)], strict=True
            ):
                by_policy.setdefault(policy, []).append(actual)
        whole = {p: v for p, v in by_policy.items() if len(v) == len(records)}
        points = [(float(p), statistics.fmean(values)) for p, values in sorted(whole.items())]
        if points:
            lines.append(Line(points, color, f"{target} asked"))
            level = [(0.0, float(target)), (points[-1][0], float(target))]
            lines.append(Line(level, color, thin=True))
    return Chart("Length given where a target was asked", "policy", "mean dots", lines)


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
    for name, svg in pictures(records).items():
        (folder / name).write_text(svg)
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
