"""The dispatcher: keeps as much work in flight as the gate allows.

| loop       | consumes       | produces     | waits for              | unblocked by            |
|------------|----------------|--------------|------------------------|-------------------------|
| feed       | task source    | input queue  | room in the input queue| submission              |
| submission | input and eval | sample tasks | a prompt and capacity  | `pump`, by whoever may  |
|            | queue          |              |                        | have opened the gate    |
| (samples)  |                | output queue | room in the output     | whoever fetches         |

It charges a sample to the ledger when it starts and frees its concurrency slot when it is fetched:
a slow consumer therefore holds slots, which is the back-pressure. It knows no sink.

Admission (`pump`) is synchronous: it happens in the same step of the event loop as whatever opened
the gate, so that what is admitted follows from the order of events alone (`loop/trace.py`).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from headway.core.gate import CapacityGate
from headway.core.ledger import Admission, Ledger, SampleState
from headway.core.records import RunState
from headway.core.rollout import Group, GroupId, Task
from headway.errors import (
    EngineError,
    EnvironmentFailure,
    InvariantError,
    TaskSourceExhausted,
)
from headway.loop.policy import PolicyHandle
from headway.loop.rollout_runner import SampleRequest
from headway.loop.signal import Signal, WaitBoard
from headway.loop.trace import Trace
from headway.ports import TaskSource

BURST = 256
"""Samples started before other tasks get a turn."""


class FinishedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that ended: with a group, or with the error that used up its retries."""

    request: SampleRequest
    group: Group | None
    error: EngineError | EnvironmentFailure | None

    @property
    def ended(self) -> Group | Exception:
        """Whichever it is."""
        if self.group is not None:
            return self.group
        assert self.error is not None
        return self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherStatistics:
    """Counts of samples at one instant."""

    num_running: int
    num_eval_running: int
    in_queue: int
    out_queue: int
    capacity: int
    admissions: int
    is_paused: bool


