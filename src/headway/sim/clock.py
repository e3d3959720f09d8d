"""An event loop with a virtual clock: it runs as fast as the CPU allows and is deterministic."""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits and no timer is left: a real run would hang for ever."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time()`, `asyncio.sleep` and timeouts run in virtual seconds; sockets, threads and
    processes do not work in here.

    Timers of the same instant fire in the order in which they were set. One turn of the loop is
    asyncio's own without what it does for sockets: a simulated rollout takes three turns, and a
    third of its cost would be asking a selector that can have no news.

    Example:
        >>> run_virtual(asyncio.sleep(3600, "an hour later"))
        'an hour later'
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._sequence = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        super().__init__()
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As in any loop, but first set is first called among equals."""
        self._sequence += 1
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._sequence, timer))
        return timer

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As in any loop, without what it checks in debug mode; four times per rollout."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not timers:
                raise Deadlock("every task waits and no timer is set")
            self._jump_to(timers[0][0])
        end = self._now + self._clock_resolution
        while timers and timers[0][0] < end:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _jump_to(self, when: float) -> None:
        self._now = max(self._now, when)
        # A timer fires when it lies before now + resolution: after four months of virtual time a
        # fixed nanosecond is lost in rounding, no timer ever fires, and the loop spins for ever.
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._now))


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time. Raises Deadlock instead of hanging."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
