"""Deadlines of many rollouts with one timer.

All rollouts of a run have the same limit, so they expire in the order in which they started. A
timer each (`asyncio.timeout`) costs about 10 us per rollout and a heap as large as the number in
flight; an ordered dict and one timer for the oldest cost about 1 us.
"""

import asyncio
from collections import OrderedDict
from types import TracebackType


class Deadlines:
    """Cancels tasks that have been inside `limit()` for longer than `seconds`.

    Example:
        with deadlines.limit():      # raises TimeoutError
            await something()
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._open: OrderedDict[_Limit, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def limit(self) -> "_Limit":
        """A context manager for the current task."""
        return _Limit(self)

    def opened(self, limit: "_Limit") -> None:
        """The clock of `limit` starts."""
        expires_at = self._loop.time() + self.seconds
        self._open[limit] = expires_at
        if self._timer is None:
            self._timer = self._loop.call_at(expires_at, self._expire)

    def closed(self, limit: "_Limit") -> None:
        """The clock of `limit` stops."""
        self._open.pop(limit, None)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._open:
            limit, expires_at = next(iter(self._open.items()))
            if expires_at > now:
                self._timer = self._loop.call_at(expires_at, self._expire)
                return
            del self._open[limit]
            limit.expire()


class _Limit:
    __slots__ = ("_cancelling", "_deadlines", "_expired", "_task")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a task")
        self._task = task
        self._cancelling = task.cancelling()
        self._deadlines.opened(self)

    def expire(self) -> None:
        self._expired = True
        self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._deadlines.closed(self)
        if not self._expired:
            return
        # As asyncio.timeout does: turn our own cancellation into TimeoutError, pass on others'.
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
