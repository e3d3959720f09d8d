"""The plots of docs/bounds.md, from simulated runs of the reference workload.

    python -m benchmarks.plots [--steps 200] [--dir docs/plots]

`trilemma.png`: what each policy costs and how old it lets tokens become. `ages.png`: how old the
trained tokens are. `pacing.png`: mean age and step time by `S`, with and without pacing.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.policies import Measured, measure_all, of
from headway.views.plot_kit import LIGHT, STYLE, from_zero, new_axes, whole_numbers

COLOURS = {
    "admission only": "blue",
    "drop": "orange",
    "wait for the oldest": "purple",
    "recommended": "green",
}
"""The four corners, in the order in which the text has them."""

CORNER_AGES = (2, 4, 8)
PACED_AGES = (1, 2, 3, 4, 6, 8, 12, 16)
SHOWN_AGES = 24
"""Ages on the horizontal axis of `ages.png`; the last bin holds all that are older."""


def trilemma(figure: Any, rows: Sequence[Measured]) -> None:
    """Step time against the oldest age, both logarithmic; beside each dot, what was not trained."""
    axes = new_axes(figure, "oldest token trained (versions)", "seconds per step")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for name, colour in COLOURS.items():
        points = [row for row in rows if row.policy == name]
        xs = [row.token_max for row in points]
        ys = [row.step_seconds for row in points]
        axes.plot(xs, ys, color=LIGHT[colour], alpha=0.35, linewidth=1.2)
        axes.scatter(xs, ys, color=LIGHT[colour], s=34, label=name, zorder=3)
        for row in points:
            lost = _lost(row)
            is_below = name == "recommended" or (not lost and row.max_age == CORNER_AGES[-1])
            axes.annotate(
                lost or f"S = {row.max_age}",
                (row.token_max, row.step_seconds),
                xytext=(5, -10 if is_below else 4),
                textcoords="offset points",
                color=LIGHT[colour],
                fontsize=7.5,
            )
    axes.axhline(10.0, color=LIGHT["grey"], linewidth=0.8, linestyle=":")
    axes.margins(x=0.16, y=0.12)
    for axis, ticks in ((axes.xaxis, (2, 4, 8, 16, 32, 64, 128)), (axes.yaxis, (10, 20, 40, 80))):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(loc="upper right")


def _lost(row: Measured) -> str:
    if row.num_dropped:
        return f"{row.dropped_share:.0%} of samples"
    return f"{row.trimmed_share:.0%} of tokens" if row.trimmed_share else ""


def ages(figure: Any, rows: Sequence[Measured], max_age: int) -> None:
    """Share of the trained tokens by age, one policy below the other."""
    panels = figure.subplots(len(COLOURS), 1, sharex=True)
    for axes, (name, colour) in zip(panels, COLOURS.items(), strict=True):
        (row,) = of(rows, name, max_age)
        shares = _shares(row.token_ages)
        axes.bar(range(SHOWN_AGES + 1), shares, color=LIGHT[colour], width=0.85)
        axes.axvline(max_age + 0.5, color=LIGHT["red"], linewidth=1.0)
        text = f"{name}: oldest {row.token_max}"
        lost = _lost(row)
        axes.text(
            0.99,
            0.82,
            text + (f", {lost} not trained" if lost else ""),
            transform=axes.transAxes,
            ha="right",
            va="top",
            color=LIGHT[colour],
        )
        axes.grid(visible=False, axis="x")
        axes.set_yticks([0.0, 0.2, 0.4], ["0", "20 %", "40 %"])
        axes.set_ylim(0, 0.5)
    panels[0].text(max_age + 0.7, 0.52, f"S = {max_age}", color=LIGHT["red"], fontsize=8)
    ticks = range(0, SHOWN_AGES + 1, 4)
    labels = [str(age) if age < SHOWN_AGES else f"{age}+" for age in ticks]
    panels[-1].set_xticks(list(ticks), labels)
    panels[-1].set_xlabel("age of trained tokens (versions)")


def _shares(counts: Mapping[int, int]) -> list[float]:
    total = sum(counts.values())
    shares = [counts.get(age, 0) / total for age in range(SHOWN_AGES)]
    return [*shares, sum(count for age, count in counts.items() if age >= SHOWN_AGES) / total]


def pacing(figure: Any, rows: Sequence[Measured]) -> None:
    """Mean head age and step time by `S`."""
    left, right = figure.subplots(1, 2)
    for axes, field, label in (
        (left, "head_mean", "mean head age (versions)"),
        (right, "step_seconds", "seconds per step"),
    ):
        for name, colour, text in (
            ("trim, fill", "blue", "fill"),
            ("recommended", "green", "just_in_time"),
        ):
            points = [row for row in rows if row.policy == name]
            axes.plot(
                [row.max_age for row in points],
                [getattr(row, field) for row in points],
                color=LIGHT[colour],
                marker="o",
                markersize=3.5,
                label=f"pacing: {text}",
            )
        axes.set_xlabel("S (versions)")
        axes.set_ylabel(label)
        axes.grid(visible=False, axis="x")
        whole_numbers(axes.xaxis)
        from_zero(axes)
    left.legend(loc="upper left")


def main() -> None:
    """Run, draw, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dir", type=Path, default=Path("docs/plots"))
    args = parser.parse_args()
    corners = measure_all(COLOURS, ages=CORNER_AGES, steps=args.steps, seeds=[0])
    names = ("trim, fill", "recommended")
    paced = measure_all(names, ages=PACED_AGES, steps=args.steps, seeds=[0])
    args.dir.mkdir(parents=True, exist_ok=True)

    drawings: dict[str, tuple[float, Callable[[Any], None]]] = {
        "trilemma": (3.8, lambda figure: trilemma(figure, corners)),
        "ages": (4.6, lambda figure: ages(figure, corners, 4)),
        "pacing": (2.9, lambda figure: pacing(figure, paced)),
    }
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    for name, (height, draw) in drawings.items():
        path = args.dir / f"{name}.png"
        with rc_context(STYLE):
            figure = Figure(figsize=(6.4, height), layout="constrained")
            draw(figure)
            figure.savefig(path, dpi=110, metadata={"Software": None})
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
