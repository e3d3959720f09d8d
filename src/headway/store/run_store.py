"""The run on disk, as the loop writes it."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headway.core.rollout import Batch, TrainableGroup
from headway.store.batches import batch_path, read_batch, write_batch

logger = logging.getLogger(__name__)


class ParquetRunStore:
    """A RunStore that writes one Parquet file per batch, in a thread.

    Args:
        run_dir: holds `batches/`.
        metadata: kept with every file.
        prune: deletes old batches; called with the step of the newest, in the same thread. Raises
            OSError, which is logged: what was not deleted is deleted with the next batch.
    """

    def __init__(
        self,
        run_dir: Path,
        metadata: Mapping[str, str],
        prune: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._run_dir = run_dir
        self._metadata = metadata
        self._prune = prune

    async def write_batch(self, batch: Batch) -> None:
        """Persist; a thread that has begun ends its write even when this is cancelled."""
        await asyncio.to_thread(self._write, batch)

    def _write(self, batch: Batch) -> None:
        write_batch(batch_path(self._run_dir, batch.step), batch, self._metadata)
        try:
            self._prune(batch.step)
        except OSError as error:
            logger.warning("old batches could not be deleted: %s", error)

    async def read_batch(self, step: int) -> Batch:
        """A batch that was persisted. Raises StoreError."""
        return await asyncio.to_thread(read_batch, batch_path(self._run_dir, step))

    async def write_leftovers(self, groups: Sequence[TrainableGroup]) -> None:
        """Save accepted groups that no batch took, in the same format, beside the batches."""
        path = self._run_dir / "batches" / "leftovers.parquet"
        batch = Batch(step=0, groups=tuple(groups))
        await asyncio.to_thread(write_batch, path, batch, self._metadata)
