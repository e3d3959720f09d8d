"""Every seam of Headway as a Protocol: implement one of these to plug your own part in.

Production, tests, simulation, planner and replay differ only in what stands behind these seams.
Every method says who calls it and from which task, whether it may be cancelled, and what it raises.
All times are the event loop's own (`loop.time()`), so that every part also runs in virtual time.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headway.core.records import Record
from headway.core.rollout import Batch, Completion, Task, TrainableGroup


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One engine call: token ids in, token ids out.

    `request_id` is unique within the run and of fixed form, since some engines abort by prefix.
    `max_tokens` counts sampled tokens. `temperature` 0 is greedy.
    """

    request_id: str
    token_ids: list[int]
    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """A complete set of weights that a trainer published.

    `path` is a Hugging Face safetensors folder (None in simulation). `stats` is what the trainer
    reports of the update that produced it: `train_seconds`, `idle_seconds` (waiting for the batch),
    `publish_seconds`, `loss`, `grad_norm`, ... .
    """

    version: int
    path: Path | None
    stats: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """What an engine says of itself, and what its pool knows of it.

    `is_live`: whether it takes requests. `version`: what it serves, where that is known.
    `pause_seconds`: how long running requests stood still in its last weight update.
    """

    num_running: int = 0
    num_waiting: int = 0
    tokens_per_second: float = 0.0
    is_live: bool = True
    version: int | None = None
    pause_seconds: float = 0.0


class Engine(Protocol):
    """An inference engine."""

    @property
    def name(self) -> str:
        """Unique in the pool; used in messages and metrics."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Called by rollout tasks, many at once; cancelled when a rollout's deadline passes or the
        run stops, and the engine must then free the request. Raises EngineError.
        """
        ...

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Serve these weights from now on: every token sampled after this returns bears their
        version, tokens sampled before it bear the version that sampled them.

        Called by the weight watcher, one call at a time, under its deadline. Raises EngineError.
        """
        ...

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """By engine name (a pool gives one each). Called by the metrics loop; may be cancelled.
        Raises EngineError."""
        ...

    async def aclose(self) -> None:
        """Release connections; called once at shutdown under its deadline. Raises nothing."""
        ...


class Transcript(Protocol):
    """The growing trajectory of one rollout, as its environment sees it.

    The environment appends what it says with `observe` and asks the policy with `act`. Token ids,
    log-probabilities, loss mask and version runs are recorded on the way; nothing is re-tokenized.
    """

    @property
    def task(self) -> Task:
        """The prompt to run."""
        ...

    def observe(self, token_ids: list[int]) -> None:
        """Append tokens that the policy did not sample (prompt, tool result, user turn)."""
        ...

    async def act(self, *, max_tokens: int | None = None) -> Completion:
        """Let the policy continue everything so far by one turn, and append what it sampled.

        `max_tokens` caps this turn below the configured `rollout.max_new_tokens`.
        """
        ...


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment says of one finished rollout; `metrics` are averaged per batch."""

    reward: float
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)


class Environment(Protocol):
    """A kind of task: it builds prompts, plays the world's part, and gives the reward."""

    @property
    def name(self) -> str:
        """Stamped on every rollout."""
        ...

    async def run(self, transcript: Transcript) -> None:
        """Play one whole episode. Called in a task per rollout; cancelled at its deadline.

        Whatever it raises, except an EngineError that came from `act`, fails the rollout as the
        environment's fault.
        """
        ...

    def score(self, task: Task, completions: list[Completion]) -> Score:
        """Reward for the finished episode; called once after `run`, in the rollout's task, and
        must not block. Whatever it raises fails the rollout at stage `reward`."""
        ...


class TaskSource(Protocol):
    """A sequence of tasks, numbered from 0 on, whose position can be saved and restored."""

    async def next_task(self) -> Task | None:
        """The task at the current position, then move on; None when there are no more.

        Called by the dispatcher's feed loop only, one call at a time; may be cancelled.
        """
        ...

    def restore(self, position: int) -> None:
        """Make `position` the next one. Called before a run starts."""
        ...


class TrainerLink(Protocol):
    """The orchestrator's end of the hand-off to the trainer."""

    async def ship(self, batch: Batch) -> None:
        """Hand over a persisted batch; called by the ship loop in step order. Raises TrainerError
        or StoreError. Must not wait for the trainer."""
        ...

    async def finish(self, num_steps: int) -> None:
        """There are no batches from `num_steps` on: the trainer saves and ends. Called once."""
        ...


class WeightChannel(Protocol):
    """Where the trainer's published weights appear."""

    async def wait_newer(self, version: int) -> PublishedWeights:
        """Return the newest complete weights above `version`, waiting until there are some.

        Called by the weight watcher only; may be cancelled. Anything else that lies where the
        weights appear (temporary files, strays, incomplete folders) is passed over.
        """
        ...


class RunStore(Protocol):
    """The run on disk."""

    async def write_batch(self, batch: Batch) -> None:
        """Persist before it is shipped: when this returns, the batch is safe. Called by the ship
        loop in step order; when cancelled, the write still completes. Raises StoreError."""
        ...

    async def write_leftovers(self, groups: Sequence[TrainableGroup]) -> None:
        """Save accepted groups that no batch took. Called once, at the end. Raises StoreError."""
        ...

    async def read_batch(self, step: int) -> Batch:
        """A batch as it was written. Called by the ship loop of a resumed run, before it ships
        that batch again. Raises StoreError."""
        ...


class Journal(Protocol):
    """The ledger and the spool: what becomes of every sample, and all that finished and is in no
    batch. Records become safe in the order in which they came."""

    def record(self, record: Record) -> None:
        """Take a record; it is safe some time later, or with the next `flush`. Called from the
        event loop; must neither block nor raise, which is why a failure ends `run`."""
        ...

    async def flush(self) -> None:
        """Return once everything recorded so far is safe. Called by the ship loop around every
        batch, and once at the end; may be cancelled. Raises StoreError."""
        ...

    async def run(self, on_full: Callable[[], None], on_room: Callable[[], None]) -> None:
        """For ever, as a part of the loop: write, call `on_full` when the disk is too far behind,
        and `on_room` when it is no longer. Raises StoreError as soon as writing fails."""
        ...

    def owes(self) -> str | None:
        """What is recorded and not safe yet, in words that change with every write; None: nothing.
        Called by the watchdog."""
        ...


class MetricsSink(Protocol):
    """Takes metric rows; `docs/metrics.md` names every kind of row and its keys."""

    def emit(self, row: Mapping[str, Any]) -> None:
        """Called from the event loop; must not block and must not raise."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Everything that the loop is connected to.

    `watched` are liveness checks by name: each returns never while its part lives, and raises an
    error that names the dead part.
    """

    engine: Engine
    environments: Mapping[str, Environment]
    source: TaskSource
    trainer: TrainerLink
    channel: WeightChannel
    store: RunStore
    metrics: MetricsSink
    trace: MetricsSink | None = None
    journal: Journal | None = None
    """None: the run cannot be resumed."""
    eval_tasks: Sequence[Task] = ()
    watched: Mapping[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Added to the first metric row: names of engines, whether this is a simulation."""
