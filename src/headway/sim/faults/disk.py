"""A disk that is slow, or takes no more bytes."""

import random
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from headway.sim.faults.schedule import Fault, FaultKind

_T = TypeVar("_T")
_MAX_SECONDS = 1.0
_LIMITS = (0, 0, 100, 4_096, 20_000, 40_000)
"""Size in bytes beyond which no file can grow while the disk is full."""


class Disk:
    """What every use of the disk passes through.

    A full disk is made by the operating system: for the time of the call, files may not grow beyond
    a few bytes. So the errors are those of the real calls, at the real places.

    Args:
        faults: of one life; those of the disk count.
        now: virtual seconds since its start.
        seed: of how long each use takes.
    """

    def __init__(self, faults: Sequence[Fault], now: Callable[[], float], seed: int) -> None:
        self._slow = [one for one in faults if one.kind is FaultKind.SLOW_DISK]
        self._full = [one for one in faults if one.kind is FaultKind.FULL_DISK]
        self._now = now
        self._random = random.Random(seed)
        self.fired: set[Fault] = set()

    def seconds(self, now: float) -> float:
        """How long a use of the disk takes that begins now."""
        for fault in self._slow:
            if fault.is_active(now):
                self.fired.add(fault)
                # On a grid, so that the disk is done in the same instant as other things.
                return self._random.choice((0.0, 0.25, 0.5, _MAX_SECONDS))
        return 0.0

    def call(self, func: Callable[..., _T], *args: Any) -> _T:
        """Run what uses the disk. Raises what it raises."""
        now = self._now()
        for fault in self._full:
            if fault.is_active(now):
                self.fired.add(fault)
                with _no_file_beyond(_LIMITS[fault.which % len(_LIMITS)]):
                    return func(*args)
        return func(*args)


@contextmanager
def _no_file_beyond(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
