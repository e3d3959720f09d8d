"""The journal of a run that is not to be resumed: it keeps nothing."""

import asyncio
from collections.abc import Callable

from headway.core.records import Record


class NoJournal:
    """A `ports.Journal` that is never full and has nothing to write."""

    def record(self, record: Record) -> None:
        """Forget it."""

    async def flush(self) -> None:
        """There is nothing."""

    async def run(self, on_full: Callable[[], None], on_room: Callable[[], None]) -> None:
        """Wait for ever: cancelled at the end of the run."""
        await asyncio.get_running_loop().create_future()

    def owes(self) -> str | None:
        """Nothing."""
        return None
