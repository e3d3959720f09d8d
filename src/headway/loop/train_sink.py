"""The train sink: finished groups in, advantages, filters, a batch when one can be put together."""

from headway.core.advantages import Baseline, group_advantages
from headway.core.assembly import Selection, select
from headway.core.bias import Bias, Fate
from headway.core.bound import Bound, OverBound, trimmed
from headway.core.filters import FilterName, rejection
from headway.core.guards import EmptyBatchGuard
from headway.core.ledger import Ledger, SampleState
from headway.core.order import Candidate, Order
from headway.core.records import RewardTotals, RunState
from headway.core.rollout import Batch, Group, GroupId, Source, Task, TrainableGroup
from headway.loop.trace import Trace

TOO_OLD = "over_bound"
"""Reason of a sample that is dropped for its age."""


class TrainSink:
    """Buffers accepted groups in completion order, and puts batches together from them.

    Everything is synchronous: judging a group and counting it is one step, and so is taking a
    batch. It charges nothing; a rejected or dropped sample frees its place in the gate, through the
    ledger.
    """

    def __init__(
        self,
        *,
        bound: Bound,
        baseline: Baseline,
        filters: tuple[FilterName, ...],
        ledger: Ledger,
        guard: EmptyBatchGuard,
        trace: Trace,
    ) -> None:
        self._bound = bound
        self._baseline = baseline
        self._filters = filters
        self._ledger = ledger
        self._guard = guard
        self._trace = trace
        self._buffer: dict[GroupId, tuple[Candidate, TrainableGroup]] = {}
        self._overtaking: set[GroupId] = set()
        self._judged: list[float] = []
        self._rewards = RewardTotals()
        self._requeue: list[Task] = []
        self.bias = Bias()
        self.held_for: tuple[GroupId, ...] = ()
        """Unfinished samples that the last attempt to put a batch together has to wait for."""

    def restore(self, state: RunState) -> None:
        """Go on where an earlier life of the run was cut off; the ledger was restored before."""
        self._rewards = state.rewards
        self._overtaking.update(state.overtaking)
        for _, trainable in state.accepted:
            self._buffer_up(trainable)

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def is_full(self) -> bool:
        """Whether a batch's worth of samples is buffered."""
        return len(self._buffer) >= self._bound.batch_size

    def add(self, group: Group) -> str | None:
        """Judge a finished group. Returns the reason when it is rejected, else None.

        Raises EmptyBatchesError when nothing has been trainable for too long.
        """
        rewards, before = group.rewards, self._rewards
        advantages = group_advantages(rewards, self._baseline, before.mean)
        values = rewards.tolist()
        self._rewards = RewardTotals(
            total=before.total + sum(values), count=before.count + len(values)
        )
        self._judged.extend(values)
        reason = rejection(group, advantages, self._filters)
        trainable = TrainableGroup(group=group, advantages=advantages)
        self._trace.judged(trainable, reason, self._rewards)
        if reason is not None:
            self._ledger.move(group.group_id, SampleState.REJECTED, reason)
            self.bias.add(group, Fate.REJECTED)
            self._guard.rejected(group, reason)
            return reason
        self._ledger.move(group.group_id, SampleState.ACCEPTED)
        self._guard.accepted()
        self._buffer_up(trainable)
        return None

    def _buffer_up(self, trainable: TrainableGroup) -> None:
        group = trainable.group
        candidate = _candidate(group, self._ledger.unbatched[group.group_id].version)
        self._buffer[group.group_id] = (candidate, trainable)

    def assemble(self, step: int, *, gave_up: bool = False) -> Batch | None:
        """Put together the batch that `step` trains, or None when it cannot be yet.

        Its groups are in the order of their admission, so that the same samples always make the
        same batch, whichever finished first. Samples too old for it and for all later batches are
        dropped on the way; `take_requeued` has their prompts.
        """
        self.held_for = ()
        if not self.is_full:
            return None
        candidates = [candidate for candidate, _ in self._buffer.values()]
        selection = select(
            step,
            candidates,
            self._ledger.unbatched,
            self._bound,
            overtaking=self._overtaking,
            gave_up=gave_up,
        )
        self.held_for = selection.held_for
        if selection.dropped:
            self._drop(step, selection)
        return self._take(step, selection) if selection.taken else None

    def _drop(self, step: int, selection: Selection) -> None:
        self._trace.dropped(step, selection.dropped, TOO_OLD)
        for group_id in selection.dropped:
            group = self._buffer.pop(group_id)[1].group
            self._ledger.move(group_id, SampleState.DROPPED, TOO_OLD)
            self._requeue.append(group.task)
            self.bias.add(group, Fate.DROPPED)

    def _take(self, step: int, selection: Selection) -> Batch:
        oldest = step - self._bound.max_age
        taken = []
        for group_id in sorted(selection.taken):
            candidate, trainable = self._buffer.pop(group_id)
            is_over = candidate.head is not None and candidate.head < oldest
            if is_over and self._bound.remedy(candidate.env) is OverBound.TRIM:
                trainable = _trimmed(trainable, oldest)
            self._ledger.move(group_id, SampleState.BATCHED)
            self.bias.add(trainable.group, Fate.TRAINED)
            taken.append(trainable)
        batch = Batch(step=step, groups=tuple(taken))
        self._trace.batch(step, sorted(selection.taken), batch.num_trimmed)
        if self._bound.order is Order.WINDOW:
            oldest_left = min(self._ledger.unbatched, default=None)
            self._overtaking.update(selection.taken)
            self._overtaking = {
                one for one in self._overtaking if oldest_left is not None and one > oldest_left
            }
        return batch

    def take_requeued(self) -> list[Task]:
        """Prompts of the samples dropped since the last call."""
        requeued, self._requeue = self._requeue, []
        return requeued

    def take_rewards(self) -> list[float]:
        """Rewards of all rollouts judged since the last call, rejected ones too: what filters keep
        is a biased sample of how well the policy does."""
        judged, self._judged = self._judged, []
        return judged

    def leftovers(self) -> tuple[TrainableGroup, ...]:
        """Accepted groups that no batch has taken."""
        return tuple(trainable for _, trainable in self._buffer.values())


def _candidate(group: Group, admitted_version: int) -> Candidate:
    runs = [
        rollout.version_runs
        for rollout in group.rollouts
        if rollout.source is Source.LIVE and rollout.version_runs
    ]
    return Candidate(
        group_id=group.group_id,
        env=group.task.env,
        admitted_version=admitted_version,
        head=min([one.head for one in runs], default=None),
        tail=max([one.tail for one in runs], default=None),
    )


def _trimmed(trainable: TrainableGroup, oldest: int) -> TrainableGroup:
    group = trainable.group
    rollouts = tuple(trimmed(rollout, oldest) for rollout in group.rollouts)
    return TrainableGroup(
        group=Group(group_id=group.group_id, task=group.task, rollouts=rollouts),
        advantages=trainable.advantages,
    )
