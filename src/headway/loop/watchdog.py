"""The stall watchdog: a run without progress ends with a message that names what waits for what."""

import asyncio

from headway.core.ledger import Ledger
from headway.errors import StallError
from headway.loop.signal import WaitBoard


class Watchdog:
    """Raises StallError when nothing was `progress()` for `stall_seconds`.

    It also checks, every tenth of that time, that the ledger adds up.
    """

    def __init__(self, *, ledger: Ledger, waits: WaitBoard, stall_seconds: float) -> None:
        self._ledger = ledger
        self._waits = waits
        self._stall_seconds = stall_seconds
        self._progress_at = asyncio.get_running_loop().time()

    def progress(self) -> None:
        """A sample finished, a batch was shipped, or a version is served."""
        self._progress_at = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """For ever, or until a StallError or InvariantError."""
        limit = self._stall_seconds
        while True:
            await asyncio.sleep(limit / 10)
            self._ledger.check()
            quiet = asyncio.get_running_loop().time() - self._progress_at
            if quiet > limit:
                raise StallError(
                    f"nothing finished, was shipped or was published for {quiet:.0f} s "
                    f"(run.stall_seconds = {limit:g}): {self._waits.describe()}; "
                    f"{self._ledger.num_running} samples running"
                )
