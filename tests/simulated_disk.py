"""The run on disk under virtual time: real files, written without threads, killed on purpose."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.core.records import Record
from headway.core.rollout import Batch, TrainableGroup
from headway.errors import StoreError
from headway.store.batches import batch_path, read_batch, write_batch
from headway.store.database import RunDatabase
from headway.store.journal import MAX_RECORDS, GroupedJournal


class SimulatedDisk:
    """A RunStore, and the journal beside it, in one folder.

    Args:
        run_dir: gets `ledger.db` and `batches/`.
        seconds: draws how long each write takes.
        at_write: called with `"journal"` or `"batch"` before and after (`"... written"`) each
            write; what it raises is the disk's failure. It may `kill` the disk.
        max_records: backlog from which on the journal is full.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        seconds: Callable[[], float] = lambda: 0.0,
        at_write: Callable[[str], None] = lambda _: None,
        max_records: int = MAX_RECORDS,
    ) -> None:
        self._run_dir = run_dir
        self._seconds = seconds
        self._at_write = at_write
        (run_dir / "batches").mkdir(parents=True, exist_ok=True)
        self.database = RunDatabase(run_dir / "ledger.db", is_safe=False)
        self.journal = GroupedJournal(self._apply, max_records=max_records)
        self.leftovers: list[TrainableGroup] = []
        self.killed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        """Nothing is written any more, as if the process had been killed."""
        if not self.killed.done():
            self.killed.set_result(None)

    async def _begin(self, what: str) -> None:
        await asyncio.sleep(self._seconds())
        if not self.killed.done():
            self._at_write(what)
        if self.killed.done():
            await asyncio.get_running_loop().create_future()  # the process is no more

    async def _apply(self, records: Sequence[Record]) -> None:
        await self._begin("journal")
        self.database.apply(records)
        self._at_write("journal written")

    async def write_batch(self, batch: Batch) -> None:
        """Persist. Raises StoreError."""
        await self._begin("batch")
        write_batch(batch_path(self._run_dir, batch.step), batch)
        self._at_write("batch written")

    async def read_batch(self, step: int) -> Batch:
        """One that was persisted. Raises StoreError."""
        return read_batch(batch_path(self._run_dir, step))

    async def write_leftovers(self, groups: Sequence[TrainableGroup]) -> None:
        """They are in the spool, too."""
        self.leftovers.extend(groups)


def full_disk(what: str) -> None:
    """An `at_write` for a disk that is full. Raises StoreError."""
    raise StoreError(f"cannot write the {what}: no space left on the simulated disk")
