"""Waiting for a condition without losing a wake-up, and saying what one waits for."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass


class Signal:
    """A wake-up that carries no data: the condition itself is what is waited for.

    Whoever changes the state that a predicate reads calls `notify()`, which is synchronous and
    never blocks; waiters re-check. A wake-up cannot be lost, because the predicate is tested
    before every wait and there is no `await` between the test and the wait.
    """

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Let every waiter test its condition again."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as `condition()` holds; its owner has the deadline."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter


@dataclass(slots=True)
class Wait:
    """One part waits for something since an instant of loop time."""

    _what: str | Callable[[], str]
    since: float

    @property
    def what(self) -> str:
        """In words; of a wait that changes its object, as of now."""
        return self._what if isinstance(self._what, str) else self._what()


class Waiting:
    """The context of one wait. A class, since the generator of a contextmanager costs twice as much
    and every rollout passes several."""

    __slots__ = ("_part", "_waits", "_what")

    def __init__(self, waits: dict[str, Wait], part: str, what: str | Callable[[], str]) -> None:
        self._waits = waits
        self._part = part
        self._what = what

    def __enter__(self) -> None:
        self._waits[self._part] = Wait(self._what, asyncio.get_running_loop().time())

    def __exit__(self, *error: object) -> None:
        del self._waits[self._part]


class WaitBoard:
    """Who waits for whom, right now: what the terminal shows and a stall names."""

    def __init__(self) -> None:
        self._waits: dict[str, Wait] = {}

    def waiting(self, part: str, what: str | Callable[[], str]) -> "Waiting":
        """Around an `await`: `part` waits for `what`."""
        return Waiting(self._waits, part, what)

    async def until(
        self,
        part: str,
        what: str | Callable[[], str],
        signal: Signal,
        condition: Callable[[], bool],
    ) -> None:
        """`signal.until(condition)`, on the board while it lasts; free when it holds already."""
        if not condition():
            with self.waiting(part, what):
                await signal.until(condition)

    def restart(self, part: str) -> None:
        """What `part` waited for came, and it waits for the next of its kind."""
        if (wait := self._waits.get(part)) is not None:
            wait.since = asyncio.get_running_loop().time()

    @property
    def current(self) -> Mapping[str, Wait]:
        """Waits by part; a part that is busy is absent."""
        return self._waits

    def describe(self) -> str:
        """All waits in one line, the longest first."""
        now = asyncio.get_running_loop().time()
        waits = sorted(self._waits.items(), key=lambda item: item[1].since)
        return "; ".join(f"{part} waits for {w.what} ({now - w.since:.1f} s)" for part, w in waits)
