"""Figures of matplotlib as SVG, for the demo's report and the pages of docs/."""

from __future__ import annotations

import io
from typing import Any


def axes_of(x: str, y: str) -> tuple[Any, Any]:
    """Returns a new matplotlib figure and its axes, with these labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def svg_of(figure: Any) -> str:
    """Returns the figure as SVG without a background, with `currentColor` in place of black."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue().replace("#000000", "currentColor")
    return text[text.index("<svg") :]
