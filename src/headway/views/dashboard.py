"""The live picture of a run, drawn from a `LiveState`: a pure function of state and size.

Every section keeps its place and its number of lines while the run goes on, so that nothing jumps.
"""

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.views.live_state import LiveState, event_line
from headway.views.values import (
    UNKNOWN,
    Row,
    clock,
    count,
    decimal,
    integer,
    mean,
    number,
    seconds,
    section,
    share,
    sparkline,
    value,
)

LABEL_WIDTH = 11
PARTS = ("feed", "submission", "fetch", "ship", "watcher", "trainer")
MAX_EVALS = 3
MAX_ENGINES = 4
MAX_EVENTS = 4

Line = tuple[str, Text]
"""A label, and what stands beside it."""


def draw(state: LiveState, *, width: int, height: int) -> RenderableType:
    """The picture for a terminal of this size in characters.

    When the height does not suffice, whole sections are left out, the least needed first.
    """
    sections = [
        _progress_lines(state, width),
        _learning_lines(state, width),
        _flow_lines(state, width),
        _wait_lines(state),
        _engine_lines(state, width),
        _event_lines(state),
    ]
    header = 4  # title, rule, progress bar, and the cursor's own line
    while len(sections) > 1 and header + sum(len(s) + 1 for s in sections if s) > height:
        sections.pop()
    parts: list[RenderableType] = [_title(state.run), _progress_bar(state, width)]
    for lines in sections:
        if lines:
            parts += [Text(""), _grid(lines)]
    return Group(*parts)


