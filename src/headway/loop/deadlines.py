"""Deadlines of many rollouts with one timer.

All rollouts of a run have the same limit, so they expire in the order in which they started. A
timer each (`asyncio.timeout`) costs about 10 us per rollout and a heap as large as the number in
flight; an ordered dict and one timer for the oldest cost about 1 us.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Cancels tasks that have been inside `limit()` for longer than `seconds`, and knows who is.

    Example:
        with deadlines.limit(rollout):      # raises TimeoutError
            await something()
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._open: OrderedDict[_Limit[T], float] = OrderedDict()
        self._overdue: dict[_Limit[T], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def limit(self, what: T) -> "_Limit[T]":
        """A context manager for the current task, which does `what`."""
        return _Limit(self, what)

    @property
    def num_running(self) -> int:
        """How many are inside."""
        return len(self._open) + len(self._overdue)

    def running(self) -> Iterator[tuple[T, float]]:
        """What is inside, and since which instant; the oldest first."""
        yield from self.overdue()
        for limit, expires_at in self._open.items():
            yield limit.what, expires_at - self.seconds

    def overdue(self) -> Iterator[tuple[T, float]]:
        """What was cancelled and does not end, and since when it has been inside."""
        for limit, expires_at in self._overdue.items():
            yield limit.what, expires_at - self.seconds

    def opened(self, limit: "_Limit[T]") -> None:
        """The clock of `limit` starts."""
        expires_at = self._loop.time() + self.seconds
        self._open[limit] = expires_at
        if self._timer is None:
            self._timer = self._loop.call_at(expires_at, self._expire)

    def closed(self, limit: "_Limit[T]") -> None:
        """The clock of `limit` stops."""
        if self._open.pop(limit, None) is None:
            self._overdue.pop(limit, None)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._open:
            limit, expires_at = next(iter(self._open.items()))
            if expires_at > now:
                self._timer = self._loop.call_at(expires_at, self._expire)
                return
            del self._open[limit]
            self._overdue[limit] = expires_at
            limit.expire()


class _Limit(Generic[T]):
    __slots__ = ("_cancelling", "_deadlines", "_expired", "_task", "what")

    def __init__(self, deadlines: Deadlines[T], what: T) -> None:
        self.what = what
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
