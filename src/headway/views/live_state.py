"""The latest rows of a run and short histories: everything that the terminal shows.

Memory is bounded however long a run is.
"""

from collections import deque
from dataclasses import dataclass, field

from headway.views.values import Row, clock, integer, mean, number, value

RECENT_STEPS = 20
"""Steps over which the time per step, and so the time left, is averaged."""


class History:
    """A series of any length in at most `size` points.

    When it is full, neighbours are averaged in pairs, so that it always spans the whole run.
    """

    def __init__(self, size: int = 256) -> None:
        self._size = size
        self._points: list[float] = []
        self._stride = 1
        self._sum = 0.0
        self._num_pending = 0

    def add(self, point: float | None) -> None:
        """Append one value; None is passed over."""
        if point is None:
            return
        self._sum += point
        self._num_pending += 1
        if self._num_pending < self._stride:
            return
        self._points.append(self._sum / self._num_pending)
        self._sum, self._num_pending = 0.0, 0
        if len(self._points) >= self._size:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(first + second) / 2 for first, second in pairs]
            self._stride *= 2

    def points(self) -> list[float]:
        """The series, oldest first; the last point may stand for fewer values than the others."""
        pending = [self._sum / self._num_pending] if self._num_pending else []
        return self._points + pending


@dataclass(slots=True)
class LiveState:
    """What was last heard of a run. `update` is cheap; everything derived is a property."""

    run: Row = field(default_factory=dict)
    interval: Row = field(default_factory=dict)
    step: Row = field(default_factory=dict)
    time: float = 0.0
    """Of the newest row, in seconds since the run started."""
    rewards: History = field(default_factory=History)
    tokens_per_second: History = field(default_factory=History)
    evals: dict[str, History] = field(default_factory=dict)
    last_evals: dict[str, Row] = field(default_factory=dict)
    recent_rewards: deque[float | None] = field(default_factory=lambda: deque(maxlen=10))
    recent_step_seconds: deque[float | None] = field(
        default_factory=lambda: deque(maxlen=RECENT_STEPS)
    )
    events: deque[Row] = field(default_factory=lambda: deque(maxlen=8))

    def update(self, row: Row) -> None:
        """Take one row; kinds that it does not know are passed over."""
        self.time = max(self.time, number(row, "time") or 0.0)
        match value(row, "kind"):
            case "run":
                self.run = row
            case "interval":
                self.interval = row
                self.tokens_per_second.add(number(row, "tokens_per_second"))
            case "step":
                self.step = row
                self.rewards.add(number(row, "reward_mean"))
                self.recent_rewards.append(number(row, "reward_mean"))
                self.recent_step_seconds.append(number(row, "step_seconds"))
            case "eval":
                env = str(value(row, "env"))
                self.evals.setdefault(env, History(64)).add(number(row, "reward_mean"))
                self.last_evals[env] = row
            case "event":
                self.events.append(row)

    @property
    def num_steps(self) -> int:
        """Batches trained since version 0."""
        last = integer(self.step, "step")
        return last + 1 if last is not None else integer(self.interval, "version") or 0

    @property
    def target(self) -> int | None:
        """Step target."""
        return integer(self.run, "steps")

    @property
    def step_seconds(self) -> float | None:
        """Seconds between versions, over the last steps."""
        return mean(self.recent_step_seconds)

    @property
    def seconds_left(self) -> float | None:
        """Until the step target, at the pace of the last steps; None before the first."""
        if self.target is None or self.step_seconds is None:
            return None
        return max(0, self.target - self.num_steps) * self.step_seconds

    @property
    def age(self) -> Row:
        """Ages of everything trained so far; of the last batch when there is no interval row."""
        for row in (self.interval, self.step):
            age = value(row, "age")
            if number(age, "max") is not None:
                return age  # type: ignore[no-any-return]
        return {}

    @property
    def idle(self) -> Row:
        """Idle shares so far."""
        idle = value(self.interval, "idle")
        return idle if isinstance(idle, dict) else {}


def event_line(event: Row) -> str:
    """An event in one line: time, level when it is not `info`, text."""
    level = str(value(event, "level") or "info")
    label = "" if level == "info" else f"{level}: "
    return f"{clock(number(event, 'time')):>7}  {label}{value(event, 'text') or ''}"
