"""Processor sharing, exactly: many requests share an engine, each gets its part of the speed.

All running requests progress alike, so one clock of work serves them all: it runs at the speed of a
single request, a request that begins at work `w` ends at `w + its work`, and the next one to end is
the least of a heap. An arrival, an end or a change of speed costs O(log n).
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable

from headway.sim.workload import Turn

Speed = Callable[[int], float]
"""Work per second of each running request, by how many run."""


class Job:
    """A request on an engine; `begun_at` is the work clock when it began to run, None before."""

    __slots__ = ("asked_at_version", "begun_at", "ended", "is_over", "turn")

    def __init__(self, turn: Turn, version: int) -> None:
        self.turn = turn
        self.asked_at_version = version
        self.begun_at: float | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False


class WorkClock:
    """Runs jobs: at most `slots` at the same time, the others wait, first in first out.

    Args:
        speed: of one job; must be above 0.
        slots: None: no limit.
    """

    def __init__(self, *, speed: Speed, slots: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._speed = speed
        self._slots = math.inf if slots is None else slots
        self._waiting: deque[Job] = deque()
        self._ends: list[tuple[float, int, Job]] = []
        self._sequence = 0
        self._num_running = 0
        self._num_cancelled_waiting = 0
        self._is_held = False
        self._is_frozen = False
        self._on_idle: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Work is `_work + (now - _since) * _rate`; anchored anew only where the rate changes, so
        # that rounding does not pile up.
        self._work = 0.0
        self._since = self._loop.time()
        self._rate = speed(1)

    @property
    def num_running(self) -> int:
        """Jobs in a slot."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for a slot."""
        return len(self._waiting) - self._num_cancelled_waiting

    @property
    def rate(self) -> float:
        """Work per second of each running job, while it is not frozen."""
        return self._rate

    @property
    def work(self) -> float:
        """The clock."""
        if self._is_frozen:
            return self._work
        return self._work + (self._loop.time() - self._since) * self._rate

    async def run(self, job: Job) -> None:
        """Until the job's work is done. May be cancelled, which frees its slot."""
        self._waiting.append(job)
        self._fill()
        try:
            await job.ended
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    def freeze(self) -> None:
        """Nothing progresses."""
        self._anchor()
        self._is_frozen = True
        self._set_timer()

    def thaw(self) -> None:
        """Go on."""
        if not self._is_frozen:
            return
        self._since = self._loop.time()
        self._is_frozen = False
        self._set_timer()

    def hold(self) -> None:
        """Start no job that waits; running ones go on."""
        self._is_held = True

    def release(self) -> None:
        """Start waiting jobs again."""
        self._is_held = False
        self._fill()

    async def idle(self) -> None:
        """Until no job runs; one caller at a time."""
        if self._num_running:
            self._on_idle = self._loop.create_future()
            try:
                await self._on_idle
            finally:
                self._on_idle = None

    def delay(self, work: float) -> None:
        """Every job that has begun has this much more to do; one that the freeze kept from its
        first token has not."""
        now = self.work
        self._ends = [
            (end + work if job.begun_at is not None and job.begun_at < now else end, number, job)
            for end, number, job in self._ends
        ]
        heapq.heapify(self._ends)

    def _anchor(self) -> None:
        """Fix the clock's reading, because its rate is about to change."""
        self._work = self.work
        self._since = self._loop.time()

    def _fill(self) -> None:
        """Start waiting jobs in free slots; speed and timer are what is right afterwards."""
        while self._waiting and self._num_running < self._slots and not self._is_held:
            job = self._waiting.popleft()
            if job.is_over:
                self._num_cancelled_waiting -= 1
                continue
            job.begun_at = self.work
            self._num_running += 1
            self._sequence += 1
            end = math.inf if job.turn.hangs else job.begun_at + job.turn.work
            heapq.heappush(self._ends, (end, self._sequence, job))
            self._adjust()
        self._set_timer()

    def _adjust(self) -> None:
        """The number of running jobs changed."""
        if self._num_running:
            rate = self._speed(self._num_running)
            if rate != self._rate:
                self._anchor()
                self._rate = rate
        elif self._on_idle is not None and not self._on_idle.done():
            self._on_idle.set_result(None)

    def _abandon(self, job: Job) -> None:
        if job.is_over:
            return  # it ended in the same instant
        job.is_over = True
        if job.begun_at is None:
            self._num_cancelled_waiting += 1
            return
        self._num_running -= 1
        self._adjust()
        self._fill()

    def _set_timer(self) -> None:
        """Wake when the first running job ends. A timer that is too early is left to find out,
        since most changes (an arrival, a slower engine) only put the end off."""
        while self._ends and self._ends[0][2].is_over:
            heapq.heappop(self._ends)
        if self._is_frozen or not self._ends or self._ends[0][0] == math.inf:
            return
        at = self._loop.time() + (self._ends[0][0] - self.work) / self._rate
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if self._is_frozen:
            return  # thaw sets the timer again
        # A nanosecond, or what is lost in rounding when the clock is far on.
        slack = 1e-9 + 4 * math.ulp(self._loop.time())
        due = self.work + slack * self._rate
        ended = False
        while self._ends and (self._ends[0][0] <= due or self._ends[0][2].is_over):
            _, _, job = heapq.heappop(self._ends)
            if job.is_over:
                continue
            job.is_over = ended = True
            self._num_running -= 1
            if not job.ended.done():  # cancelled in this very instant
                job.ended.set_result(None)
        if ended:
            self._adjust()
            self._fill()
        else:
            self._set_timer()
