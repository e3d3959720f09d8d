"""The trace: what came into the loop, and what the loop decided, in the order in which it did.

Inputs are everything that the loop does not decide itself: a sample ended, the trainer published a
version, the engines serve it, a batch is on disk. Decisions follow from the inputs and their order
alone, since each is taken in the same step of the event loop as the input that allows it. So the
same inputs give the same decisions, whatever the clock: `headway replay` checks that by the hash.

This is also where everything that a resume needs is recorded (`core/records.py`): what was not told
to the trace did not happen.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from headway.core.ledger import SampleState
from headway.core.pacing import PacingState
from headway.core.records import (
    Accepted,
    Admitted,
    Evaluated,
    Lost,
    Record,
    RewardTotals,
    Served,
    Trained,
    batched,
)
from headway.core.rollout import Batch, Group, GroupId, Rollout, Task, TrainableGroup
from headway.core.totals import BatchTotals, Length, StepTotals
from headway.ports import MetricsSink, PublishedWeights

DECISIONS = ("admitted", "judged", "dropped", "batch")
"""Kinds of rows that the hash covers."""

DIGEST_BYTES = 16

_encode = msgspec.json.Encoder().encode


def digest_of(decisions: Iterable[Mapping[str, Any]]) -> str:
    """The hash of recorded decisions, as `Trace.digest` has it; their times do not count."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for row in decisions:
        values = [value for key, value in row.items() if key not in ("t", "e")]
        digest.update(_encode((row["e"], *values)))
    return digest.hexdigest()


class Trace:
    """Writes rows `{"t": seconds, "e": kind, ...}` and hashes the decisions among them.

    Args:
        now: seconds since the start of the run.
        sink: takes the rows; None: only the hash is kept.
        record: takes the records; None: nothing is recorded, and the run cannot be resumed.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        sink: MetricsSink | None,
        record: Callable[[Record], None] | None = None,
    ) -> None:
        self._now = now
        self._sink = sink
        self._record = record
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.num_inputs = 0
        self.num_decisions = 0
        self.at = 0.0
        """When the last input came: what decisions take for the present, so that a replay takes
        them at the same instants."""

    @property
    def digest(self) -> str:
        """Hash of all decisions so far, hexadecimal."""
        return self._hash.hexdigest()

    # --- inputs -------------------------------------------------------------------------------

    def ended(self, group_id: GroupId, ended: Group | Exception) -> None:
        """A sample was fetched: with its group, or with the error that it failed for."""
        if isinstance(ended, Group):
            rows = [] if self._sink is None else [_rollout(one) for one in ended.rollouts]
            self._input("ended", id=group_id, rollouts=rows)
        else:
            failure = str(getattr(ended, "failure_class", type(ended).__name__))
            self._input("ended", id=group_id, failed=failure)
            if self._record:
                self._record(Lost(group_id=group_id, state=SampleState.FAILED, reason=failure))

    def announced(self, weights: PublishedWeights) -> None:
        """The watcher has seen new weights."""
        self._input("announced", version=weights.version, stats=dict(weights.stats))

    def served(self, version: int) -> None:
        """All engines serve this version."""
        self._input("served", version=version)
        if self._record:
            self._record(Served(version=version))

    def shipped(self, batch: Batch, totals: BatchTotals, pacing: PacingState) -> None:
        """A batch is on disk."""
        self._input("shipped", step=batch.step)
        if self._record:
            self._record(batched(batch, totals, pacing))

    def trained(self, step: int, totals: StepTotals) -> None:
        """The version that a batch produced is served. Nothing is decided by it beyond `served`."""
        if self._record:
            self._record(Trained(step=step, totals=totals))

    def gave_up(self, step: int) -> None:
        """A batch has been held for `wait_seconds`."""
        self._input("gave_up", step=step)

    def ordered(self, what: str) -> None:
        """Somebody outside said `pause`, `resume` or `close`."""
        self._input("ordered", what=what)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """An environment was evaluated. Nothing is decided by it, so it is no row."""
        if self._record:
            self._record(Evaluated(result=row))

    # --- decisions ----------------------------------------------------------------------------

    def admitted(self, group_id: GroupId, task: Task, version: int) -> None:
        """The gate let a sample in."""
        self._decision(
            "admitted",
            {
                "id": group_id,
                "env": task.env,
                "key": task.key,
                "position": task.position,
                "version": version,
            },
        )
        if self._record:
            self._record(Admitted(group_id=group_id, task=task, version=version))

    def judged(
        self,
        judged: TrainableGroup,
        reason: str | None,
        rewards: RewardTotals,
        lengths: tuple[Length, ...] = (),
    ) -> None:
        """A finished sample was accepted, or rejected for a reason; `rewards` count it in."""
        group_id = judged.group.group_id
        self._decision("judged", {"id": group_id, "rejected": reason})
        if self._record and reason is None:
            self._record(Accepted(trainable=judged, rewards=rewards))
        elif self._record and reason is not None:
            state = SampleState.REJECTED
            self._record(
                Lost(
                    group_id=group_id, state=state, reason=reason, rewards=rewards, lengths=lengths
                )
            )

    def dropped(
        self, step: int, lengths: Mapping[GroupId, tuple[Length, ...]], reason: str
    ) -> None:
        """Samples were too old for this batch and all later ones; their prompts are requeued."""
        self._decision("dropped", {"step": step, "ids": [*lengths]})
        if self._record:
            for group_id, each in lengths.items():
                self._record(
                    Lost(
                        group_id=group_id,
                        state=SampleState.DROPPED,
                        reason=reason,
                        is_requeued=True,
                        lengths=each,
                    )
                )

    def batch(self, step: int, group_ids: Sequence[GroupId], num_trimmed: int) -> None:
        """A batch was put together."""
        self._decision("batch", {"step": step, "ids": group_ids, "trimmed": num_trimmed})

    def _input(self, kind: str, **values: Any) -> None:
        self.num_inputs += 1
        self.at = self._now()
        if self._sink is not None:
            self._sink.emit({"t": self.at, "e": kind, **values})

    def _decision(self, kind: str, values: Mapping[str, Any]) -> None:
        self.num_decisions += 1
        self._hash.update(_encode((kind, *values.values())))
        if self._sink is not None:
            self._sink.emit({"t": self.at, "e": kind, **values})


def _rollout(rollout: Rollout) -> dict[str, Any]:
    timings = rollout.timings
    return {
        "reward": rollout.reward,
        "turns": rollout.num_turns,
        "prompt": rollout.num_tokens - rollout.num_trainable,
        "runs": rollout.version_runs.runs,
        "finish": rollout.finish_reason,
        "source": rollout.source,
        "seconds": timings.finished_at - timings.started_at,
        "generation": timings.generation_seconds,
        "environment": timings.environment_seconds,
    }
