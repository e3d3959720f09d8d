"""The plots of the report, drawn with matplotlib without a display."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO, StringIO
from typing import Any

from headway.views.plot_kit import (
    LIGHT,
    SERIES,
    STYLE,
    draw_line,
    draw_stack,
    end_labels,
    filled,
    from_zero,
    new_axes,
    over_time,
    rolling,
    series,
    themed,
    time_axis,
    whole_numbers,
)
from headway.views.run_data import RunData
from headway.views.values import known, number, section

STAGES = {
    "assembled_seconds": "assemble",
    "parked_seconds": "parked",
    "held_seconds": "held",
    "write_seconds": "write",
    "train_seconds": "train",
    "publish_seconds": "publish",
    "sync_seconds": "sync",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot: `draw` puts it on an empty figure, and says False when there is nothing to show."""

    name: str
    title: str
    caption: str
    draw: Callable[[Any, RunData], bool]


@dataclass(frozen=True, slots=True)
class RenderedPlot:
    """A drawn plot; `svg` is an element for inclusion in a page that defines the palette."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def render(data: RunData) -> Iterator[RenderedPlot]:
    """Draw every plot for which the run recorded something, one after the other."""
    from matplotlib import rc_context  # slow to import, and only a report needs it
    from matplotlib.figure import Figure

    for plot in PLOTS:
        with rc_context({**STYLE, "svg.hashsalt": plot.name}):
            figure = Figure(figsize=(5.8, 3.1), layout="constrained")
            if not plot.draw(figure, data):
                continue
            png, svg = BytesIO(), StringIO()
            figure.savefig(png, format="png", dpi=160)
            figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        yield RenderedPlot(
            plot.name,
            plot.title,
            plot.caption,
            themed(svg.getvalue(), name=plot.name, title=plot.title),
            png.getvalue(),
        )


# --- plots --------------------------------------------------------------------------------------


def draw_reward(figure: Any, data: RunData) -> bool:
    """Mean reward per batch, its rolling mean, and evaluations at the version they measured."""
    xs, ys = series(data.steps, "step", "reward_mean")
    evals = data.eval_points()
    if not ys and not evals:
        return False
    axes = new_axes(figure, "step (batches trained)", "mean reward")
    labels: list[tuple[float | None, str, str]] = []
    smooth = len(ys) >= 10
    last = draw_line(axes, (xs, ys), "blue", alpha=0.35 if smooth else 1.0, linewidth=1.2)
    if smooth:
        window = max(5, len(ys) // 20)
        last = draw_line(axes, (xs, rolling(ys, window)), "blue", linewidth=2.2)
    labels.append((last, "training", "blue"))
    for (env, points), colour in zip(evals.items(), ("orange", "green", "purple"), strict=False):
        versions, rewards = [p[0] for p in points], [p[1] for p in points]
        axes.plot(versions, rewards, color=LIGHT[colour], marker="o", markersize=4.5, linewidth=1)
        labels.append((rewards[-1], f"eval {env}" if len(evals) > 1 else "eval", colour))
    whole_numbers(axes.xaxis)
    end_labels(axes, labels)
    return True


def draw_age(figure: Any, data: RunData) -> bool:
    """Largest, 99th percentile and mean age of each batch's tokens, against S."""
    if not known(number(row, "age", "max") for row in data.steps):
        return False
    axes = new_axes(figure, "step (batches trained)", "age (versions)")
    labels = []
    for key, colour, width, drawstyle in (
        ("max", "orange", 2.6, "steps-mid"),
        ("p99", "purple", 1.2, "steps-mid"),
        ("mean", "blue", 2.0, "default"),
    ):
        points = series(data.steps, "step", "age", key, keep_max=key != "mean")
        last = draw_line(axes, points, colour, linewidth=width, drawstyle=drawstyle)
        labels.append((last, key, colour))
    for bound, text, colour in (
        (data.configured_age, "S", "muted"),
        (data.guaranteed_age, "guaranteed", "green"),
    ):
        if bound is not None and (text == "S" or bound != data.configured_age):
            axes.axhline(bound, color=LIGHT[colour], linestyle=(0, (4, 3)), linewidth=1.2)
            labels.append((bound, f"{text} = {bound}", colour))
    axes.set_ylim(0, max(1.0, data.max_age or 0, data.configured_age or 0) * 1.12)
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    end_labels(axes, labels)
    return True