class Dispatcher:
    """Separate input and output queues, a feed loop and a submission loop, `pause`/`resume`.

    Args:
        run_sample: plays one sample; raises EngineError or EnvironmentFailure when it fails for
            good. Any other exception is a fault of Headway and ends the run.
        queue_size: of the input and of the output queue, samples.
        eval_concurrent: eval samples in flight, beside the training ones. They are not charged to
            the gate.
        limit: samples that may be admitted now for other reasons than the gate's (pacing, a parked
            batch); None: no limit.
    """

    def __init__(
        self,
        *,
        run_sample: Callable[[SampleRequest], Awaitable[Group]],
        source: TaskSource,
        gate: CapacityGate,
        ledger: Ledger,
        policy: PolicyHandle,
        waits: WaitBoard,
        trace: Trace,
        limit: Callable[[], int | None],
        queue_size: int,
        group_size: int,
        temperature: float,
        eval_concurrent: int,
        first_group_id: int = 0,
    ) -> None:
        self._run_sample = run_sample
        self._source = source
        self._gate = gate
        self._ledger = ledger
        self._policy = policy
        self._waits = waits
        self._trace = trace
        self._limit = limit
        self._tasks: asyncio.TaskGroup | None = None
        self._queue_size = queue_size
        self._group_size = group_size
        self._temperature = temperature
        self._eval_concurrent = eval_concurrent
        self._next_group_id = first_group_id
        self._interrupted: deque[tuple[GroupId, Task]] = deque()
        self._inputs: deque[Task] = deque()
        self._evals: deque[SampleRequest] = deque()
        self._outputs: asyncio.Queue[FinishedSample] = asyncio.Queue(queue_size)
        self._changed = Signal()
        self._room = Signal()
        self._paused = False
        self._closed = False
        self._is_abandoned = False
        self._source_ended = False
        self._num_eval_running = 0
        self._is_interrupted = False
        self.admissions = 0

    def restore(self, state: RunState) -> None:
        """Go on where an earlier life of the run was cut off: what was running goes first, under
        its old number, then the prompts of dropped samples, then the source where it was."""
        self._interrupted.extend(state.interrupted)
        self._inputs.extend(state.requeued)
        self._next_group_id = state.num_admitted
        self._source.restore(state.next_position)

    # --- what others call -------------------------------------------------------------------

    def pause(self) -> None:
        """Stop starting samples; running ones go on and can be fetched."""
        self._trace.ordered("pause")
        self._paused = True

    def resume(self) -> None:
        """Start samples again, at once."""
        self._trace.ordered("resume")
        self._paused = False
        self.pump()

    def close(self) -> None:
        """Start no more training samples, ever (drain); evals still run."""
        if not self._closed:
            self._trace.ordered("close")
            self._closed = True
            self._changed.notify()

    def abandon(self) -> None:
        """The run has ended: nothing starts any more, whoever still pumps."""
        self._closed = self._is_abandoned = True
        self._evals.clear()

    def pump(self) -> None:
        """Start what can be started now. Whoever may have opened the gate calls this."""
        if self._tasks is not None and self._start_samples(self._tasks):
            self._waits.restart("submission")
        if self._is_interrupted or self._source_ended or self._closed:
            self._changed.notify()

    def requeue(self, tasks: list[Task]) -> None:
        """Put prompts whose samples were discarded first in line, under new sample numbers."""
        self._inputs.extendleft(reversed(tasks))

    def submit_eval(self, requests: list[SampleRequest]) -> None:
        """Queue eval samples; the caller bounds their number (one evaluation at a time)."""
        self._evals.extend(requests)
        self.pump()

    async def fetch(self) -> FinishedSample:
        """Take one finished sample and free its slot; taking is the last thing that can be
        cancelled. The caller `pump`s once it has dealt with it."""
        if self._outputs.empty():
            with self._waits.waiting("fetch", "a finished sample"):
                finished = await self._outputs.get()
        else:
            finished = self._outputs.get_nowait()
        # From here on there is no await: taking it and freeing its slot is one step.
        request, error = finished.request, finished.error
        if not request.is_eval:
            self._trace.ended(request.group_id, finished.ended)
            if error is None:
                self._ledger.move(request.group_id, SampleState.FINISHED)
            else:
                reason = str(error.failure_class)
                self._ledger.move(request.group_id, SampleState.FAILED, reason)
        return finished

    async def drained(self) -> None:
        """Return once no sample is running or waits to be fetched; the caller has the deadline."""
        await self._changed.until(self._is_drained)

    def _is_drained(self) -> bool:
        running = self._ledger.num_running + self._num_eval_running
        return not running and not self._evals and self._outputs.empty()

    def tasks_owe(self) -> str | None:
        """The prompt that there is room for and the task source has not given yet, in words; None:
        nobody waits for one."""
        is_admitting = not (self._paused or self._closed or self._source_ended)
        if is_admitting and not self._num_waiting and self._capacity() > 0:
            return f"a prompt (it gave {self._next_group_id:,} so far)"
        return None

    def statistics(self) -> DispatcherStatistics:
        """Counts right now."""
        return DispatcherStatistics(
            num_running=self._ledger.num_running,
            num_eval_running=self._num_eval_running,
            in_queue=self._num_waiting,
            out_queue=self._outputs.qsize(),
            capacity=self._capacity(),
            admissions=self.admissions,
            is_paused=self._paused,
        )

    # --- loops --------------------------------------------------------------------------------

    async def run_feed(self) -> None:
        """Keep the input queue filled from the task source until the source ends."""
        while True:
            if not self._has_room():
                await self._waits.until(
                    "feed", "room in the input queue", self._room, self._has_room
                )
            task = await self._source.next_task()
            if task is None:
                self._source_ended = True
                self._changed.notify()
                return
            self._inputs.append(task)
            if len(self._inputs) == 1:
                self.pump()

    async def run_submission(self, tasks: asyncio.TaskGroup) -> None:
        """Lend the TaskGroup to `pump`, and go on where a large opening was interrupted. Raises
        TaskSourceExhausted."""
        self._tasks = tasks
        self.pump()
        while True:
            await self._waits.until(
                "submission",
                self._what_for,
                self._changed,
                lambda: self._is_interrupted or self._is_exhausted(),
            )
            if self._is_exhausted():
                raise TaskSourceExhausted(
                    f"the task source ended after {self._next_group_id} samples, before the step "
                    "target: give it more tasks, let it repeat, or lower run.steps"
                )
            await asyncio.sleep(0)
            self._start_samples(tasks)

    @property
    def _num_waiting(self) -> int:
        return len(self._interrupted) + len(self._inputs)

    def _has_room(self) -> bool:
        return len(self._inputs) < self._queue_size

    def _is_exhausted(self) -> bool:
        """No prompt is left, and neither is anything that could still fill a batch."""
        target = self._gate.target_samples
        return (
            self._source_ended
            and not self._num_waiting
            and self._capacity() > 0
            and (target is None or self._ledger.num_accepted < target)
            and self._ledger.num_running == 0
            and self._outputs.empty()
        )

    def _capacity(self) -> int:
        if self._closed:
            return 0
        ledger = self._ledger
        slots = self._gate.slots(self._policy.version, ledger.num_accepted, ledger.num_running)
        limit = self._limit()
        return slots if limit is None else min(slots, limit)

    def _what_for(self) -> str:
        if self._paused:
            return "resume()"
        if self._closed:
            return "nothing: admission is closed"
        if not self._num_waiting and self._capacity() > 0:
            return "the task source"
        ledger, version = self._ledger, self._policy.version
        if ledger.num_running >= self._gate.max_concurrent:
            return "a rollout to finish (max_concurrent_rollouts)"
        if self._gate.slots(version, ledger.num_accepted, ledger.num_running) <= 0:
            return f"version {version + 1} (max_head_offpolicyness)"
        if self._policy.announced > version:
            return f"version {self._policy.announced} to be served"
        return "the trainer to take a batch (pacing, or a parked batch)"

    def _start_samples(self, tasks: asyncio.TaskGroup) -> int:
        """Start what may start, at most `BURST`: a large opening must not freeze the loop."""
        started = 0
        if self._is_abandoned:  # an evaluation may fall due in the very turn in which the run ends
            return 0
        if not self._paused:
            while (
                started < BURST and self._evals and self._num_eval_running < self._eval_concurrent
            ):
                self._num_eval_running += 1
                tasks.create_task(self._run(self._evals.popleft()))
                started += 1
            if num_waiting := self._num_waiting:
                for _ in range(min(self._capacity(), num_waiting, BURST - started)):
                    tasks.create_task(self._run(self._admit()))
                    started += 1
        self._is_interrupted = started == BURST
        if 2 * len(self._inputs) <= self._queue_size:
            self._room.notify()
        return started

    def _admit(self) -> SampleRequest:
        if self._interrupted:
            group_id, task = self._interrupted.popleft()
        else:
            group_id, task = GroupId(self._next_group_id), self._inputs.popleft()
            self._next_group_id += 1
        version = self._policy.version
        self._ledger.admit(group_id, Admission(version, task.env))
        self._trace.admitted(group_id, task, version)
        self.admissions += 1
        return SampleRequest(
            group_id=group_id,
            task=task,
            group_size=self._group_size,
            temperature=self._temperature,
        )

    async def _run(self, request: SampleRequest) -> None:
        group: Group | None = None
        error: EngineError | EnvironmentFailure | None = None
        try:
            group = await self._run_sample(request)
        except (EngineError, EnvironmentFailure) as failure:
            error = failure
        if self._is_abandoned:
            # It was cancelled and failed in the same instant, and said the latter: what took its
            # cancellation for an error must not wait for room that nobody makes any more.
            return
        finished = FinishedSample(request=request, group=group, error=error)
        if self._outputs.full():
            await self._outputs.put(finished)
        else:
            self._outputs.put_nowait(finished)
        if request.is_eval:
            self._num_eval_running -= 1
            self.pump()

    def drop_running(self, reason: str, *, will_resume: bool) -> None:
        """Account for the samples that a stop cut off. Called once all sample tasks have ended.
        `will_resume`: they are not lost."""
        for group_id, state in self._ledger.living().items():
            if state in (SampleState.RUNNING, SampleState.FINISHED):
                to = SampleState.INTERRUPTED if will_resume else SampleState.DROPPED
                self._ledger.move(group_id, to, reason)
        if self._ledger.num_running:
            raise InvariantError(f"{self._ledger.num_running} samples still run after the stop")
