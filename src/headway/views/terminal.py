"""The terminal view: a live picture, or plain lines where there is no terminal to draw on."""

import copy
import os
from threading import Lock
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from headway.views.dashboard import draw
from headway.views.live_state import LiveState, event_line
from headway.views.values import (
    Row,
    clock,
    count,
    decimal,
    integer,
    number,
    seconds,
    section,
    share,
    value,
)

REFRESH_PER_SECOND = 4
PLAIN_LINES_MAX = 100
"""Step lines of a simulated run, whose seconds say nothing about how fast lines come."""


class TerminalView:
    """A metrics sink that shows the run in the terminal; use it as a context manager.

    On a terminal it draws a live picture, from rich's refresh thread, so that `emit` only takes
    note of a row (a few microseconds). Elsewhere (a file, a pipe, CI) it prints one plain ASCII
    line per step, at most one in `plain_seconds` of the run, and every evaluation and event.

    Args:
        console: where to draw; standard output when None. Give one on standard error when
            standard output is for a script.
        live: draw, or print lines; None decides by the console and the variable `CI`.
        plain_seconds: least time between two step lines, in seconds of the run.
        status_seconds: a plain line says what the run waits for after this long without another.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        live: bool | None = None,
        plain_seconds: float = 2.0,
        status_seconds: float = 30.0,
    ) -> None:
        self.console = console or Console()
        self.is_live = _can_draw(self.console) if live is None else live
        self._state = LiveState()
        self._lock = Lock()
        self._live: Live | None = None
        self._plain = PlainLines(plain_seconds=plain_seconds, status_seconds=status_seconds)
        self._is_closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to draw. Called once, before the first row."""
        if self.is_live and self._live is None:
            self._live = Live(
                console=self.console,
                get_renderable=self._draw,
                refresh_per_second=REFRESH_PER_SECOND,
                transient=True,
                vertical_overflow="crop",
            )
            self._live.start()

    def stop(self) -> None:
        """Take the picture away and leave its last warnings and errors; twice does no harm."""
        if self._live is None:
            return
        live, self._live = self._live, None
        live.stop()
        for event in self._state.events:
            if value(event, "level") in ("warning", "error"):
                self.console.print(event_line(event), markup=False, highlight=False)

    def emit(self, row: Row) -> None:
        """Take one metric row. Called from the event loop; neither blocks on drawing nor raises."""
        with self._lock:
            self._state.update(row)
        if not self.is_live:
            for line in self._plain.lines(row, self._state):
                self._print(line)

    def _draw(self) -> RenderableType:
        """Called by the refresh thread."""
        with self._lock:
            state = copy.deepcopy(self._state)
        return draw(state, width=self.console.width, height=self.console.height)

    def _print(self, line: str) -> None:
        if self._is_closed:
            return
        try:
            self.console.file.write(line.encode("ascii", "replace").decode() + "\n")
            self.console.file.flush()
        except (OSError, ValueError):
            # The reader of a pipe has gone, or the file is closed: that must not end the run.
            self._is_closed = True


class PlainLines:
    """Turns rows into plain lines, few enough to read.

    Args:
        plain_seconds: least time between two step lines, in seconds of the run.
        status_seconds: a line says what the run waits for after this long without another one.
    """

    def __init__(self, *, plain_seconds: float, status_seconds: float) -> None:
        self._plain_seconds = plain_seconds
        self._status_seconds = status_seconds
        self._last_at = 0.0
        self._last_step_at: float | None = None

    def lines(self, row: Row, state: LiveState) -> list[str]:
        """What to print for this row; `state` has taken it already."""
        now = number(row, "time") or state.time
        lines: list[str] = []
        match value(row, "kind"):
            case "run":
                lines = [_run_line(row)]
            case "step" if self._is_due(row, state, now):
                self._last_step_at = now
                lines = [_step_line(row, state, now)]
            case "eval":
                lines = [_eval_line(row, now)]
            case "event":
                lines = [event_line(row)]
            case "interval" if now - self._last_at >= self._status_seconds:
                if not value(state.run, "simulated"):
                    lines = [_status_line(row, now)]
        if lines:
            self._last_at = now
        return lines

    def _is_due(self, row: Row, state: LiveState, now: float) -> bool:
        num_steps = state.num_steps
        if self._last_step_at is None or num_steps == state.target:
            return True
        if value(state.run, "simulated"):
            every = -(-(state.target or 0) // PLAIN_LINES_MAX)
            return every <= 1 or num_steps % every == 0
        return now - self._last_step_at >= self._plain_seconds


def _can_draw(console: Console) -> bool:
    """Whether a live picture makes sense: a terminal that can move its cursor and show blocks."""
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and not os.environ.get("CI")
        and console.encoding.lower().startswith("utf")
    )


def _run_line(row: Row) -> str:
    guaranteed = integer(row, "guaranteed")
    bound = "no bound guaranteed" if guaranteed is None else f"guaranteed {guaranteed}"
    return (
        f"headway: {value(row, 'run_dir') or 'run'}, {count(number(row, 'steps'))} steps of "
        f"B = {count(number(row, 'batch_size'))}, "
        f"S = {count(number(row, 'configured'))} ({bound}), "
        f"{count(number(row, 'max_concurrent'))} in flight, seed {count(number(row, 'seed'))}"
    )


def _step_line(row: Row, state: LiveState, now: float) -> str:
    target = f"/{state.target}" if state.target else ""
    age = section(row, "age")
    return (
        f"{clock(now):>7}  step {state.num_steps:>{len(target) - 1 if target else 1}}{target}"
        f"  reward {decimal(number(row, 'reward_mean'))}"
        f"  age max {count(number(age, 'max'))} p99 {count(number(age, 'p99'))}"
        f" mean {decimal(number(age, 'mean'), 2)}"
        f"  {seconds(state.step_seconds)} a step"
        f"  {count(number(state.interval, 'tokens_per_second'))} tokens/s"
        f"  idle trainer {share(number(state.idle, 'trainer'))}"
        f" engines {share(number(state.idle, 'engine'))}"
        f"  left {clock(state.seconds_left)}"
    )


def _eval_line(row: Row, now: float) -> str:
    return (
        f"{clock(now):>7}  eval {value(row, 'env')} at version {count(number(row, 'version'))}: "
        f"reward {decimal(number(row, 'reward_mean'))} "
        f"over {count(number(row, 'num_rollouts'))} rollouts"
    )


def _status_line(row: Row, now: float) -> str:
    waits = section(row, "waiting_for")
    parts = [f"{part} waits for {what}" for part, what in waits.items() if what is not None]
    running = count(number(row, "num_running"))
    return f"{clock(now):>7}  {running} in flight; " + ("; ".join(parts) or "all parts busy")
