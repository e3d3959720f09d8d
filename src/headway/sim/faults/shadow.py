"""What the run on disk must hold, by the records that were written: a second, simpler account."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.ledger import LOST, SampleState
from headway.core.records import Accepted, Admitted, Batched, Lost, Record
from headway.core.rollout import Group, Task
from headway.store.batches import batch_path, read_batch
from headway.store.database import RunDatabase


@dataclass(slots=True)
class Sample:
    """One sample as it is on record."""

    task: Task
    version: int
    state: SampleState = SampleState.RUNNING
    reason: str | None = None
    step: int | None = None
    content: bytes = b""
    """Digest of a finished group, without what a batch may change of it."""


def content_of(group: Group) -> bytes:
    """Digest of a group's tokens, rewards and times; trimming leaves it as it is."""
    digest = hashlib.blake2b(digest_size=16)
    for rollout in group.rollouts:
        digest.update(rollout.token_ids.tobytes())
        digest.update(repr((rollout.episode, rollout.reward, rollout.timings)).encode())
    return digest.digest()


@dataclass(slots=True)
class Shadow:
    """Samples and batches on record."""

    samples: dict[int, Sample] = field(default_factory=dict)
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    """Dropped samples whose prompts have not been issued again, in that order."""

    def apply(self, records: Iterable[Record]) -> None:
        """These are on disk from now on."""
        for record in records:
            match record:
                case Admitted(group_id=one, task=task, version=version):
                    self._admit(one, task, version)
                case Accepted(trainable=trainable):
                    sample = self.samples[trainable.group.group_id]
                    sample.state, sample.reason = SampleState.ACCEPTED, None
                    sample.content = content_of(trainable.group)
                case Lost(group_id=one, state=state, reason=reason, is_requeued=is_requeued):
                    sample = self.samples[one]
                    sample.state, sample.reason = state, reason
                    if is_requeued:
                        self.waiting.append(one)
                case Batched(step=step, group_ids=ids):
                    self.batch(step, ids)
                case _:
                    pass

    def _admit(self, one: int, task: Task, version: int) -> None:
        if one in self.samples:
            self.samples[one].state = SampleState.RUNNING
            self.samples[one].version = version
        else:
            self.samples[one] = Sample(task, version)
        waiting = self.waiting
        self.waiting = [w for w in waiting if self.samples[w].task.position != task.position]

    def batch(self, step: int, ids: Sequence[int]) -> None:
        """These samples are batch `step`."""
        self.batches[step] = tuple(ids)
        for one in ids:
            sample = self.samples[one]
            sample.state, sample.reason, sample.step = SampleState.BATCHED, None, step

    def of_state(self, *states: SampleState) -> list[int]:
        """Numbers of the samples in these states, in order."""
        return [one for one, sample in sorted(self.samples.items()) if sample.state in states]

    @property
    def num_lost(self) -> int:
        """Samples that will never be trained."""
        return sum(sample.state in LOST for sample in self.samples.values())

    @property
    def next_position(self) -> int:
        """The first prompt that was never issued."""
        return max((one.task.position + 1 for one in self.samples.values()), default=0)

    def adopt(self, run_dir: Path, database: RunDatabase) -> None:
        """Follow the resume, which puts a batch on record that was only written."""
        step = len(self.batches)
        if not database.rows("SELECT 1 FROM batches WHERE step = ?", step):
            return
        ids = [one.group.group_id for one in read_batch(batch_path(run_dir, step)).groups]
        if all(self.samples[one].state is SampleState.ACCEPTED for one in ids):
            self.batch(step, ids)

    def differences(self, database: RunDatabase) -> list[str]:
        """What the file says otherwise; a few of them."""
        found = {row[0]: row[1:] for row in database.rows(_SAMPLES)}
        mine = {
            number: (str(one.state), one.reason, one.step, one.task.position, one.version)
            for number, one in self.samples.items()
        }
        said = [
            f"sample {one}: on disk {found.get(one)}, by its records {mine.get(one)}"
            for one in sorted(found.keys() | mine.keys())
            if found.get(one) != mine.get(one)
        ]
        spooled = {one for (one,) in database.rows("SELECT DISTINCT sample FROM rollouts")}
        accepted = set(self.of_state(SampleState.ACCEPTED))
        if spooled != accepted:
            said.append(f"the spool holds {sorted(spooled)}, accepted are {sorted(accepted)}")
        steps = [step for (step,) in database.rows("SELECT step FROM batches ORDER BY step")]
        if steps != sorted(self.batches):
            said.append(f"batches on disk {steps}, by the records {sorted(self.batches)}")
        return said[:4]


_SAMPLES = "SELECT id, state, reason, step, position, version FROM samples"
