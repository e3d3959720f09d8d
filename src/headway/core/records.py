"""What is written down of a run, record by record, and what a resume begins from.

The records follow the life of a sample (`core/ledger.py`). Any prefix of them is a state that the
run was in, so a run that was cut off anywhere goes on from the records that are safe: a sample
whose end was not written down yet runs again, under its old number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.core.bias import Bias
from headway.core.gate import GateState
from headway.core.ledger import Admission, Ledger, SampleState
from headway.core.pacing import PacingState
from headway.core.rollout import Batch, GroupId, Task, TrainableGroup
from headway.core.totals import BatchTotals, InARow, Length, StepTotals, lengths_of
from headway.errors import InvariantError


class RewardTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Over all rollouts judged so far: what the baseline `mean` compares with."""

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        """0 before the first."""
        return self.total / self.count if self.count else 0.0


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """A sample is running; again, if it was before."""

    group_id: GroupId
    task: Task
    version: int


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A sample finished and waits for a batch. `advantages` and all rollouts are in `trainable`."""

    trainable: TrainableGroup
    rewards: RewardTotals


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A sample reached `rejected`, `failed` or `dropped`. `rewards` is None for one that was not
    judged just now; `is_requeued`: its prompt runs again, under a new number."""

    group_id: GroupId
    state: SampleState
    reason: str
    rewards: RewardTotals | None = None
    is_requeued: bool = False
    lengths: tuple[Length, ...] = ()
    """Of its rollouts, if it finished."""


class Batched(msgspec.Struct, frozen=True, kw_only=True):
    """A batch is on disk, and these samples are it."""

    step: int
    group_ids: tuple[GroupId, ...]
    pacing: PacingState
    lengths: tuple[tuple[Length, ...], ...] = ()
    """Of the rollouts of each sample."""
    totals: BatchTotals | None = None


def batched(batch: Batch, totals: BatchTotals, pacing: PacingState) -> Batched:
    """The record of a batch."""
    groups = [trainable.group for trainable in batch.groups]
    return Batched(
        step=batch.step,
        group_ids=tuple(group.group_id for group in groups),
        pacing=pacing,
        lengths=tuple(lengths_of(group, is_trained=True) for group in groups),
        totals=totals,
    )


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The engines serve this version: all batches below it are trained."""

    version: int


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """A batch is trained and its version served."""

    step: int
    totals: StepTotals


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of one environment, as its metric row has it."""

    result: Mapping[str, Any]


Record = Admitted | Accepted | Lost | Batched | Served | Trained | Evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run at a version of its trainer, as data: everything that a resume needs.

    Example:
        >>> RunState(version=0).gate_state(batch_size=8)
        GateState(version=0, admitted=0, accepted=0, rejected=0, running=0)
    """

    version: int
    """The trainer's checkpoint: batches below it are trained, those from it on are trained again.
    """
    num_batches: int = 0
    """Batches on disk; `version .. num_batches - 1` are shipped again as they are."""
    batched: Mapping[GroupId, int] = field(default_factory=dict)
    """Samples of the batches from `version` on, and the step of each."""
    accepted: tuple[tuple[Admission, TrainableGroup], ...] = ()
    """Finished samples that no batch has taken, in the order in which they finished."""
    interrupted: tuple[tuple[GroupId, Task], ...] = ()
    """Samples that were running, in the order of their numbers."""
    requeued: tuple[Task, ...] = ()
    """Prompts of dropped samples that have not been issued again."""
    num_admitted: int = 0
    lost: Mapping[SampleState, Mapping[str, int]] = field(default_factory=dict)
    """Counts by state and reason."""
    next_position: int = 0
    """Of the task source: the first prompt that was never issued."""
    overtaking: tuple[GroupId, ...] = ()
    """Samples in batches that were admitted after one that is in none."""
    rewards: RewardTotals = field(default_factory=RewardTotals)
    pacing: PacingState = field(default_factory=PacingState)
    evals: tuple[Mapping[str, Any], ...] = ()
    """Results so far, as their metric rows have them."""
    batches: Mapping[int, BatchTotals] = field(default_factory=dict)
    """By step, of all that are on disk."""
    steps: Mapping[int, StepTotals] = field(default_factory=dict)
    """By step, of all that were trained by the last life, or one before."""
    bias: Bias = field(default_factory=Bias)
    """Every rollout whose fate is decided."""
    in_a_row: InARow = field(default_factory=InARow)

    @property
    def num_lost(self) -> int:
        """Samples that reached `rejected`, `failed` or `dropped`."""
        return sum(sum(reasons.values()) for reasons in self.lost.values())

    def num_trained(self, batch_size: int) -> int:
        """Samples in the batches below `version`."""
        return self.version * batch_size

    def gate_state(self, batch_size: int) -> GateState:
        """What the gate starts from: samples that have to run again are not in the system."""
        inside = self.num_trained(batch_size) + len(self.batched) + len(self.accepted)
        return GateState(
            version=self.version,
            admitted=self.num_admitted,
            accepted=inside,
            rejected=self.num_lost,
        )

    def ledger(self, batch_size: int) -> Ledger:
        """Every sample in its state."""
        trained = self.num_trained(batch_size)
        ledger = Ledger(GateState(admitted=trained, accepted=trained))
        for state, reasons in self.lost.items():
            ledger.restore_lost(state, reasons)
        for group_id in self.batched:
            ledger.restore(group_id, SampleState.BATCHED, None)
        # Where it matters, what is unbatched is in the order of admission.
        for admission, trainable in sorted(self.accepted, key=lambda one: one[1].group.group_id):
            ledger.restore(trainable.group.group_id, SampleState.ACCEPTED, admission)
        for group_id, _ in self.interrupted:
            ledger.restore(group_id, SampleState.INTERRUPTED, None)
        return ledger

    def check(self, batch_size: int) -> None:
        """Raise InvariantError unless every admitted sample is accounted for, once."""
        gate = self.gate_state(batch_size)
        total = gate.accepted + gate.rejected + len(self.interrupted)
        if total != self.num_admitted or self.version > self.num_batches:
            raise InvariantError(
                f"the run on disk does not add up: admitted {self.num_admitted}, but "
                f"{self.num_trained(batch_size)} trained + {len(self.batched)} in batches to train "
                f"+ {len(self.accepted)} accepted + {gate.rejected} rejected, failed or dropped + "
                f"{len(self.interrupted)} interrupted = {total} (version {self.version}, "
                f"{self.num_batches} batches of {batch_size})"
            )
