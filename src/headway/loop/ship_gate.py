"""The ship gate: has a batch put together when the trainer may have it, persists it, hands it over.

Deciding (`poll`) is synchronous: it happens in the same step of the event loop as whatever may have
made a batch possible. Writing and handing over is the gate's own loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

from headway.core.ages import Ages
from headway.core.bound import Bound
from headway.core.order import Order
from headway.core.pacing import PacingState
from headway.core.rollout import Batch
from headway.core.totals import BatchTotals
from headway.errors import InvariantError
from headway.loop.policy import PolicyHandle
from headway.loop.signal import Signal, WaitBoard
from headway.loop.step_log import ShippedBatch, TakenBatch
from headway.loop.trace import Trace
from headway.loop.train_sink import TrainSink
from headway.ports import RunStore, TrainerLink


class ShipGate:
    """Ships batch `k` once the trainer has published version `k - batches_ahead`.

    A batch is put together as late as that, then persisted, then handed over, in this order. That
    it holds these samples is recorded between the last two, and what it is made of before it is
    written: so every batch that the trainer may have seen is on record, and a batch on disk that is
    not can be put on record (`store/recovery.py`).

    Args:
        reshipped: batches of an earlier life that are handed over again, as they are on disk.
        totals: what is known of these, by step.
        flush: makes safe what has been recorded. Raises StoreError.
        pacing: what the pacing remembers, for the record.
        now: seconds since the start of the run.
        num_unbatched: samples in the system that no batch has taken.
        on_taken: a batch has been put together. Synchronous.
        on_gave_up: a held batch need not wait any longer: `poll` is due. Synchronous.
        on_shipped: a batch is persisted and about to be handed over. Synchronous.
        has_timer: off: whoever drives the loop calls `give_up`.
    """

    def __init__(
        self,
        *,
        sink: TrainSink,
        policy: PolicyHandle,
        bound: Bound,
        store: RunStore,
        trainer: TrainerLink,
        waits: WaitBoard,
        trace: Trace,
        batches_ahead: int,
        steps: range,
        reshipped: range,
        totals: Mapping[int, BatchTotals],
        flush: Callable[[], Awaitable[None]],
        pacing: Callable[[], PacingState],
        now: Callable[[], float],
        num_unbatched: Callable[[], int],
        on_taken: Callable[[TakenBatch], None],
        on_gave_up: Callable[[], None],
        on_shipped: Callable[[ShippedBatch], None],
        has_timer: bool = True,
    ) -> None:
        self._sink = sink
        self._policy = policy
        self._bound = bound
        self._store = store
        self._trainer = trainer
        self._waits = waits
        self._trace = trace
        self._ahead = batches_ahead
        self._steps = steps
        self._reshipped = reshipped
        self._totals = totals
        self._flush = flush
        self._pacing = pacing
        self._now = now
        self._num_unbatched = num_unbatched
        self._on_taken = on_taken
        self._on_gave_up = on_gave_up
        self._on_shipped = on_shipped
        self._has_timer = has_timer
        self._changed = Signal()
        self._taken: TakenBatch | None = None
        self._full_at: float | None = None
        self._ready: tuple[float, int] | None = None
        self._held_since: float | None = None
        self._gave_up = False
        self._timer: asyncio.TimerHandle | None = None
        self.num_shipped = steps.start
        """Batches that are on disk, since version 0."""
        self.num_handed_over = reshipped.start
        """Batches that the trainer has, since version 0."""
        self._on_disk: str | None = None

    @property
    def num_taken(self) -> int:
        """Batches handed over, and the one that is being written."""
        return self.num_shipped + (self._taken is not None)

    @property
    def is_parked(self) -> bool:
        """Whether a full batch waits for the trainer."""
        return self._sink.is_full and not self._is_due

    @property
    def _is_due(self) -> bool:
        """Whether the trainer may have the next batch."""
        if self.num_shipped >= self._steps.stop or self._taken is not None:
            return False
        return self._policy.announced >= self.num_shipped - self._ahead

    def disk_owes(self) -> str | None:
        """The write or read of a batch that is under way, in words; None: there is none."""
        return self._on_disk

    def trainer_owes(self) -> str | None:
        """The version that the trainer has the batch for, in words; None: it has none to train."""
        version = self._policy.announced + 1
        if self.num_handed_over < version:
            return None
        return f"version {version}, to be published after training on batch {version - 1}"

    def poll(self) -> None:
        """Put the next batch together if that is possible now. Whoever changes what this depends
        on calls it: an accepted, rejected or failed sample, a published version, a shipped batch.
        """
        now = self._trace.at
        if self._full_at is None and self._sink.is_full:
            self._full_at = now
            self._changed.notify()
        if not self._is_due:
            return
        if self._ready is None:
            self._ready = (now, len(self._sink))
            self._changed.notify()
        step = self.num_shipped
        batch = self._sink.assemble(step, gave_up=self._gave_up)
        if batch is None:
            self._hold(now)
            return
        ready_at, num_ready = self._ready
        self._taken = TakenBatch(
            batch=batch,
            ages=self._checked_ages(batch),
            rewards=self._sink.take_rewards(),
            full_at=now if self._full_at is None else self._full_at,
            ready_at=ready_at,
            taken_at=now,
            num_ready=num_ready,
            num_unbatched=self._num_unbatched() + len(batch.groups),
            held_seconds=0.0 if self._held_since is None else now - self._held_since,
        )
        self._full_at = now if self._sink.is_full else None
        self._ready = self._held_since = None
        self._gave_up = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_taken(self._taken)
        self._changed.notify()

    def _hold(self, now: float) -> None:
        if not self._sink.is_full:
            self._full_at = None
        if not self._sink.held_for or self._held_since is not None:
            return
        self._held_since = now
        self._changed.notify()
        if self._bound.wait_seconds is not None and self._has_timer:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._bound.wait_seconds, self.give_up)

    def give_up(self) -> None:
        """The batch has been held for `wait_seconds`: take what there is."""
        self._trace.gave_up(self.num_shipped)
        self._timer = None
        self._gave_up = True
        self._on_gave_up()

    async def run(self) -> None:
        """Write and hand over every batch, in order, then end. Raises StoreError, TrainerError."""
        for step in self._reshipped:
            await self._ship_again(step)
        for step in self._steps:
            while (taken := self._taken) is None:
                what = self._what_for(step)

                def has_news(what: str = what, step: int = step) -> bool:
                    return self._taken is not None or self._what_for(step) != what

                await self._waits.until("ship", what, self._changed, has_news)
            started_at = self._now()
            with self._disk(f"batch {step} to be written"):
                await self._flush()
                await self._store.write_batch(taken.batch)
            shipped = ShippedBatch.of(taken, write_seconds=self._now() - started_at)
            self._trace.shipped(taken.batch, shipped.totals, self._pacing())
            self._taken = None
            self.num_shipped = step + 1
            self._on_shipped(shipped)
            with self._disk(f"batch {step} to be recorded and handed over"):
                await self._flush()
                await self._trainer.ship(taken.batch)
            self.num_handed_over = step + 1

    async def _ship_again(self, step: int) -> None:
        needed = step - self._ahead
        with self._waits.waiting("ship", f"the trainer to publish version {needed}"):
            await self._policy.published(needed)
        with self._disk(f"batch {step} to be read"):
            batch = await self._store.read_batch(step)
        now = self._now()
        taken = TakenBatch(
            batch=batch,
            ages=self._checked_ages(batch),
            rewards=[],
            full_at=now,
            ready_at=now,
            taken_at=now,
            num_ready=len(batch.groups),
            num_unbatched=self._num_unbatched() + len(batch.groups),
            held_seconds=0.0,
        )
        shipped = ShippedBatch.of(taken, write_seconds=0.0)
        self._on_shipped(shipped.as_before(self._totals.get(step)))
        with self._disk(f"batch {step} to be handed over"):
            await self._trainer.ship(batch)
        self.num_handed_over = step + 1

    @contextmanager
    def _disk(self, what: str) -> Iterator[None]:
        """Around a wait for the disk."""
        self._on_disk = what
        try:
            with self._waits.waiting("ship", what):
                yield
        finally:
            self._on_disk = None

    def _what_for(self, step: int) -> str:
        if self._held_since is not None:
            why = "order: window" if self._bound.order is Order.WINDOW else "over_bound: wait"
            return f"the samples that batch {step} is held for ({why})"
        if not self._sink.is_full:
            return f"batch {step} to fill"
        return f"the trainer to publish version {step - self._ahead}"

    def _checked_ages(self, batch: Batch) -> Ages:
        """Ages of a batch, with the promised bound asserted in production."""
        ages = Ages.of_batch(batch.step, batch.rollouts)
        youngest = min(ages.tokens.counts, default=0)
        bound = self._bound.guaranteed_age
        oldest = ages.heads.max
        if youngest < 0 or (bound is not None and oldest is not None and oldest > bound):
            raise InvariantError(
                f"batch {batch.step} holds ages {youngest} to {oldest}, guaranteed are 0 to {bound}"
                f" ({self._bound}, version {self._policy.version}, heads "
                f"{dict(sorted(ages.heads.counts.items()))})"
            )
        return ages
