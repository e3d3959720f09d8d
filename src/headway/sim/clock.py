"""An event loop with a virtual clock: it runs as fast as the CPU allows and is deterministic."""

import asyncio
import heapq
import math
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits and no timer is left: a real run would hang for ever."""


class _FifoTimer(asyncio.TimerHandle):
    """Timers of the same instant fire in the order in which they were set."""

    __slots__ = ("_sequence",)

    def __init__(self, sequence: int, when: float, *args: Any) -> None:
        super().__init__(when, *args)
        self._sequence = sequence

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _FifoTimer):
            return NotImplemented
        return (self._when, self._sequence) < (other._when, other._sequence)  # type: ignore[attr-defined]


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for the next timer, moves the clock to it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: VirtualTimeLoop | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert self.loop is not None
        if timeout is None:
            raise Deadlock("every task waits and no timer is set")
        if timeout > 0:
            self.loop.jump()
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time()`, `asyncio.sleep` and timeouts run in virtual seconds; sockets, threads and
    processes do not work in here.

    Example:
        >>> run_virtual(asyncio.sleep(3600, "an hour later"))
        'an hour later'
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._sequence = 0
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.loop = self
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def jump(self) -> None:
        """Move the clock to the next timer."""
        self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        # A timer fires when it lies before now + resolution: after four months of virtual time a
        # fixed nanosecond is lost in rounding, no timer ever fires, and the loop spins for ever.
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._now))

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As in any loop, but first set is first called among equals."""
        self._sequence += 1
        timer = _FifoTimer(self._sequence, when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time. Raises Deadlock instead of hanging."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
