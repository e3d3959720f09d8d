"""A plan for people: a ranked table, the recommendation as a block to paste, and a Pareto plot."""

from collections.abc import Sequence
from io import BytesIO
from itertools import chain, count
from pathlib import Path
from typing import Any, Self

import yaml
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.config import Config
from headway.sim.grid import presets_of
from headway.sim.plan import Plan, Progress, Round
from headway.sim.predict import Prediction, Setting
from headway.views.plot_kit import LIGHT, STYLE, new_axes
from headway.views.values import UNKNOWN, decimal, seconds, share

PROGRESS_SECONDS = 5.0
"""Between two lines of progress where no line can be written over."""


class PlanProgress:
    """A line that says how far a plan is; a context manager that calls can be made to.

    On a terminal one line changes; elsewhere a line is added from time to time.

    Args:
        console: None shows nothing.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        is_terminal = console is not None and console.is_terminal
        self._status = console.status("planning") if console and is_terminal else None
        self._told_at = 0.0
        self._round: Round | None = None

    def __call__(self, progress: Progress) -> None:
        """Show it."""
        if self._console is None:
            return
        text = (
            f"{progress.round}: {progress.done} of {progress.total} settings, "
            f"{progress.seconds:.0f} s"
        )
        if self._status is not None:
            self._status.update(text)
            return
        is_new = progress.round is not self._round
        if is_new or progress.seconds - self._told_at >= PROGRESS_SECONDS:
            self._round, self._told_at = progress.round, progress.seconds
            self._console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


MAX_ROWS = 15
"""Settings shown, presets aside; `--json` has all of them."""

PLOT_KINDS = (".png", ".svg")
"""A plot is written as both; a name may end in either."""


def written_config(plan: Plan, own: Config, name: str) -> Config:
    """A configuration that can be run: the one planned on, with the recommendation and a run
    directory that does not exist yet.

    Args:
        own: the configuration of the run or file; the fitted workload is added to it, and its
            filters stay what they are.
        name: of the file that it is for; the run directory is named for it.

    Raises:
        ConfigError: the recommendation contradicts it.
    """
    config = own.model_copy(update={"simulate": plan.config.simulate})
    folder = f"{config.run.dir.rstrip('/')}-{Path(name).stem}"
    names = chain([folder], (f"{folder}-{number}" for number in count(2)))
    free = next(name for name in names if not Path(name).exists())
    run = config.run.model_copy(update={"dir": free})
    return plan.recommended.setting.apply(config.model_copy(update={"run": run}))


def block_text(setting: Setting) -> str:
    """The recommendation as YAML that can be pasted into a configuration."""
    return str(yaml.safe_dump(setting.block(), sort_keys=False))


def plan_text(plan: Plan) -> RenderableType:
    """Table, reasons and block."""
    return Group(
        _headline(plan),
        Text(),
        _table(plan),
        Text(),
        *[Text(f"- {reason}") for reason in plan.why],
        Text(),
        Text(
            "To use it, put this into the configuration (--write FILE writes all of it):",
            style="bold",
        ),
        Text(block_text(plan.recommended.setting)),
    )


def _headline(plan: Plan) -> Text:
    what = f"{plan.num_simulations} simulations in {plan.seconds:.0f} s"
    text = Text(f"{plan.source}: {len(plan.rows)} settings, {what}; objective {plan.objective}")
    if (fit := plan.fit) is not None:
        text.append(
            f"\nFitted to {fit.num_steps} steps of {seconds(fit.step_seconds)} at a mean head age "
            f"of {fit.head_age_mean:.2f}"
        )
        if (now := plan.current) is not None:
            text.append(
                f"; the simulation of that setting, once steady: {seconds(now.step_seconds)}, "
                f"{now.head_age_mean:.2f}"
            )
    return text


def _table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("")
    for name in ("S", "in flight"):
        table.add_column(name, justify="right")
    table.add_column("policy", no_wrap=True)
    for name in ("step", "age", "max", "bound", "lost", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    engines = plan.recommended.setting.engines
    shown = _shown(plan)
    for row in shown:
        setting = row.setting
        other = "" if setting.engines == engines else f" ({setting.engines} engines)"
        table.add_row(
            _mark(plan, row),
            str(setting.max_head_offpolicyness),
            str(setting.max_concurrent),
            setting.policy + other,
            seconds(row.step_seconds),
            decimal(row.head_age_mean, 2),
            str(row.age_max),
            UNKNOWN if row.guaranteed is None else str(row.guaranteed),
            _lost(row),
            share(row.trainer_idle),
            row.binding + (" ?" if row.is_extrapolated else ""),
            style="bold" if row is plan.recommended else "",
        )
    hidden = len(plan.rows) - len(shown)
    table.caption = (
        f"{len(shown)} of {len(plan.rows)} settings tried; {hidden} are hidden (--json has all)\n"
        "> recommended  = in force  * none is both faster and younger  ? extrapolated\n"
        "~ simulated only briefly: no more than a hint\n"
        "age: mean head age  max: oldest trained token  lost: samples dropped or tokens trimmed\n"
        "idle: the trainer"
    )
    table.caption_justify = "left"
    return table


def _lost(row: Prediction) -> str:
    lost = max(row.dropped_share, row.trimmed_share)
    return f"{100 * lost:.1f} %" if lost else "0"


def _shown(plan: Plan) -> Sequence[Prediction]:
    """The best rows, and always the front, the setting in force, the named policies there, and one
    with another number of engines."""
    engines = plan.recommended.setting.engines
    same = [row for row in plan.rows if row.setting.engines == engines]
    others = [row for row in plan.rows if row.setting.engines != engines]
    wanted = {*plan.front, *_named(plan)}
    best = same[: MAX_ROWS - 3]
    best += [row for row in same[MAX_ROWS - 3 :] if row.setting in wanted]
    return [*best, *others[:2]]


def _named(plan: Plan) -> list[Setting]:
    """The setting in force and the presets at its `S` and concurrency; where those were not
    simulated, at the recommended ones."""
    tried = {row.setting for row in plan.rows}
    now = [] if plan.current is None else [plan.current.setting]
    for base in (*now, plan.recommended.setting):
        presets = [one for one in presets_of(base) if one in tried]
        if presets:
            return [*now, *presets]
    return now


def _mark(plan: Plan, row: Prediction) -> str:
    marks = ">" if row is plan.recommended else ""
    marks += "=" if plan.current is not None and row.setting == plan.current.setting else ""
    marks += "*" if row.setting in plan.front else ""
    return marks + ("" if row.setting in plan.confirmed else "~")


def write_plot(plan: Plan, path: Path) -> Path:
    """Draw step time against mean head age, as PNG and as SVG beside it; return `path`.

    Args:
        path: ends in one of `PLOT_KINDS`.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib import rc_context  # slow to import, and only a plan that is drawn needs it
    from matplotlib.figure import Figure

    with rc_context({**STYLE, "svg.hashsalt": "plan"}):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        _draw(figure, plan)
        for kind in ("png", "svg"):
            drawn = BytesIO()
            metadata = {"Date": None, "Creator": None} if kind == "svg" else None
            figure.savefig(drawn, format=kind, dpi=160, metadata=metadata)
            path.with_suffix(f".{kind}").write_bytes(drawn.getvalue())
    return path