def _grid(lines: list[Line]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
    grid.add_column(width=LABEL_WIDTH, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for label, text in lines:
        grid.add_row(Text(f" {label}", style="dim"), text)
    return grid


def _title(run: Row) -> Text:
    title = Text(" headway", style="bold", no_wrap=True, overflow="ellipsis")
    parts = [str(value(run, "run_dir") or "")]
    if (size := integer(run, "batch_size")) is not None:
        group_size = integer(run, "group_size") or 1
        parts.append(f"B = {size}" + (f" groups of {group_size}" if group_size > 1 else ""))
    if (seed := integer(run, "seed")) is not None:
        parts.append(f"seed {seed}")
    if value(run, "simulated"):
        parts.append("simulated time")
    title.append("  " + "  ·  ".join(part for part in parts if part), style="not bold dim")
    return title


def _progress_bar(state: LiveState, width: int) -> Text:
    target = state.target or 0
    done = min(1.0, state.num_steps / target) if target else 0.0
    suffix = f" {100 * done:3.0f} %"
    length = max(10, width - len(suffix) - 2)
    full = round(done * length)
    bar = Text(" ", no_wrap=True)
    bar.append("━" * full, style="cyan").append("━" * (length - full), style="bright_black")
    return bar.append(suffix)


def _progress_lines(state: LiveState, width: int) -> list[Line]:
    target = f" of {state.target:,}" if state.target else ""
    text = _cells(
        (f"{state.num_steps:,}{target}", 16),
        (f"elapsed {clock(state.time)}", 18),
        (f"left {clock(state.seconds_left)}", 15),
        (f"{seconds(state.step_seconds)} a step", 0),
    )
    return [("step", text)]


def _learning_lines(state: LiveState, width: int) -> list[Line]:
    plot = max(8, min(60, width - 48))
    recent = mean(state.recent_rewards)
    reward = _cells(
        (decimal(number(state.step, "reward_mean")), 8),
        (sparkline(state.rewards.points(), plot), plot + 2),
        (f"last ten {decimal(recent)}" if recent is not None else "", 0),
    )
    reward.stylize("cyan", 8, 8 + plot)
    lines = [("reward", reward)]
    for env in list(state.last_evals)[:MAX_EVALS]:
        row = state.last_evals[env]
        text = _cells(
            (decimal(number(row, "reward_mean")), 8),
            (sparkline(state.evals[env].points(), plot), plot + 2),
            (f"version {count(number(row, 'version'))}, {env}", 0),
        )
        text.stylize("cyan", 8, 8 + plot)
        lines.append(("eval", text))
    if not state.last_evals:
        running = integer(state.interval, "eval_running")
        lines.append(("eval", Text(f"{running} running" if running else UNKNOWN)))
    lines.append(("age", _age(state)))
    return lines


def _age(state: LiveState) -> Text:
    age = state.age
    configured = integer(state.run, "configured")
    guaranteed = integer(state.run, "guaranteed")
    oldest = integer(age, "max")
    text = Text()
    style = ""
    if oldest is not None and configured is not None and oldest > configured:
        style = "yellow" if guaranteed is None else "bold red"
    text.append(f"{'max ' + count(oldest):<8}", style=style)
    text.append(f"p99 {count(number(age, 'p99')):<5}mean {decimal(number(age, 'mean'), 2):<7}")
    text.append(f"S = {count(configured)}, ")
    text.append("no bound guaranteed" if guaranteed is None else f"guaranteed {guaranteed}")
    return text


def _flow_lines(state: LiveState, width: int) -> list[Line]:
    interval = state.interval
    running, limit = integer(interval, "num_running"), integer(state.run, "max_concurrent")
    capacity, evals = integer(interval, "capacity"), integer(interval, "eval_running")
    length = max(8, min(60, width - 48))
    flight = Text(f"{count(running):<8}")
    full = round(length * min(1.0, (running or 0) / limit)) if limit else 0
    flight.append("━" * full, style="cyan").append("━" * (length - full), style="bright_black")
    notes = [f"of {limit:,}" if limit else "", f"gate +{capacity:,}" if capacity else ""]
    notes.append(f"eval {evals:,}" if evals else "")
    flight.append("  " + ", ".join(note for note in notes if note))
    batch_size = integer(state.run, "batch_size")
    buffered = count(number(interval, "num_buffered")) + (f"/{batch_size}" if batch_size else "")
    queues = Text()
    for index, (name, shown) in enumerate(
        (
            ("prompts", count(number(interval, "in_queue"))),
            ("finished", count(number(interval, "out_queue"))),
            ("buffered", buffered),
            ("parked", count(number(interval, "batches_waiting"))),
            ("shipped", count(number(interval, "batches_shipped"))),
        )
    ):
        queues.append(" > " if index else "", style="dim")
        queues.append(f"{name} ", style="dim").append(shown)
    return [("in flight", flight), ("queues", queues)]


def _engine_lines(state: LiveState, width: int) -> list[Line]:
    plot = max(8, min(60, width - 48))
    interval = state.interval
    speed = _cells(
        (f"{count(number(interval, 'tokens_per_second'))}/s", 8),
        (sparkline(state.tokens_per_second.points(), plot), plot + 2),
        (f"{count(number(interval, 'tokens_generated'))} so far", 0),
    )
    speed.stylize("cyan", 8, 8 + plot)
    idle = f"trainer {share(number(state.idle, 'trainer'))}, " + (
        f"engines {share(number(state.idle, 'engine'))}"
    )
    lines = [("tokens", speed), ("idle", Text(idle))]
    engines = section(interval, "engines")
    for name in list(engines)[:MAX_ENGINES]:
        text = _cells(
            (f"{count(number(engines, name, 'num_running'))} running", 13),
            (f"{count(number(engines, name, 'num_waiting'))} waiting", 13),
            (f"{count(number(engines, name, 'tokens_per_second'))} tokens/s", 0),
        )
        lines.append((str(name), text))
    if len(engines) > MAX_ENGINES:
        lines.append(("", Text(f"and {len(engines) - MAX_ENGINES} more engines", style="dim")))
    return lines


def _wait_lines(state: LiveState) -> list[Line]:
    waits = section(state.interval, "waiting_for")
    if not waits:
        return []
    names = [part for part in PARTS if part in waits] + [p for p in waits if p not in PARTS]
    lines = []
    for name in names:
        what = value(waits, name)
        text = Text("busy", style="cyan") if what is None else Text(f"waits for {what}")
        lines.append((str(name), text))
    return lines


def _event_lines(state: LiveState) -> list[Line]:
    styles = {"warning": "yellow", "error": "red"}
    lines = []
    for index, event in enumerate(list(state.events)[-MAX_EVENTS:]):
        style = styles.get(str(value(event, "level")), "")
        lines.append(("" if index else "events", Text(event_line(event).strip(), style=style)))
    return lines


def _cells(*cells: tuple[str, int]) -> Text:
    """Texts one after the other, each padded to its width."""
    pad: Callable[[str, int], str] = str.ljust
    return Text("".join(pad(text, width) for text, width in cells))