def draw_age_distribution(figure: Any, data: RunData) -> bool:
    """Share of trained tokens by age; of batches by their oldest token when that is all we know."""
    counts: Counter[int] = Counter()
    for row in data.steps:
        found = section(row, "age_counts")
        for name in found:
            if str(name).isdigit():
                counts[int(name)] += int(number(found, name) or 0)
    what = "trained tokens"
    if not counts:
        what = "batches, by their oldest token"
        counts.update(int(age) for age in known(number(row, "age", "max") for row in data.steps))
    total = counts.total()
    if total <= 0:
        return False
    axes = new_axes(figure, "age (versions)", f"share of {what} (%)")
    ages = list(range(max(max(counts), data.configured_age or 0) + 1))
    shares = [100 * counts[age] / total for age in ages]
    limit = data.configured_age
    colours = [LIGHT["orange" if limit is not None and age > limit else "blue"] for age in ages]
    axes.bar(ages, shares, width=0.8, color=colours)
    if len(ages) <= 12:
        for age, height in zip(ages, shares, strict=True):
            label = f"{height:.1f} %" if height else "0"
            axes.annotate(
                label,
                (age, height),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=LIGHT["muted"],
            )
    if limit is not None:
        axes.axvline(limit + 0.5, color=LIGHT["muted"], linestyle=(0, (4, 3)), linewidth=1.2)
        axes.annotate(
            f"S = {limit}",
            (limit + 0.5, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(-5, 0),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=8.5,
            color=LIGHT["muted"],
        )
    axes.set_ylim(0, max(shares) * 1.15)
    whole_numbers(axes.xaxis)
    return True


def draw_stages(figure: Any, data: RunData) -> bool:
    """Seconds in each stage of a batch's way, stacked, and the time between versions."""
    rows = [row for row in data.steps if number(row, "step") is not None]
    parts = [
        (label, filled(rows, key), colour)
        for (key, label), colour in zip(STAGES.items(), SERIES, strict=False)
        if known(number(row, key) for row in rows)
    ]
    if not parts:
        return False
    axes = new_axes(figure, "step (batches trained)", "seconds")
    xs = filled(rows, "step")
    between = filled(rows, "step_seconds")
    if any(between):
        style = {"color": LIGHT["ink"], "linewidth": 1.2, "label": "between versions"}
        axes.plot(xs, between, marker="o" if len(xs) == 1 else None, **style)
    draw_stack(axes, xs, parts)
    whole_numbers(axes.xaxis)
    return True


def draw_throughput(figure: Any, data: RunData) -> bool:
    """Tokens per second that the engines sampled."""
    axes = new_axes(figure, "", "tokens per second")
    divisor = time_axis(axes, data)
    xs, ys = over_time(data, divisor, "tokens_per_second")
    if not ys:
        return False
    smooth = len(ys) >= 20
    draw_line(axes, (xs, ys), "blue", alpha=0.35 if smooth else 1.0, linewidth=1.2)
    if smooth:
        draw_line(axes, (xs, rolling(ys, max(5, len(ys) // 20))), "blue", linewidth=2.2)
    middle = sum(ys) / len(ys)
    axes.axhline(middle, color=LIGHT["muted"], linestyle=(0, (4, 3)), linewidth=1.0)
    axes.set_ylim(0, max(max(ys), 1e-9) * 1.08)
    end_labels(axes, [(middle, f"mean {middle:,.0f}", "muted")])
    return True


def draw_queues(figure: Any, data: RunData) -> bool:
    """Samples in flight, finished and waiting, and buffered for the next batch."""
    axes = new_axes(figure, "", "samples")
    divisor = time_axis(axes, data)
    labels = [
        (draw_line(axes, over_time(data, divisor, key), colour, linewidth=width), text, colour)
        for key, text, colour, width in (
            ("eval_running", "eval", "purple", 0.7),
            ("num_running", "in flight", "blue", 1.6),
            ("num_buffered", "buffered", "orange", 1.2),
            ("out_queue", "finished", "green", 1.2),
        )
    ]
    if all(last is None for last, _, _ in labels):
        return False
    from_zero(axes)
    end_labels(axes, labels)
    return True


def draw_idle(figure: Any, data: RunData) -> bool:
    """Idle share since the start, of trainer and engines."""
    axes = new_axes(figure, "", "idle share so far (%)")
    divisor = time_axis(axes, data)
    labels = []
    for key, text, colour in (("trainer", "trainer", "orange"), ("engine", "engines", "blue")):
        xs, ys = over_time(data, divisor, "idle", key)
        last = draw_line(axes, (xs, [100 * y for y in ys]), colour, linewidth=1.8)
        labels.append((last, text if last is None else f"{text} {last:.0f} %", colour))
    if all(last is None for last, _, _ in labels):
        return False
    axes.set_ylim(0, 100)
    end_labels(axes, labels)
    return True


def draw_losses(figure: Any, data: RunData) -> bool:
    """Samples that were rejected, dropped or failed since the step before, by reason."""
    rows = [row for row in data.steps if number(row, "step") is not None]
    found = [
        (key, reason)
        for key in ("rejected", "dropped", "failed")
        for reason, total in data.reason_counts(key).most_common(4)
        if total
    ]
    if not found:
        return False
    colours = {
        "rejected": ("blue", "teal", "grey"),
        "dropped": ("purple",),
        "failed": ("red", "orange"),
    }
    used: Counter[str] = Counter()
    parts = []
    for key, reason in found:
        palette = colours[key]
        colour = palette[used[key] % len(palette)]
        used[key] += 1
        parts.append((f"{key}: {reason}", filled(rows, key, reason), colour))
    axes = new_axes(figure, "step (batches trained)", "samples per step")
    draw_stack(axes, filled(rows, "step"), parts)
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    return True


TRAINER_STATS = ("loss", "grad_norm", "clip_fraction", "kl", "behaviour_weight_mean", "entropy")


def draw_trainer(figure: Any, data: RunData) -> bool:
    """Up to four of the trainer's own numbers, one small plot each."""
    names = dict.fromkeys(
        str(name) for row in data.steps[-1:] + data.steps[:1] for name in section(row, "trainer")
    )
    order = [name for name in TRAINER_STATS if name in names]
    order += [name for name in names if name not in order]
    curves = {name: series(data.steps, "step", "trainer", name) for name in order}
    shown = [name for name in order if curves[name][1]][:4]
    if not shown:
        return False
    grid = figure.subplots(-(-len(shown) // 2), min(2, len(shown)), squeeze=False, sharex=True)
    panels = list(grid.flat)
    for axes, name in zip(panels, shown, strict=False):
        draw_line(axes, curves[name], "blue", linewidth=1.3)
        axes.set_title(name, fontsize=8.5, loc="left", color=LIGHT["ink"])
        axes.grid(visible=False, axis="x")
        axes.tick_params(labelsize=8)
        whole_numbers(axes.xaxis)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    figure.supxlabel("step (batches trained)", fontsize=9, color=LIGHT["muted"])
    return True


PLOTS = (
    Plot(
        "reward",
        "Reward",
        "Mean reward of each trained batch (thin) and its rolling mean; dots are evaluations on "
        "held-out tasks, at the version they measured.",
        draw_reward,
    ),
    Plot(
        "age",
        "Age of what was trained",
        "Versions between sampling and training, over the tokens of each batch.",
        draw_age,
    ),
    Plot(
        "age_distribution",
        "Age distribution",
        "All trained batches together; orange lies above S.",
        draw_age_distribution,
    ),
    Plot(
        "stages",
        "Stage times",
        "What one batch went through. Stages of different batches overlap, so the stack may be "
        "higher than the time between versions.",
        draw_stages,
    ),
    Plot("throughput", "Throughput", "Sampled tokens per second, all engines.", draw_throughput),
    Plot(
        "queues",
        "Queues",
        "Samples running, finished but not yet judged, and accepted for the next batch.",
        draw_queues,
    ),
    Plot("idle", "Idle shares", "Share of the time since the start spent waiting.", draw_idle),
    Plot(
        "losses",
        "Not trained",
        "Samples rejected by a filter, dropped for their age, or failed, by reason, since the "
        "step before.",
        draw_losses,
    ),
    Plot("trainer", "Trainer", "What the trainer reported of each update.", draw_trainer),
)
