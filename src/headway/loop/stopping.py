"""Ending a run before its step target: a signal, a deadline, and the window in which it drains."""

import asyncio
from collections.abc import Awaitable, Callable

from headway.loop.outcome import Outcome
from headway.loop.signal import Signal, WaitBoard

PREEMPTED = Outcome(exit_reason="preempted", exit_code=75)
"""Of a run that should be started again: EX_TEMPFAIL, which job scripts can test for."""


def interrupted(exit_code: int) -> Outcome:
    """Of a run that somebody stopped."""
    return Outcome(exit_reason="interrupted", exit_code=exit_code)


class Stopping:
    """Whether a run was asked to end early, and how.

    Args:
        window_seconds: what is in flight may take this long.
        waits: says what a drain that did not end waited for.
        on_event: told with a level and a text. Synchronous.
    """

    def __init__(
        self, *, window_seconds: float, waits: WaitBoard, on_event: Callable[[str, str], None]
    ) -> None:
        self._window_seconds = window_seconds
        self._waits = waits
        self._on_event = on_event
        self._window: asyncio.Timeout | None = None
        self._is_cut_off = False
        self.outcome: Outcome | None = None
        """How the run will have ended; None: nobody asked."""
        self.changed = Signal()

    def ask(self, outcome: Outcome) -> None:
        """End the run like this. The second time, whoever asks, the drain is cut off."""
        if self.outcome is None:
            self.outcome = outcome
            self.changed.notify()
        elif self._window is not None and not self._window.expired():
            self._is_cut_off = True
            self._window.reschedule(asyncio.get_running_loop().time())

    def watch_deadline(self, began_at: float, max_seconds: float | None) -> None:
        """Ask for a preempted end so early before `began_at + max_seconds`, in loop time, that the
        drain is over by then; unless somebody has asked before."""
        if max_seconds is None:
            return

        def due() -> None:
            if self.outcome is None:
                self._on_event(
                    "warning", f"the deadline is near (run.max_seconds = {max_seconds:g})"
                )
                self.ask(PREEMPTED)

        drain_at = began_at + max_seconds - self._window_seconds
        asyncio.get_running_loop().call_at(drain_at, due)

    async def drain(self, drained: Awaitable[None]) -> None:
        """Wait for `drained` as long as the window lasts."""
        window = self._window_seconds
        self._on_event("warning", f"stopping: what is in flight has {window:g} s to finish")
        try:
            async with asyncio.timeout(window) as self._window:
                await drained
        except TimeoutError:
            what = "was cut off by a second signal" if self._is_cut_off else "did not end in time"
            self._on_event("warning", f"the drain {what}: {self._waits.describe()}")
        finally:
            self._window = None
