"""What the plots of the report are made of: palette, style, lines, stacks and their labels.

A figure is drawn once, in the light palette: as PNG for people's own documents, and as SVG, in
which every colour becomes a CSS variable, so that the page can show it light or dark.
"""

import re
from collections.abc import Sequence
from typing import Any

from headway.views.run_data import RunData
from headway.views.values import Row, number, resampled

LIGHT = {
    "ground": "#fffefe",
    "ink": "#1f2a37",
    "muted": "#6b7684",
    "grid": "#e6e9ed",
    "blue": "#2f6db5",
    "orange": "#d97a1f",
    "green": "#2e9467",
    "red": "#c4423a",
    "purple": "#8058a8",
    "teal": "#1f97a3",
    "grey": "#b3bbc5",
}
DARK = {
    "ground": "#171c23",
    "ink": "#e3e8ee",
    "muted": "#95a1af",
    "grid": "#2b333d",
    "blue": "#6aa5e8",
    "orange": "#f0a04f",
    "green": "#56bd8e",
    "red": "#ef7a70",
    "purple": "#b592dc",
    "teal": "#55c3cd",
    "grey": "#5a6572",
}
SERIES = ("blue", "orange", "green", "purple", "teal", "red", "grey")

MAX_POINTS = 400
"""Points in a line; longer series are averaged over equal stretches."""

MAX_BARS = 80
"""Bars in a stack, likewise."""

STYLE = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "figure.facecolor": LIGHT["ground"],
    "axes.facecolor": LIGHT["ground"],
    "savefig.facecolor": LIGHT["ground"],
    "axes.edgecolor": LIGHT["grey"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}


def themed(svg: str, *, name: str, title: str) -> str:
    """The `<svg>` element with ids unique in the page and colours as CSS variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#|url\(#', lambda found: f"{found[0]}{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", svg)
    for variable, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{variable})")
    label = f'<svg role="img" aria-label="{title}" '
    return re.sub(r' width="[^"]*pt"| height="[^"]*pt"', "", svg.replace("<svg ", label, 1))


# --- drawing helpers ----------------------------------------------------------------------------


def series(
    rows: Sequence[Row], x: str, *keys: str, keep_max: bool = False
) -> tuple[list[float], list[float]]:
    """The points of the rows that have both values, at most `MAX_POINTS`.

    `keep_max` thins them out by their maximum: an average would hide the maxima of an age.
    """
    points = [
        (at, y)
        for row in rows
        if (at := number(row, x)) is not None and (y := number(row, *keys)) is not None
    ]
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    if keep_max:
        return resampled(xs, MAX_POINTS), resampled(ys, MAX_POINTS, max)
    return resampled(xs, MAX_POINTS), resampled(ys, MAX_POINTS)


def draw_line(
    axes: Any, points: tuple[list[float], list[float]], colour: str, **style: Any
) -> float | None:
    """Draw a line (a dot when it has one point); return its last value."""
    xs, ys = points
    if not ys:
        return None
    marker = "o" if len(ys) == 1 else None
    axes.plot(xs, ys, color=LIGHT[colour], marker=marker, **style)
    return ys[-1]


def end_labels(axes: Any, labels: Sequence[tuple[float | None, str, str]]) -> None:
    """Name lines at their right end, `(last value, text, colour)`, without overlaps."""
    low, high = axes.get_ylim()
    gap = 0.085
    wanted = sorted(
        ((y - low) / (high - low), text, colour) for y, text, colour in labels if y is not None
    )
    heights: list[float] = []
    for height, _, _ in wanted:
        heights.append(max(height, heights[-1] + gap) if heights else max(0.02, height))
    overflow = max(0.0, (heights[-1] - 0.98) if heights else 0.0)
    for index in range(len(heights) - 1, -1, -1):  # push down from the top as far as needed
        top = heights[index + 1] - gap if index + 1 < len(heights) else heights[index] - overflow
        heights[index] = min(heights[index], top)
    for (_, text, colour), height in zip(wanted, heights, strict=True):
        axes.annotate(
            text,
            (1.015, height),
            xycoords="axes fraction",
            color=LIGHT[colour],
            va="center",
            fontsize=8.5,
            annotation_clip=False,
        )


def new_axes(figure: Any, x: str, y: str) -> Any:
    """The figure's only axes, with these labels and horizontal grid lines."""
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=False, axis="x")
    axes.margins(x=0.02)
    return axes


def from_zero(axes: Any) -> None:
    """Let the vertical axis start at 0; called after everything is drawn, since it ends the
    automatic choice of the range."""
    axes.set_ylim(0, max(axes.get_ylim()[1], 1e-9))


def whole_numbers(axis: Any) -> None:
    """Ticks at whole numbers only, and a range that holds at least one."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10], min_n_ticks=1))
    low, high = axis.get_view_interval()
    if high - low < 1:
        axis.axes.set(**{f"{axis.axis_name}lim": (low - 0.5, high + 0.5)})


def time_axis(axes: Any, data: RunData) -> float:
    """Label the time axis in s, min or h; return the divisor that goes with it."""
    length = data.seconds or 0.0
    unit, divisor = (
        ("h", 3600.0) if length > 2 * 3600 else ("min", 60.0) if length > 180 else ("s", 1.0)
    )
    axes.set_xlabel(f"time since start ({unit})")
    return divisor


def over_time(data: RunData, divisor: float, *keys: str) -> tuple[list[float], list[float]]:
    """A value of the interval rows over the time axis."""
    xs, ys = series(data.intervals, "time", *keys)
    return [x / divisor for x in xs], ys


def rolling(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the `window - 1` before it (fewer at the start)."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def draw_stack(axes: Any, xs: list[float], parts: Sequence[tuple[str, list[float], str]]) -> None:
    """Stacked bars at `xs`, of `(label, heights, colour)`; the legend stands beside."""
    spacing = (xs[-1] - xs[0]) / (len(xs) - 1) if len(xs) > 1 else 1.0
    width = spacing * (0.9 if len(xs) <= 30 else 1.0)
    base = [0.0] * len(xs)
    for label, ys, colour in parts:
        axes.bar(xs, ys, bottom=base, width=width, color=LIGHT[colour], label=label)
        base = [low + y for low, y in zip(base, ys, strict=True)]
    from_zero(axes)
    side_legend(axes)


def side_legend(axes: Any) -> None:
    """A legend to the right of the axes, the topmost of a stack first."""
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        reverse=True,
        handlelength=0.9,
        handleheight=0.9,
        fontsize=8.5,
    )


def filled(rows: Sequence[Row], *keys: str) -> list[float]:
    """One value per row, 0 where it is missing, at most `MAX_BARS`."""
    return resampled([number(row, *keys) or 0.0 for row in rows], MAX_BARS)
