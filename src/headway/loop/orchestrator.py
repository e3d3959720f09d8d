"""The orchestrator: owns the shared handles, wires the parts, and ends the run truthfully.

    task source -> dispatcher -> (fetch) -> train sink -> (ship) -> store, trainer
                        ^            \\-> eval sink                        |
                        |                                                 v
                  gate, ledger <- policy handle <- weight watcher <- weight channel

| part       | consumes            | produces         | waits for             | unblocked by       |
|------------|---------------------|------------------|-----------------------|--------------------|
| feed       | task source         | input queue      | room in input queue   | submission         |
| submission | input queue, evals  | sample tasks     | a prompt, capacity    | feed, fetch,       |
|            |                     |                  |                       | watcher, ship      |
| fetch      | output queue        | train sink, eval | a finished sample,    | samples, ship      |
|            |                     | sink             | room in the sink      |                    |
| ship       | train sink          | store, trainer   | a batch; published    | fetch; watcher     |
|            |                     |                  | version >= step-ahead |                    |
| watcher    | weight channel      | engines, version | a newer version       | trainer            |
| metrics    | statistics          | metric rows      | its interval          | time               |
| watchdog   | progress, ledger    | nothing, or an   | its interval          | time               |
|            |                     | error            |                       |                    |
| journal    | records             | the run on disk  | records; the disk     | whoever records    |
| watch X    | process X           | an error         | the death of X        | never, in health   |

One TaskGroup owns all of them and the sample tasks. A part that ends early is an error that names
it. The version path (watcher) awaits no queue, so it cannot deadlock with what waits for a version.

Decisions (what is admitted, judged, dropped, batched) are taken by synchronous calls in the step of
the event loop that deals with their cause: `_decide` after a fetch, an announced or served version,
a shipped batch. Tasks wait for causes, never for decisions.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headway.config import Config
from headway.core.gate import GateState, check_first_step, check_start
from headway.core.guards import EmptyBatchGuard, FailureGuard
from headway.core.ledger import Ledger, SampleState
from headway.core.pacing import BatchTaken, JustInTime, Pacing, PacingState
from headway.core.records import RunState
from headway.core.rollout import Group
from headway.errors import HeadwayError, PartEndedError
from headway.loop.dispatcher import Dispatcher
from headway.loop.engine_meter import EngineMeter
from headway.loop.eval_sink import EvalResult, EvalSink
from headway.loop.in_training import InTraining
from headway.loop.metrics_loop import IntervalRow, MetricsLoop, run_row
from headway.loop.no_journal import NoJournal
from headway.loop.outcome import COMPLETED, Outcome, RunEnded, outcome_of
from headway.loop.policy import PolicyHandle
from headway.loop.rollout_runner import RolloutRunner, SampleRequest
from headway.loop.ship_gate import ShipGate
from headway.loop.signal import Signal, WaitBoard
from headway.loop.step_log import ShippedBatch, StepLog, TakenBatch
from headway.loop.trace import Trace
from headway.loop.train_sink import TrainSink
from headway.loop.watchdog import Watchdog
from headway.loop.weight_watcher import VersionServed, WeightWatcher
from headway.ports import Ports, PublishedWeights

UPDATE_GRACE_SECONDS = 15.0
"""The pool's own deadline for each engine comes first, because its message names the engine."""


