"""The train sink: finished groups in, advantages, filters, a batch when one is full."""

from collections import deque

from headway.core.advantages import Baseline, group_advantages
from headway.core.filters import FilterName, rejection
from headway.core.guards import EmptyBatchGuard
from headway.core.ledger import Ledger, SampleState
from headway.core.rollout import Batch, Group, TrainableGroup
from headway.errors import InvariantError


class TrainSink:
    """Buffers accepted groups in completion order.

    Everything is synchronous: judging a group and counting it is one step. It charges nothing; a
    rejection frees the sample's place in the gate, through the ledger.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        baseline: Baseline,
        filters: tuple[FilterName, ...],
        ledger: Ledger,
        guard: EmptyBatchGuard,
    ) -> None:
        self._batch_size = batch_size
        self._baseline = baseline
        self._filters = filters
        self._ledger = ledger
        self._guard = guard
        self._buffer: deque[TrainableGroup] = deque()
        self._judged: list[float] = []
        self._reward_sum = 0.0
        self._num_rewards = 0

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def is_full(self) -> bool:
        """Whether a whole batch is ready."""
        return len(self._buffer) >= self._batch_size

    def add(self, group: Group) -> str | None:
        """Judge a finished group. Returns the reason when it is rejected, else None.

        Raises EmptyBatchesError when nothing has been trainable for too long.
        """
        rewards = group.rewards
        mean = self._reward_sum / self._num_rewards if self._num_rewards else 0.0
        advantages = group_advantages(rewards, self._baseline, mean)
        self._reward_sum += float(rewards.sum())
        self._num_rewards += len(rewards)
        self._judged.extend(rewards.tolist())
        reason = rejection(group, advantages, self._filters)
        if reason is not None:
            self._ledger.move(group.group_id, SampleState.REJECTED, reason)
            self._guard.rejected(group, reason)
            return reason
        self._ledger.move(group.group_id, SampleState.ACCEPTED)
        self._guard.accepted()
        self._buffer.append(TrainableGroup(group=group, advantages=advantages))
        return None

    def take_batch(self, step: int) -> Batch:
        """Take the batch that `step` trains: the first `B` to be accepted, in the order of their
        admission, so that the same samples always make the same batch, whichever finished first.

        Raises InvariantError when none is full.
        """
        if not self.is_full:
            raise InvariantError(
                f"batch {step} was taken with {len(self._buffer)} of {self._batch_size} samples"
            )
        taken = [self._buffer.popleft() for _ in range(self._batch_size)]
        groups = tuple(sorted(taken, key=lambda trainable: trainable.group.group_id))
        for trainable in groups:
            self._ledger.move(trainable.group.group_id, SampleState.BATCHED)
        return Batch(step=step, groups=groups)

    def take_rewards(self) -> list[float]:
        """Rewards of all rollouts judged since the last call, rejected ones too: what filters keep
        is a biased sample of how well the policy does."""
        judged, self._judged = self._judged, []
        return judged

    def leftovers(self) -> tuple[TrainableGroup, ...]:
        """Accepted groups that no batch has taken."""
        return tuple(self._buffer)
