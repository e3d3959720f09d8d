"""The stall watchdog: a part that makes no progress is named, with all that everybody waits for.

What a part owes is said in words that change whenever it makes progress: the next version, the next
record, the number of rollouts that are missing. Words that stay the same for longer than the part's
limit are a stall. So no part has to report, and nothing on the hot path is spent on this.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headway.core.ledger import Ledger
from headway.errors import StallError
from headway.loop.signal import WaitBoard

LOOKS = 10
"""Per limit: a stall is found after one tenth more than its limit, at the latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """What one part owes to the others, and how long it may owe the same.

    Attributes:
        part: its name, as a message has it.
        limit: the setting that says how long.
        seconds: how long; None: somebody else has the deadline.
        owes: in words; None: nothing is due.
    """

    part: str
    limit: str
    seconds: float | None
    owes: Callable[[], str | None]


@dataclass(slots=True)
class _Debt:
    duty: Duty
    what: str | None = None
    since: float = 0.0
    is_told: bool = False


class Watchdog:
    """Looks at every duty, and at the run as a whole, a few times within the shortest limit.

    Args:
        stall_seconds: nothing was `progress()` for this long, and no duty was due meanwhile.
        stops: raise StallError; else tell it, and tell when the part has moved again.
        describe: more of what the run is doing, for the message. Must end by itself.
        on_event: told with a level and a text. Synchronous.

    It also checks, at every look, that the ledger adds up.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        waits: WaitBoard,
        duties: Sequence[Duty],
        stall_seconds: float,
        stops: bool,
        describe: Callable[[], Awaitable[str]],
        on_event: Callable[[str, str], None],
    ) -> None:
        self._ledger = ledger
        self._waits = waits
        self._debts = [_Debt(duty) for duty in duties]
        self._stall_seconds = stall_seconds
        self._stops = stops
        self._describe = describe
        self._on_event = on_event
        self._progress_at = asyncio.get_running_loop().time()
        self._is_quiet = False
        limits = [duty.seconds for duty in duties if duty.seconds is not None]
        self._pause = min([stall_seconds, *limits]) / LOOKS

    def progress(self) -> None:
        """A sample finished, a batch was shipped, or a version is served."""
        self._progress_at = asyncio.get_running_loop().time()
        if self._is_quiet:
            self._is_quiet = False
            self._on_event("info", "the run moves again")

    async def run(self) -> None:
        """For ever, or until a StallError or InvariantError."""
        while True:
            await asyncio.sleep(self._pause)
            self._ledger.check()
            now = asyncio.get_running_loop().time()
            for debt in self._debts:
                if text := self._look(debt, now):
                    await self._stalled(text)
            await self._look_at_all(now)

    def _look(self, debt: _Debt, now: float) -> str | None:
        """Note what a part owes now; the stall in words when it has just become one."""
        duty, what = debt.duty, debt.duty.owes()
        if what is None or what != debt.what:
            was_told, debt.is_told = debt.is_told, False
            if was_told and not self._is_told(duty.part):
                quiet = now - debt.since
                self._on_event("info", f"{duty.part} moved again, after {quiet:.0f} s")
            debt.what, debt.since = what, now
            return None
        quiet = now - debt.since
        if duty.seconds is None or quiet < duty.seconds or debt.is_told:
            return None
        is_known = self._is_told(duty.part)
        debt.is_told = True
        if is_known:
            return None
        limit = f"{duty.limit} = {duty.seconds:g}"
        return f"{duty.part} made no progress for {quiet:.0f} s ({limit}): it owes {what}"

    def _is_told(self, part: str) -> bool:
        return any(one.is_told for one in self._debts if one.duty.part == part)

    async def _look_at_all(self, now: float) -> None:
        if any(debt.what is not None for debt in self._debts):
            self._progress_at = now  # somebody's own limit runs
        quiet = now - self._progress_at
        if quiet > self._stall_seconds and not self._is_quiet:
            self._is_quiet = True
            await self._stalled(
                f"nothing finished, was shipped or was published for {quiet:.0f} s "
                f"(run.stall_seconds = {self._stall_seconds:g})"
            )

    async def _stalled(self, text: str) -> None:
        others = "; ".join(
            f"{one.duty.part} owes {one.what}"
            for one in self._debts
            if one.what is not None and not one.is_told
        )
        parts = [text, self._waits.describe(), others, await self._describe()]
        message = ". ".join(part for part in parts if part)
        if self._stops:
            raise StallError(message)
        self._on_event("warning", message)