class Orchestrator:
    """One run of the control loop. Build it inside a running event loop; `run()` once.

    Args:
        config: the resolved configuration.
        ports: what stands behind every seam.
        start: counts to start from; default is a new run. `start.version` is what engines serve.
        check_first_step: refuse a start state that would admit more than `(S + 1) * B` samples
            before the first version bump, which is how a resume loses its bound.
        pacing: what the controller of `pacing: just_in_time` remembers of the run so far.
        resume: where an earlier life of this run was cut off; instead of `start` and `pacing`.
        elapsed_seconds: of the run, in earlier lives: the times in all rows go on from there.
        run_sample: plays samples instead of the rollout runner (a replay); then it also says when a
            held batch gives up waiting.
    """

    def __init__(
        self,
        config: Config,
        ports: Ports,
        *,
        start: GateState | None = None,
        check_first_step: bool = True,
        pacing: PacingState | None = None,
        resume: RunState | None = None,
        elapsed_seconds: float = 0.0,
        run_sample: Callable[[SampleRequest], Awaitable[Group]] | None = None,
    ) -> None:
        rollout = config.rollout
        batch_size = rollout.consumer_batch_size
        if resume:
            resume.check(batch_size)
            start, pacing = resume.gate_state(batch_size), resume.pacing
        start = start or GateState()
        num_batches = resume.num_batches if resume else start.version
        self.config = config
        self._ports = ports
        self._start = start
        self._is_checked = check_first_step
        self._first_taken = num_batches
        self._loop = asyncio.get_running_loop()
        self.started_at = self._loop.time() - elapsed_seconds
        self.bound = config.bound
        self.policy = PolicyHandle(start.version)
        self._journal = ports.journal or NoJournal()
        record = ports.journal.record if ports.journal else None
        self.trace = Trace(now=self._now, sink=ports.trace, record=record)
        self.ledger = resume.ledger(batch_size) if resume else Ledger(start)
        self.waits = WaitBoard()
        self.gate = config.gate
        self.pacer = JustInTime(
            batch_size=batch_size, ceiling=self.gate.most_unbatched, state=pacing
        )
        if check_first_step:
            check_start(self.gate, start)
        self.engine = EngineMeter(ports.engine)
        self.runner = RolloutRunner(
            engine=self.engine,
            environments=ports.environments,
            max_new_tokens=rollout.max_new_tokens,
            deadline_seconds=rollout.deadline_seconds,
            max_infrastructure_retries=rollout.max_infrastructure_retries,
            max_environment_retries=rollout.max_environment_retries,
        )
        self.dispatcher = Dispatcher(
            run_sample=run_sample or self.runner.run,
            source=ports.source,
            gate=self.gate,
            ledger=self.ledger,
            policy=self.policy,
            waits=self.waits,
            trace=self.trace,
            limit=self._admission_limit,
            queue_size=rollout.queue_size,
            group_size=rollout.group_size,
            temperature=rollout.temperature,
            eval_concurrent=config.eval.max_concurrent,
            first_group_id=start.admitted,
        )
        self.train_sink = TrainSink(
            bound=self.bound,
            baseline=config.actor.advantage,
            filters=rollout.filters,
            ledger=self.ledger,
            guard=EmptyBatchGuard(batch_size, config.run.max_empty_batches),
            trace=self.trace,
        )
        self.eval_sink = EvalSink(
            tasks=ports.eval_tasks,
            temperature=config.eval.temperature,
            submit=self.dispatcher.submit_eval,
            on_result=self._on_eval,
        )
        self.watcher = WeightWatcher(
            channel=ports.channel,
            engine=self.engine,
            policy=self.policy,
            waits=self.waits,
            update_seconds=config.engine.update_seconds + UPDATE_GRACE_SECONDS,
            max_unserved=config.max_unserved,
            on_announced=self._on_announced,
            on_served=self._on_served,
        )
        self._sink_changed = Signal()
        self.ship_gate = ShipGate(
            sink=self.train_sink,
            policy=self.policy,
            bound=self.bound,
            store=ports.store,
            trainer=ports.trainer,
            waits=self.waits,
            trace=self.trace,
            batches_ahead=config.batches_ahead,
            steps=range(num_batches, config.run.steps),
            reshipped=range(start.version, num_batches),
            flush=self._journal.flush,
            pacing=lambda: self.pacer.state,
            now=self._now,
            num_unbatched=lambda: len(self.ledger.unbatched),
            on_taken=self._on_taken,
            on_gave_up=self._decide,
            on_shipped=self._on_shipped,
            has_timer=run_sample is None,
        )
        self.watchdog = Watchdog(
            ledger=self.ledger, waits=self.waits, stall_seconds=config.run.stall_seconds
        )
        self.log = StepLog(
            self.ledger, self.train_sink.bias, self._loop.time(), first_step=start.version
        )
        self.evals = [EvalResult(**row) for row in resume.evals] if resume else []
        self._failures = FailureGuard(rollout.max_failed_samples)
        self._in_training = InTraining()
        self._done = Signal()
        self._ended: Outcome | None = None
        self._ending = Signal()
        self.is_abandoned = False
        """Whether tasks were left that ignore their cancellation."""
        self._stop_code: int | None = None
        self._drain_window: asyncio.Timeout | None = None
        self.metrics_loop = MetricsLoop(
            row=IntervalRow(
                dispatcher=self.dispatcher,
                train_sink=self.train_sink,
                ship_gate=self.ship_gate,
                engine=self.engine,
                policy=self.policy,
                log=self.log,
                waits=self.waits,
            ),
            sink=ports.metrics,
            interval_seconds=config.run.metrics_interval_seconds,
        )
        if resume:
            self.dispatcher.restore(resume)
            self.train_sink.restore(resume)

    # --- the run ------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Run to the step target, to `stop()`, or to the first error, which is in the outcome."""
        self._emit(run_row(self.config, self._ports.labels))
        for text in self.config.warnings:
            self._event("warning", text)
        parts = asyncio.create_task(self._run_parts(), name="parts")
        parts.add_done_callback(lambda _: self._ending.notify())
        try:
            await self._ending.until(lambda: self._ended is not None or parts.done())
            # All parts were cancelled; code of the user's can refuse to end.
            await asyncio.wait({parts}, timeout=self.config.run.shutdown_seconds)
        except asyncio.CancelledError:
            self.dispatcher.abandon()
            parts.cancel()
            raise
        if parts.done():
            outcome = parts.result()
        else:
            assert self._ended is not None
            outcome = self._ended
            self.is_abandoned = True
            self._event(
                "error",
                f"{self.ledger.num_running} samples did not end when they were cancelled and were "
                f"abandoned after {self.config.run.shutdown_seconds:g} s (run.shutdown_seconds)",
            )
        will_resume = self._ports.journal is not None
        self.dispatcher.drop_running(outcome.exit_reason, will_resume=will_resume)
        self.ledger.check()
        try:
            if leftovers := self.train_sink.leftovers():
                await self._ports.store.write_leftovers(leftovers)
            await self._journal.flush()
            await self._ports.trainer.finish(self.ship_gate.num_shipped)
        except HeadwayError as error:
            self._event("error", str(error))  # also when something else ended the run before
            outcome = outcome if outcome.error else outcome_of(error)
        return outcome

    async def _run_parts(self) -> Outcome:
        """All parts under one TaskGroup, to the outcome of what ended it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._start_parts(tasks)
                if self._is_eval_due(self.policy.version):
                    self.eval_sink.start(self.policy.version)
                outcome = await self._until_ended()
                self._end_with(outcome)
                raise RunEnded(outcome)
        except BaseExceptionGroup as group:
            return outcome_of(group)

    def _end_with(self, outcome: Outcome) -> None:
        self._ended = self._ended or outcome
        self.dispatcher.abandon()
        self._ending.notify()

    async def _part(self, name: str, part: Awaitable[None], may_end: bool) -> None:
        try:
            await part
            if not may_end:
                raise PartEndedError(f"{name} ended although the run had not")
        except Exception as error:  # re-raised: it ends the run, whose end is bounded from here on
            self._end_with(outcome_of(error))
            raise

    def stop(self, exit_code: int = 130) -> None:
        """Ask for a graceful end: admission stops, what is in flight finishes within
        `run.shutdown_seconds`, full batches are trained, the rest is saved. A second call ends
        the wait at once."""
        if self._stop_code is None:
            self._stop_code = exit_code
            self._done.notify()
        elif self._ended is None and (window := self._drain_window) and not window.expired():
            window.reschedule(self._loop.time())

    def _start_parts(self, tasks: asyncio.TaskGroup) -> None:
        def start(name: str, part: Awaitable[None], *, may_end: bool = False) -> None:
            tasks.create_task(self._part(name, part, may_end), name=name)

        self._decide()
        start("feed", self.dispatcher.run_feed(), may_end=True)
        start("submission", self.dispatcher.run_submission(tasks))
        start("fetch", self._run_fetch())
        start("ship", self.ship_gate.run(), may_end=True)
        start("watcher", self.watcher.run())
        start("metrics", self.metrics_loop.run())
        start("watchdog", self.watchdog.run())
        start("journal", self._journal.run(self.dispatcher.pause, self.dispatcher.resume))
        for name, watch in self._ports.watched.items():
            start(f"watch {name}", watch())

    async def _until_ended(self) -> Outcome:
        """Wait without a deadline (the watchdog ends a run without progress)."""
        steps = self.config.run.steps
        await self._done.until(lambda: self.policy.version >= steps or self._stop_code is not None)
        self.dispatcher.close()
        if self._stop_code is not None:
            await self._drain()
            return Outcome(exit_reason="interrupted", exit_code=self._stop_code)
        if self.config.eval.every:
            self.eval_sink.start(self.policy.version, is_last=True)
            with self.waits.waiting("orchestrator", "the last evaluation"):
                await self.eval_sink.idle()
        return COMPLETED

    async def _drain(self) -> None:
        window = self.config.run.shutdown_seconds
        self._event("warning", f"stopping: what is in flight has {window:g} s to finish")
        try:
            async with asyncio.timeout(window) as self._drain_window:
                await self.dispatcher.drained()
                await self._sink_changed.until(lambda: not self.train_sink.is_full)
                await self.policy.reached(self.ship_gate.num_taken)
        except TimeoutError:
            self._event("warning", f"the drain did not end in time: {self.waits.describe()}")

    # --- loops --------------------------------------------------------------------------------

    async def _run_fetch(self) -> None:
        # The spare samples of the end of the run must not stand in the way of the last evaluation.
        limit = max(self.config.rollout.queue_size, self.gate.spare_samples + 1)

        def has_room() -> bool:
            return len(self.train_sink) < limit

        while True:
            await self.waits.until("fetch", "the trainer", self._sink_changed, has_room)
            finished = await self.dispatcher.fetch()
            # From here to the next wait there is no await: taking and delivering is one step.
            self.watchdog.progress()
            if finished.request.is_eval:
                self.eval_sink.add(finished)
                continue
            if finished.error is not None:
                self._event("warning", f"sample {finished.request.group_id}: {finished.error}")
                self._failures.failed(finished.error)
            elif finished.group is not None:
                self._failures.finished()
                self.train_sink.add(finished.group)
            self._decide()

    # --- decisions ------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Something happened: put a batch together, and admit samples, if that is possible now."""
        self.ship_gate.poll()
        if requeued := self.train_sink.take_requeued():
            self.dispatcher.requeue(requeued)
            self._sink_changed.notify()
        self.dispatcher.pump()

    def _admission_limit(self) -> int | None:
        """Samples that may be admitted now for all that the gate does not know."""
        if self.bound.enforcement.holds_while_parked and self.ship_gate.is_parked:
            return 0
        if self.config.rollout.pacing is Pacing.FILL:
            return None
        if self.policy.announced > self.policy.version and self._in_training.updates_are_short:
            # What starts now would be a version older than what starts after the update.
            return 0
        return self.pacer.limit() - len(self.ledger.unbatched)

    def _on_taken(self, taken: TakenBatch) -> None:
        if taken.batch.step > self._first_taken:  # for the first one the trainer has to wait
            self.pacer.batch_taken(
                BatchTaken(num_ready=taken.num_ready, num_unbatched=taken.num_unbatched)
            )
        self._sink_changed.notify()

    # --- what parts report ----------------------------------------------------------------------

    def _now(self) -> float:
        return self._loop.time() - self.started_at

    def _on_shipped(self, shipped: ShippedBatch) -> None:
        self.watchdog.progress()
        self._in_training.shipped(shipped)
        self._decide()

    def _on_announced(self, weights: PublishedWeights) -> None:
        self.trace.announced(weights)
        self._in_training.announced(self.trace.at, weights)
        self._decide()

    def _on_served(self, served: VersionServed) -> None:
        version = served.weights.version
        self.trace.served(version)
        self.watchdog.progress()
        if self._is_checked and not self.log.num_trained:
            num_freed = self.ledger.num_lost - self._start.rejected
            check_first_step(self.gate, self.dispatcher.admissions, num_freed)
        first = self.log.first_step + self.log.num_trained
        for shipped, weights in self._in_training.served(self.trace.at, version, first=first):
            for group_id in shipped.group_ids:
                self.ledger.move(group_id, SampleState.TRAINED)
            each = VersionServed(weights, served.sync_seconds)
            admissions, now = self.dispatcher.admissions, self._loop.time()
            self._emit(self.log.trained(shipped, each, now=now, admissions=admissions))
        if version >= self.config.run.steps:
            self.dispatcher.close()
            self._done.notify()
            return
        self._decide()
        due = any(self._is_eval_due(one) for one in range(first + 1, version + 1))
        if due and not self.eval_sink.start(version):
            self._event("warning", f"no eval at version {version}: the last one is still running")

    def _is_eval_due(self, version: int) -> bool:
        every = self.config.eval.every
        is_done = any(one.version == version for one in self.evals)
        return every > 0 and version % every == 0 and not is_done

    def _on_eval(self, result: EvalResult) -> None:
        self.watchdog.progress()
        self.evals.append(result)
        self.trace.evaluated({name: getattr(result, name) for name in result.__slots__})
        self._emit(result.row())

    # --- rows -----------------------------------------------------------------------------------

    def _emit(self, row: Mapping[str, Any]) -> None:
        self._ports.metrics.emit({"time": self._now(), **row})

    def _event(self, level: str, text: str) -> None:
        self._emit({"kind": "event", "level": level, "text": text})