def _draw(figure: Any, plan: Plan) -> None:
    axes = new_axes(figure, "step time (s)", "mean head age (versions)")
    engines = plan.recommended.setting.engines
    same = [row for row in plan.rows if row.setting.engines == engines]
    others = [row for row in plan.rows if row.setting.engines != engines]
    for rows, colour, label in (
        ([row for row in same if row.setting in plan.confirmed], "grey", "settings tried"),
        (others, "teal", "with another number of engines"),
    ):
        if rows:
            xs, ys = [row.step_seconds for row in rows], [row.head_age_mean for row in rows]
            axes.scatter(xs, ys, s=22, color=LIGHT[colour], label=label, zorder=2)
    brief = [row for row in same if row.setting not in plan.confirmed]
    if brief:
        xs, ys = [row.step_seconds for row in brief], [row.head_age_mean for row in brief]
        axes.scatter(
            xs,
            ys,
            s=16,
            facecolors="none",
            edgecolors=LIGHT["grey"],
            label="only briefly",
            zorder=1,
        )
    front = sorted(
        (row for row in same if row.setting in plan.front), key=lambda row: row.step_seconds
    )
    axes.plot(
        [row.step_seconds for row in front],
        [row.head_age_mean for row in front],
        color=LIGHT["blue"],
        marker="o",
        markersize=5,
        label="none is both faster and younger",
        zorder=3,
    )
    now, best = plan.current, plan.recommended
    if now is not None and now.setting != best.setting:
        _point(axes, now, "in force", "orange", (8, 10))
    is_same = now is not None and now.setting == best.setting
    _point(axes, best, "recommended" + (", in force" if is_same else ""), "green", (8, -14))
    axes.margins(x=0.12, y=0.12)
    axes.legend(loc="upper right", fontsize=8.5)


def _point(axes: Any, row: Prediction, name: str, colour: str, offset: tuple[int, int]) -> None:
    setting = row.setting
    at = (row.step_seconds, row.head_age_mean)
    axes.scatter(*at, s=70, color=LIGHT[colour], zorder=4)
    axes.annotate(
        f"{name}: S = {setting.max_head_offpolicyness}, {setting.max_concurrent} in flight",
        at,
        xytext=offset,
        textcoords="offset points",
        color=LIGHT[colour],
        fontsize=8.5,
        zorder=5,
    )
