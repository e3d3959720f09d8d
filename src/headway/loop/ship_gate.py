"""The ship gate: holds a full batch until the trainer may have it, persists it, hands it over."""

import asyncio
from collections.abc import Callable

from headway.core.ages import Ages
from headway.core.gate import CapacityGate
from headway.core.rollout import Batch
from headway.errors import InvariantError
from headway.loop.policy import PolicyHandle
from headway.loop.signal import Signal, WaitBoard
from headway.loop.step_log import ShippedBatch
from headway.loop.train_sink import TrainSink
from headway.ports import RunStore, TrainerLink


class ShipGate:
    """Ships batch `k` once it is full and the version is at least `k - max_batches_ahead`.

    A batch is put together as late as that, then persisted, then handed over, in this order.

    Args:
        sink_changed: notified when the sink may have become full; notified here when it has room.
        on_shipped: a batch is persisted and about to be handed over. Synchronous.
    """

    def __init__(
        self,
        *,
        sink: TrainSink,
        sink_changed: Signal,
        policy: PolicyHandle,
        gate: CapacityGate,
        store: RunStore,
        trainer: TrainerLink,
        waits: WaitBoard,
        max_batches_ahead: int,
        steps: range,
        on_shipped: Callable[[ShippedBatch], None],
    ) -> None:
        self._sink = sink
        self._sink_changed = sink_changed
        self._policy = policy
        self._gate = gate
        self._store = store
        self._trainer = trainer
        self._waits = waits
        self._max_batches_ahead = max_batches_ahead
        self._steps = steps
        self._on_shipped = on_shipped
        self.num_shipped = steps.start
        """Batches handed over since version 0."""

    async def run(self) -> None:
        """Ship every step, in order, then end. Raises StoreError, TrainerError, InvariantError."""
        loop = asyncio.get_running_loop()
        for step in self._steps:
            await self._waits.until(
                "ship", f"batch {step} to fill", self._sink_changed, lambda: self._sink.is_full
            )
            full_at = loop.time()
            needed = step - self._max_batches_ahead
            with self._waits.waiting("ship", f"the trainer to reach version {needed}"):
                await self._policy.reached(needed)
            taken_at = loop.time()
            batch = self._sink.take_batch(step)
            rewards = self._sink.take_rewards()
            ages = self._checked_ages(batch)
            self._sink_changed.notify()
            with self._waits.waiting("ship", f"batch {step} to be written"):
                await self._store.write_batch(batch)
            self.num_shipped = step + 1
            self._on_shipped(
                ShippedBatch.of(
                    batch,
                    ages,
                    rewards=rewards,
                    parked_seconds=taken_at - full_at,
                    write_seconds=loop.time() - taken_at,
                )
            )
            await self._trainer.ship(batch)

    def _checked_ages(self, batch: Batch) -> Ages:
        """Ages of a batch, with the promised bound asserted in production."""
        ages = Ages.of_batch(batch.step, batch.rollouts)
        youngest = min(ages.tokens.counts, default=0)
        bound = self._gate.guaranteed_age
        oldest = ages.heads.max
        if youngest < 0 or (bound is not None and oldest is not None and oldest > bound):
            raise InvariantError(
                f"batch {batch.step} holds ages {youngest} to {oldest}, guaranteed are 0 to {bound}"
                f" (S = {self._gate.max_head_offpolicyness}, version {self._policy.version}, "
                f"heads {dict(sorted(ages.heads.counts.items()))})"
            )
        return ages
