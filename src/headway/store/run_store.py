"""The run on disk, as the loop writes it."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.core.rollout import Batch, TrainableGroup
from headway.store.batches import batch_path, read_batch, write_batch


class ParquetRunStore:
    """A RunStore that writes one Parquet file per batch, in a thread.

    Args:
        run_dir: holds `batches/`.
        metadata: kept with every file.
    """

    def __init__(self, run_dir: Path, metadata: Mapping[str, str]) -> None:
        self._run_dir = run_dir
        self._metadata = metadata

    async def write_batch(self, batch: Batch) -> None:
        """Persist; a thread that has begun ends its write even when this is cancelled."""
        path = batch_path(self._run_dir, batch.step)
        await asyncio.to_thread(write_batch, path, batch, self._metadata)

    async def read_batch(self, step: int) -> Batch:
        """A batch that was persisted. Raises StoreError."""
        return await asyncio.to_thread(read_batch, batch_path(self._run_dir, step))

    async def write_leftovers(self, groups: Sequence[TrainableGroup]) -> None:
        """Save accepted groups that no batch took, in the same format, beside the batches."""
        path = self._run_dir / "batches" / "leftovers.parquet"
        batch = Batch(step=0, groups=tuple(groups))
        await asyncio.to_thread(write_batch, path, batch, self._metadata)
