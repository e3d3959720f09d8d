"""The fetch loop: finished samples go from the dispatcher to the sink that they are for."""

from collections.abc import Callable

from headway.core.guards import FailureGuard
from headway.loop.dispatcher import Dispatcher, FinishedSample
from headway.loop.eval_sink import EvalSink
from headway.loop.signal import Signal, WaitBoard
from headway.loop.train_sink import TrainSink


class Fetch:
    """Takes one finished sample after the other, as long as the train sink has room.

    Args:
        limit: accepted samples that may wait in the train sink.
        sink_changed: notified when samples leave the train sink.
        failures: counts samples that failed for good.
        on_fetched: before a sample is dealt with. Synchronous.
        on_failed: told of a failure in words. Synchronous.
        on_judged: a training sample has been dealt with: decisions are due. Synchronous.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        train_sink: TrainSink,
        eval_sink: EvalSink,
        waits: WaitBoard,
        sink_changed: Signal,
        limit: int,
        failures: FailureGuard,
        on_fetched: Callable[[], None],
        on_failed: Callable[[str], None],
        on_judged: Callable[[], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._train_sink = train_sink
        self._eval_sink = eval_sink
        self._waits = waits
        self._sink_changed = sink_changed
        self._limit = limit
        self._failures = failures
        self._on_fetched = on_fetched
        self._on_failed = on_failed
        self._on_judged = on_judged

    async def run(self) -> None:
        """For ever. Raises what the guards raise: EmptyBatchesError, or a failed sample's error."""
        while True:
            await self._waits.until("fetch", "the trainer", self._sink_changed, self._has_room)
            finished = await self._dispatcher.fetch()
            # From here to the next wait there is no await: taking and delivering is one step.
            self._on_fetched()
            if finished.request.is_eval:
                self._eval_sink.add(finished)
            else:
                self._deliver(finished)
                self._on_judged()

    def _has_room(self) -> bool:
        return len(self._train_sink) < self._limit

    def _deliver(self, finished: FinishedSample) -> None:
        if finished.error is not None:
            self._on_failed(f"sample {finished.request.group_id}: {finished.error}")
            self._failures.failed(finished.error)
        elif finished.group is not None:
            self._failures.finished()
            self._train_sink.add(finished.group)
