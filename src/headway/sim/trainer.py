"""A simulated trainer, its weight channel, and a run store that keeps nothing on disk."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.core.rollout import Batch, TrainableGroup
from headway.errors import StoreError
from headway.loop.signal import Signal
from headway.ports import PublishedWeights


class SimulatedTrainer:
    """TrainerLink and WeightChannel in one: sleeps for the train time of every shipped batch, in
    order, then publishes the next version.

    Args:
        train_seconds: the seconds of the update of a step.
        queue_size: shipped batches that may wait; the ship gate keeps it near 1.
    """

    def __init__(
        self, *, train_seconds: Callable[[int], float], version: int = 0, queue_size: int = 64
    ) -> None:
        self._train_seconds = train_seconds
        self._queue: asyncio.Queue[int] = asyncio.Queue(queue_size)
        self._published = PublishedWeights(version=version, path=None)
        self._changed = Signal()

    async def ship(self, batch: Batch) -> None:
        """Queue the batch."""
        self._queue.put_nowait(batch.step)

    async def finish(self, num_steps: int) -> None:
        """Nothing to save."""

    async def wait_newer(self, version: int) -> PublishedWeights:
        """The newest version above `version`."""
        await self._changed.until(lambda: self._published.version > version)
        return self._published

    async def run(self) -> None:
        """Train for ever; the owner cancels it."""
        loop = asyncio.get_running_loop()
        idle_since = loop.time()
        while True:
            step = await self._queue.get()
            idle_seconds = loop.time() - idle_since
            seconds = self._train_seconds(step)
            if seconds:
                await asyncio.sleep(seconds)
            stats = {
                "train_seconds": seconds,
                "idle_seconds": idle_seconds,
                "publish_seconds": 0.0,
            }
            idle_since = loop.time()
            self._published = PublishedWeights(version=step + 1, path=None, stats=stats)
            self._changed.notify()


class MemoryStore:
    """A RunStore that remembers batches; `keep` limits how many (None: all)."""

    def __init__(self, keep: int | None = 0) -> None:
        self._keep = keep
        self.batches: list[Batch] = []
        self.leftovers: list[TrainableGroup] = []

    async def write_batch(self, batch: Batch) -> None:
        """Remember it."""
        self.batches.append(batch)
        if self._keep is not None:
            del self.batches[: max(len(self.batches) - self._keep, 0)]

    async def read_batch(self, step: int) -> Batch:
        """One of those that are kept. Raises StoreError."""
        for batch in self.batches:
            if batch.step == step:
                return batch
        raise StoreError(f"batch {step} is not kept")

    async def write_leftovers(self, groups: Sequence[TrainableGroup]) -> None:
        """Remember them."""
        self.leftovers.extend(groups)


class RowList:
    """A MetricsSink that remembers rows, all or the last of each kind."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def emit(self, row: Mapping[str, Any]) -> None:
        """Remember it."""
        self.rows.append(dict(row))
