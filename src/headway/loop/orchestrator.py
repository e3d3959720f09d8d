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
| watchdog   | duties, ledger      | nothing, or an   | its interval          | time               |
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
from functools import partial
from typing import Any

from headway.config import Config
from headway.core.gate import GateState, check_first_step, check_start
from headway.core.guards import EmptyBatchGuard, FailureGuard
from headway.core.ledger import Ledger, SampleState
from headway.core.pacing import BatchTaken, JustInTime, Pacing, PacingState
from headway.core.records import RunState
from headway.core.rollout import Group
from headway.errors import HeadwayError, PartEndedError, StoreError
from headway.loop.dispatcher import Dispatcher
from headway.loop.duties import watchdog_of
from headway.loop.engine_meter import EngineMeter
from headway.loop.eval_sink import EvalResult, EvalSink
from headway.loop.fetch import Fetch
from headway.loop.in_training import InTraining
from headway.loop.metrics_loop import IntervalRow, MetricsLoop, run_row
from headway.loop.no_journal import NoJournal
from headway.loop.outcome import COMPLETED, Outcome, RunEnded, outcome_of
from headway.loop.policy import PolicyHandle
from headway.loop.rollout_runner import RolloutRunner, SampleRequest
from headway.loop.ship_gate import ShipGate
from headway.loop.signal import Signal, WaitBoard
from headway.loop.step_log import ShippedBatch, StepLog, TakenBatch
from headway.loop.stopping import Stopping, interrupted
from headway.loop.trace import Trace
from headway.loop.train_sink import TrainSink
from headway.loop.weight_watcher import VersionServed, WeightWatcher
from headway.ports import Ports, PublishedWeights


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
        life_began_at: when this process began, in loop time (default: now), for `run.max_seconds`.
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
        life_began_at: float | None = None,
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
        self._life_began_at = self._loop.time() if life_began_at is None else life_began_at
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
        self.engine.restore(resume.steps if resume else {})
        self.runner = RolloutRunner.of(rollout, engine=self.engine, environments=ports.environments)
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
            every=config.eval.every,
            results=[EvalResult(**row) for row in resume.evals] if resume else (),
            temperature=config.eval.temperature,
            submit=self.dispatcher.submit_eval,
            on_result=self._on_eval,
        )
        self.watcher = WeightWatcher(
            channel=ports.channel,
            engine=self.engine,
            policy=self.policy,
            waits=self.waits,
            update_seconds=config.engine.update_seconds,
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
            totals=resume.batches if resume else {},
            flush=self._journal.flush,
            pacing=lambda: self.pacer.state,
            now=self._now,
            num_unbatched=lambda: len(self.ledger.unbatched),
            on_taken=self._on_taken,
            on_gave_up=self._decide,
            on_shipped=self._on_shipped,
            has_timer=run_sample is None,
        )
        self.watchdog = watchdog_of(
            config,
            ledger=self.ledger,
            waits=self.waits,
            dispatcher=self.dispatcher,
            engine=self.engine,
            eval_sink=self.eval_sink,
            journal=self._journal,
            policy=self.policy,
            runner=self.runner,
            ship_gate=self.ship_gate,
            on_event=self._event,
        )
        self.log = StepLog(
            ledger=self.ledger,
            bias=self.train_sink.bias,
            engine=self.engine,
            on_trained=self.trace.trained,
            first_step=start.version,
        )
        self._failures = FailureGuard(rollout.max_failed_samples)
        self.fetch = Fetch(
            dispatcher=self.dispatcher,
            train_sink=self.train_sink,
            eval_sink=self.eval_sink,
            waits=self.waits,
            sink_changed=self._sink_changed,
            # The spare samples of the end of the run must not stand in the way of the last
            # evaluation.
            limit=max(rollout.queue_size, self.gate.spare_samples + 1),
            failures=self._failures,
            on_fetched=self.watchdog.progress,
            on_failed=partial(self._event, "warning"),
            on_judged=self._decide,
        )
        self._in_training = InTraining()
        self._ended: Outcome | None = None
        self._ending = Signal()
        self.is_abandoned = False
        """Whether tasks were left that ignore their cancellation."""
        self._stopping = Stopping(
            window_seconds=config.run.shutdown_seconds, waits=self.waits, on_event=self._event
        )
        self.metrics_loop = MetricsLoop(
            row=IntervalRow(
                dispatcher=self.dispatcher,
                train_sink=self.train_sink,
                ship_gate=self.ship_gate,
                engine=self.engine,
                policy=self.policy,
                log=self.log,
                waits=self.waits,
                now=self._now,
            ),
            sink=ports.metrics,
            interval_seconds=config.run.metrics_interval_seconds,
        )
        if resume:
            self.dispatcher.restore(resume)
            self.train_sink.restore(resume)
            self.log.restore(resume)
            self._failures.restore(resume.in_a_row.failed)

    # --- the run ------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Run to the step target, to `stop()`, or to the first error, which is in the outcome."""
        self._emit(run_row(self.config, self._ports.labels))
        for text in self.config.warnings:
            self._event("warning", text)
        self._stopping.watch_deadline(self._life_began_at, self.config.run.max_seconds)
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
        self.dispatcher.drop_running(f"run {outcome.exit_reason}", will_resume=will_resume)
        self.ledger.check()
        try:
            await self._save()
        except HeadwayError as error:
            self._event("error", str(error))  # also when something else ended the run before
            outcome = outcome if outcome.error else outcome_of(error)
        return outcome

    async def _save(self) -> None:
        """Write the rest, and tell the trainer that it was all. Raises StoreError."""
        seconds = self.config.liveness.disk_seconds
        try:
            async with asyncio.timeout(seconds):
                if leftovers := self.train_sink.leftovers():
                    await self._ports.store.write_leftovers(leftovers)
                await self._journal.flush()
                await self._ports.trainer.finish(self.ship_gate.num_shipped)
        except TimeoutError:
            self.is_abandoned = True
            raise StoreError(
                f"the disk did not take the last writes within {seconds:g} s "
                "(liveness.disk_seconds); what it took before is safe, and the run can be resumed"
            ) from None

    async def _run_parts(self) -> Outcome:
        """All parts under one TaskGroup, to the outcome of what ended it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._start_parts(tasks)
                self.eval_sink.start_due(range(self.policy.version, self.policy.version + 1))
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

    def stop(self, outcome: Outcome | None = None) -> None:
        """Ask for a graceful end, which is then the outcome (default: interrupted): admission
        stops, what is in flight finishes within `run.shutdown_seconds`, full batches are trained,
        the rest is saved. A second call ends the wait at once."""
        self._stopping.ask(outcome or interrupted(130))

    def _start_parts(self, tasks: asyncio.TaskGroup) -> None:
        def start(name: str, part: Awaitable[None], *, may_end: bool = False) -> None:
            tasks.create_task(self._part(name, part, may_end), name=name)

        self._decide()
        start("feed", self.dispatcher.run_feed(), may_end=True)
        start("submission", self.dispatcher.run_submission(tasks))
        start("fetch", self.fetch.run())
        start("ship", self.ship_gate.run(), may_end=True)
        start("watcher", self.watcher.run())
        start("metrics", self.metrics_loop.run())
        start("watchdog", self.watchdog.run())
        start("journal", self._journal.run(self.dispatcher.pause, self.dispatcher.resume))
        for name, watch in self._ports.watched.items():
            start(f"watch {name}", watch())

    async def _until_ended(self) -> Outcome:
        """Wait without a deadline (the watchdog ends a run without progress)."""
        steps, stopping = self.config.run.steps, self._stopping
        await stopping.changed.until(lambda: self.policy.version >= steps or bool(stopping.outcome))
        self.dispatcher.close()
        if stopping.outcome is not None:
            await stopping.drain(self._drained())
            return stopping.outcome
        if self.config.eval.every:
            self.eval_sink.start(self.policy.version, is_last=True)
            with self.waits.waiting("orchestrator", "the last evaluation"):
                await self.eval_sink.idle()
        return COMPLETED

    async def _drained(self) -> None:
        await self.dispatcher.drained()
        await self._sink_changed.until(lambda: not self.train_sink.is_full)
        await self.policy.reached(self.ship_gate.num_taken)

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
        first = self.log.first_step + self.log.num_trained
        if self._is_checked and first == self._start.version:
            num_freed = self.ledger.num_lost - self._start.rejected
            check_first_step(self.gate, self.dispatcher.admissions, num_freed)
        for shipped, weights in self._in_training.served(self.trace.at, version, first=first):
            for group_id in shipped.group_ids:
                self.ledger.move(group_id, SampleState.TRAINED)
            each = VersionServed(weights, served.sync_seconds)
            self._emit(self.log.trained(shipped, each, admissions=self.dispatcher.admissions))
        if version >= self.config.run.steps:
            self.dispatcher.close()
            self._stopping.changed.notify()
            return
        self._decide()
        if not self.eval_sink.start_due(range(first + 1, version + 1)):
            self._event("warning", f"no eval at version {version}: the last one is still running")

    def _on_eval(self, result: EvalResult) -> None:
        self.watchdog.progress()
        self.trace.evaluated({name: getattr(result, name) for name in result.__slots__})
        self._emit(result.row())

    # --- rows -----------------------------------------------------------------------------------

    def _emit(self, row: Mapping[str, Any]) -> None:
        self._ports.metrics.emit({"time": self._now(), **row})

    def _event(self, level: str, text: str) -> None:
        self._emit({"kind": "event", "level": level, "text": text})
