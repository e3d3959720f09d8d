"""What must hold after every event of a run, however it is broken; all lives of it are one run.

The checks keep their own account (`shadow.py`, and the state of every sample in this life), from
what is written and decided alone. The first thing that does not hold is kept, with its operands and
the events before it.
"""

import hashlib
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.core.ledger import LOST, SampleState
from headway.core.records import Record
from headway.core.rollout import Batch, GroupId, Source
from headway.errors import HeadwayError, InvariantError
from headway.loop.orchestrator import Orchestrator
from headway.resume import Recovered
from headway.sim.faults.shadow import Shadow, content_of
from headway.sim.faults.state import INITIAL, trained
from headway.store.batches import batch_path, read_batch
from headway.weights.folder import COMPLETE

UNEXPECTED = "nothing is raised that nobody expects"
_NUM_EVENTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that must always hold, and did not."""

    invariant: str
    operands: str
    life: int
    at: float
    """Virtual seconds since the start of that life."""
    events: tuple[str, ...]
    """The last ones before it."""


class Invariants:
    """Watches one run through all its lives.

    Args:
        config: of the run.
        run_dir: its directory.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._size = config.rollout.consumer_batch_size
        self._bound = config.bound
        self._limit = config.gate.first_step_limit
        self.shadow = Shadow()
        self.sound_checkpoints: dict[int, bytes] = {0: INITIAL}
        """State by version, of those that nobody damaged."""
        self._kept_checkpoints: set[int] = set()
        """Versions of all that look complete: the newest two are kept."""
        self.states: dict[int, bytes] = {0: INITIAL}
        """Of the trainer, by version, as the batch files give them."""
        self.files: dict[int, bytes] = {}
        """Digest of every batch file that was handed over."""
        self._trained_prompts: dict[int, int] = {}
        self.violation: Violation | None = None
        self._events: deque[str] = deque(maxlen=_NUM_EVENTS)
        self._digest = hashlib.blake2b(digest_size=16)
        self._life = -1
        self._now: Callable[[], float] = lambda: 0.0
        self._orchestrator: Orchestrator | None = None
        self._engines: Callable[[], Mapping[str, int]] = dict
        self._states: dict[int, SampleState] = {}
        self._prompts: dict[int, int] = {}
        self._interrupted: deque[int] = deque()
        self._inputs: deque[int] = deque()
        """Prompts of dropped samples; after them comes the task source."""
        self._next_id = self._next_position = 0
        self._version = self._published = self._step = 0
        self._num_admitted = self._num_freed = 0
        self._has_served = False

    # --- what is said ---------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """Hash of all events so far, hexadecimal."""
        return self._digest.hexdigest()

    def event(self, what: str) -> None:
        """Something happened."""
        line = f"{self._now():10.3f}  {what}"
        self._events.append(line)
        self._digest.update(line.encode())

    def broken(self, invariant: str, operands: str) -> None:
        """Something does not hold; only the first time counts."""
        if self.violation is None:
            self.violation = Violation(
                invariant=invariant,
                operands=operands,
                life=self._life,
                at=self._now(),
                events=tuple(self._events),
            )

    def unexpected(self, error: BaseException) -> None:
        """Something was raised that no fault accounts for."""
        self.broken(UNEXPECTED, "".join(traceback.format_exception(error)))

    def require(self, holds: bool, invariant: str, operands: Callable[[], str]) -> None:
        """`broken`, unless it holds."""
        if not holds:
            self.broken(invariant, operands())

    # --- a life begins --------------------------------------------------------------------------

    def begins(
        self, life: int, now: Callable[[], float], recovered: Recovered | None, first_version: int
    ) -> None:
        """A process starts; `first_version` is what its trainer starts from."""
        self._life, self._now = life, now
        self.event(f"life {life} begins" + (" with a resume" if recovered else ""))
        shadow = self.shadow
        if recovered is not None:
            shadow.adopt(self._run_dir, recovered.database)
            self._check_recovered(recovered, first_version)
        self._version = self._published = first_version
        kept = dict.fromkeys(shadow.of_state(SampleState.BATCHED), SampleState.BATCHED)
        kept |= dict.fromkeys(shadow.of_state(SampleState.ACCEPTED), SampleState.ACCEPTED)
        self._states = kept
        running, samples = shadow.of_state(SampleState.RUNNING), shadow.samples
        self._prompts = {one: sample.task.position for one, sample in samples.items()}
        self._interrupted = deque(running)
        self._inputs = deque(self._prompts[one] for one in sorted(shadow.waiting))
        self._next_id, self._next_position = len(samples), shadow.next_position
        self._num_admitted = self._num_freed = 0
        self._has_served = False
        self._step = len(shadow.batches)
        self._orchestrator = None

    def _check_recovered(self, recovered: Recovered, first_version: int) -> None:
        state, version = recovered.state, recovered.state.version
        self.require(
            version == first_version == max(self.sound_checkpoints),
            "the newest sound checkpoint is used",
            lambda: (
                f"the run is at {version}, its trainer at {first_version}, "
                f"sound are {sorted(self.sound_checkpoints)}"
            ),
        )
        for difference in self.shadow.differences(recovered.database):
            self.broken("the ledger on disk is what was recorded", difference)
        accepted = [trainable.group.group_id for _, trainable in state.accepted]
        self.require(
            sorted(accepted) == self.shadow.of_state(SampleState.ACCEPTED),
            "finished samples come back from the spool",
            lambda: f"{sorted(accepted)}, {self.shadow.of_state(SampleState.ACCEPTED)} on record",
        )
        for _, trainable in state.accepted:
            self._check_content(trainable.group.group_id, content_of(trainable.group))

    def runs(self, orchestrator: Orchestrator, engines: Callable[[], Mapping[str, int]]) -> None:
        """The loop of this life; `engines` says which are live, and what each has loaded."""
        self._orchestrator, self._engines = orchestrator, engines

    # --- what is written ------------------------------------------------------------------------

    def applied(self, records: Sequence[Record]) -> None:
        """A transaction is on disk."""
        self.shadow.apply(records)
        self.event(f"{len(records)} records written")

    def handed_over(self, batch: Batch) -> None:
        """The trainer is about to be told of a batch."""
        step = batch.step
        ids = tuple(one.group.group_id for one in batch.groups)
        self.event(f"batch {step} handed over: {ids}")
        on_record = self.shadow.batches.get(step)
        self.require(
            on_record == ids,
            "a batch is on record before it is handed over",
            lambda: f"batch {step} is {ids}, on record {on_record}",
        )
        self._check_file(step)

    def _check_file(self, step: int) -> None:
        path = batch_path(self._run_dir, step)
        try:
            content = path.read_bytes()
        except OSError as error:
            self.broken("a batch is on disk before it is handed over", f"{path.name}: {error}")
            return
        digest = hashlib.sha256(content).digest()
        known = self.files.get(step)
        if known is not None:
            self.require(
                known == digest, "a batch that was handed over never changes", lambda: path.name
            )
            return
        self.files[step] = digest
        if step in self.states:
            self.states[step + 1] = trained(self.states[step], content)
        try:
            self._check_batch(step, read_batch(path))
        except HeadwayError as error:
            self.broken("a batch can be read back", str(error))

    def _check_batch(self, step: int, batch: Batch) -> None:
        bound = self._bound.guaranteed_age
        self.require(batch.step == step, "a file holds its own batch", lambda: f"{batch.step}")
        self.require(
            len({one.group.group_id for one in batch.groups}) == self._size,
            "a batch holds B samples",
            lambda: f"batch {step}: {len(batch.groups)}",
        )
        for trainable in batch.groups:
            group = trainable.group
            before = self._trained_prompts.setdefault(group.task.position, step)
            self.require(
                before == step,
                "no prompt is trained twice",
                lambda at=group.task.position, one=before: f"{at} in batches {one} and {step}",  # type: ignore[misc]
            )
            self._check_content(group.group_id, content_of(group))
            heads = [one.version_runs.head for one in group.rollouts if one.version_runs]
            admitted_at = self.shadow.samples[group.group_id].version
            self.require(
                min(heads, default=admitted_at) >= admitted_at,
                "no token is older than the admission of its sample",
                lambda heads=heads, at=admitted_at: f"heads {heads}, admitted at {at}",  # type: ignore[misc]
            )
            ages = [
                step - rollout.version_runs.head
                for rollout in group.rollouts
                if rollout.num_trainable and rollout.source is Source.LIVE
            ]
            self.require(
                all(age >= 0 and (bound is None or age <= bound) for age in ages),
                "no token is older than guaranteed",
                lambda ages=ages: f"ages {ages} in batch {step}, guaranteed {bound}",  # type: ignore[misc]
            )

    def _check_content(self, one: GroupId, content: bytes) -> None:
        sample = self.shadow.samples.get(one)
        self.require(
            sample is not None and sample.content == content,
            "a sample stays what it was when it finished",
            lambda: f"sample {one}",
        )

    # --- trainer and engines --------------------------------------------------------------------

    def trains(self, step: int, content: bytes) -> None:
        """The trainer has read a batch."""
        self.event(f"trainer reads batch {step}")
        self.require(
            self.files.get(step) == hashlib.sha256(content).digest(),
            "what is trained is what was handed over",
            lambda: f"batch {step}",
        )

    def published(self, version: int, state: bytes) -> None:
        """The trainer has published."""
        self.event(f"trainer publishes version {version}")
        self._published = max(self._published, version)
        self._check_state("what is published was trained on every batch, once", version, state)

    def saved(self, version: int, state: bytes) -> None:
        """The trainer has saved a checkpoint."""
        self.event(f"trainer saves version {version}")
        self._check_state("what is saved was trained on every batch, once", version, state)
        above = {one for one in self._kept_checkpoints if one > version}
        below = sorted({*self._kept_checkpoints, version} - above)
        self._kept_checkpoints = {*above, *below[-self._config.actor.keep_checkpoints :]}
        known = {**self.sound_checkpoints, version: state}
        self.sound_checkpoints = {
            one: state for one, state in known.items() if one in {0, *self._kept_checkpoints}
        }

    def damaged(self, version: int) -> None:
        """Somebody broke a checkpoint."""
        self.sound_checkpoints.pop(version, None)
        folder = self._run_dir / "checkpoints" / f"step-{version:06d}"
        if not (folder / COMPLETE).is_file():
            self._kept_checkpoints.discard(version)

    def loaded(self, engine: str, version: int, state: bytes) -> None:
        """An engine has loaded a version."""
        self.event(f"{engine} loads version {version}")
        self._check_state("engines serve what was published", version, state)

    def _check_state(self, invariant: str, version: int, state: bytes) -> None:
        wanted = self.states.get(version)
        self.require(
            wanted == state,
            invariant,
            lambda: (
                f"version {version} is {state.hex()[:8]}, by the batches "
                f"{wanted.hex()[:8] if wanted else None}"
            ),
        )

    # --- events of the loop ---------------------------------------------------------------------

    def emit(self, row: Mapping[str, Any]) -> None:
        """A row of the trace: this is its sink."""
        kind = row["e"]
        # What a trainer says of itself holds times of this machine.
        values = " ".join(f"{k}={row[k]}" for k in row if k not in ("t", "e", "stats", "rollouts"))
        self.event(f"{kind} {values}")
        match kind:
            case "admitted":
                self._admitted(row["id"], row["position"], row["version"])
            case "ended":
                to = SampleState.FAILED if "failed" in row else SampleState.FINISHED
                self._move((row["id"],), SampleState.RUNNING, to)
            case "judged":
                accepted = row["rejected"] is None
                to = SampleState.ACCEPTED if accepted else SampleState.REJECTED
                self._move((row["id"],), SampleState.FINISHED, to)
            case "dropped":
                self._dropped(row["ids"])
            case "batch":
                self._batch(row["step"], row["ids"])
            case "announced":
                self.require(
                    row["version"] <= self._published,
                    "only what the trainer published is announced",
                    lambda: f"version {row['version']}, published {self._published}",
                )
            case "served":
                self._served(row["version"])
            case _:
                pass
        self._check_ledger()

    def _check_ledger(self) -> None:
        if self._orchestrator is None:
            return
        try:
            self._orchestrator.ledger.check()
        except InvariantError as error:
            self.broken("the ledger adds up", str(error))

    def _move(self, ids: Sequence[int], at: SampleState, to: SampleState) -> None:
        for one in ids:
            now = self._states.get(one)
            self.require(
                now is at,
                f"only a sample that is {at} becomes {to}",
                lambda one=one, now=now: f"sample {one} was {now}",  # type: ignore[misc]
            )
            self._states[one] = to
        if to in LOST:
            self._num_freed += len(ids)

    def _admitted(self, one: int, position: int, version: int) -> None:
        if self._interrupted:
            number = self._interrupted.popleft()
            wanted = self._prompts[number]
        else:
            number, self._next_id = self._next_id, self._next_id + 1
            wanted = self._inputs.popleft() if self._inputs else self._next_position
        self._prompts[one] = position
        self._next_position = max(self._next_position, position + 1)
        self.require(
            (one, position) == (number, wanted),
            "no prompt is skipped, and none is issued out of turn",
            lambda: f"sample {one} has prompt {position}; due was sample {number} with {wanted}",
        )
        self._states[one] = SampleState.RUNNING
        self._num_admitted += 1
        rollout, states = self._config.rollout, self._states.values()
        running = sum(state is SampleState.RUNNING for state in states)
        self.require(
            running <= rollout.max_concurrent,
            "no more samples run than may",
            lambda: f"{running} of {rollout.max_concurrent}",
        )
        self.require(
            version == self._version,
            "a sample is admitted at the version that is served",
            lambda: f"{version}, served {self._version}",
        )
        if self._limit is None:
            return
        inside = sum(state not in LOST for state in states)
        places = (rollout.max_head_offpolicyness + version + 1) * self._size
        self.require(
            inside <= places,
            "the gate holds: samples in the system <= (S + version + 1) * B",
            lambda: f"{inside} > {places} at version {version}",
        )
        fresh = self._num_admitted - self._num_freed
        self.require(
            self._has_served or fresh <= self._limit,
            "the first step of a life admits at most (S + 1) * B samples",
            lambda: f"{self._num_admitted} admitted, {self._num_freed} of them lost since",
        )

    def _dropped(self, ids: Sequence[int]) -> None:
        self._move(ids, SampleState.ACCEPTED, SampleState.DROPPED)
        self._inputs.extendleft(self._prompts[one] for one in reversed(ids))

    def _batch(self, step: int, ids: Sequence[int]) -> None:
        self.require(
            step == self._step,
            "batches are made in order, each once",
            lambda: f"batch {step} after {self._step - 1}",
        )
        self._step = step + 1
        self._move(ids, SampleState.ACCEPTED, SampleState.BATCHED)

    def _served(self, version: int) -> None:
        self.require(
            self._version < version <= self._published,
            "versions only rise, and none is served that was not published",
            lambda: f"{version} after {self._version}, published {self._published}",
        )
        self._version = version
        self._has_served = True
        loaded = self._engines()
        self.require(
            all(one >= version for one in loaded.values()),
            "a version is served once every live engine has loaded it",
            lambda: f"version {version}, loaded are {dict(loaded)}",
        )
