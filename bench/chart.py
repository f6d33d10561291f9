"""Line charts as small SVG files that read on light and on dark pages: no script, no font to fetch.

Every line is named beside its end or in the legend, the axes say what they count, and a line that
stands for several runs may be drawn thin, once for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 44, 44
COLOURS = ("#2f6fd6", "#d9822b", "#3a9d5d", "#b0476f", "#7a5cc4")
INK, GRID = "#7a7f87", "#7a7f8740"


@dataclass(frozen=True)
class Line:
    """One line: its points; `colour` is a number of COLOURS, `name` "" has no entry in the legend,
    `thin` is one run of several."""

    points: Sequence[tuple[float, float]]
    colour: int
    name: str = ""
    thin: bool = False


@dataclass(frozen=True)
class Span:
    """A horizontal interval with a dot at its middle, at height `y`."""

    low: float
    middle: float
    high: float
    y: float
    colour: int


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
            colour = COLOURS[span.colour]
            parts.append(
                f'<path d="M{a:.1f} {up:.1f}H{c:.1f}" stroke="{colour}" stroke-width="4" '
                f'stroke-linecap="round"/><circle cx="{b:.1f}" cy="{up:.1f}" r="5" '
                f'fill="{colour}"/>'
            )
        parts += self._legend()
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _height(self, y: float) -> float:
        return math.log10(max(y, 1e-9)) if self.log else y

    @staticmethod
    def _line(line: Line, places: Sequence[tuple[float, float]]) -> str:
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        style = 'stroke-width="1" opacity="0.45"' if line.thin else 'stroke-width="2"'
        return f'<polyline points="{drawn}" fill="none" stroke="{COLOURS[line.colour]}" {style}/>'

    def _legend(self) -> list[str]:
        found, x = [], float(LEFT)
        for line in self.lines:
            if line.name:
                found.append(
                    f'<path d="M{x:.0f} 28h16" stroke="{COLOURS[line.colour]}" stroke-width="3"/>'
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
