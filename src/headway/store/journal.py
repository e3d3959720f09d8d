"""The journal: records go to the run's database in groups, off the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headway.core.records import Accepted, Record
from headway.errors import StoreError

LINGER_SECONDS = 0.005
"""Records that come within this time are written together: a transaction costs an fsync."""
MAX_RECORDS = 50_000
MAX_BYTES = 1 << 28
"""Records, and bytes of tokens in them, that may wait for the disk before admission pauses."""
_RECORD_BYTES = 200
_TOKEN_BYTES = 9


class GroupedJournal:
    """A `ports.Journal` that writes what has gathered while the last write went on.

    Args:
        apply: writes records in one transaction, in order; raises StoreError. A write that has
            begun is never cancelled.
        max_records, max_bytes: backlog from which on the journal is full; half of it is room.
    """

    def __init__(
        self,
        apply: Callable[[Sequence[Record]], Awaitable[None]],
        *,
        linger_seconds: float = LINGER_SECONDS,
        max_records: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._apply = apply
        self._linger_seconds = linger_seconds
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._pending: list[Record] = []
        self._pending_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._has_news = asyncio.Event()
        self._failure: StoreError | None = None
        self.num_recorded = 0
        self.num_written = 0
        self.num_transactions = 0

    def record(self, record: Record) -> None:
        """Take a record; after a failure it is forgotten, since nothing may follow a gap."""
        if self._failure is not None:
            return
        self._pending.append(record)
        self.num_recorded += 1
        if isinstance(record, Accepted):
            rollouts = record.trainable.group.rollouts
            self._pending_bytes += _TOKEN_BYTES * sum(one.num_tokens for one in rollouts)
        self._has_news.set()

    async def flush(self) -> None:
        """Return once everything recorded so far is written. Raises StoreError."""
        target = self.num_recorded
        while self.num_written < target:
            await self._write()

    async def run(self, on_full: Callable[[], None], on_room: Callable[[], None]) -> None:
        """Write until cancelled. Raises StoreError."""
        is_full = False
        while True:
            await self._has_news.wait()  # no deadline: a run without records has a watchdog
            await asyncio.sleep(self._linger_seconds)
            if not is_full and self._backlog >= 1:
                is_full = True
                on_full()
            await self._write()
            if is_full and self._backlog <= 0.5:
                is_full = False
                on_room()

    def owes(self) -> str | None:
        """The first record that is not written yet."""
        if self.num_written == self.num_recorded or self._failure is not None:
            return None
        return f"record {self.num_written + 1:,} of {self.num_recorded:,} to be written"

    @property
    def _backlog(self) -> float:
        """1 is full."""
        waiting = len(self._pending)
        size = self._pending_bytes + _RECORD_BYTES * waiting
        return max(waiting / self._max_records, size / self._max_bytes)

    async def _write(self) -> None:
        if self._writing is None and self._pending and self._failure is None:
            self._writing = asyncio.create_task(self._write_pending(), name="journal write")
        if self._writing is not None:
            await asyncio.shield(self._writing)
        if self._failure is not None:
            raise self._failure

    async def _write_pending(self) -> None:
        records, self._pending, self._pending_bytes = self._pending, [], 0
        self._has_news.clear()
        try:
            await self._apply(records)
            self.num_written += len(records)
            self.num_transactions += 1
        except StoreError as error:
            self._failure = error
            self._has_news.set()  # whoever found it, `run` is where it ends the run
        finally:
            self._writing = None
