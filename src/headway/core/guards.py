"""Guards: what ends a run that would otherwise spin for ever on a broken environment."""

from collections import Counter
from collections.abc import Mapping

from headway.core.rollout import Group
from headway.errors import EmptyBatchesError, HeadwayError


class EmptyBatchGuard:
    """Stops the run after `limit` consecutive empty batches.

    Rejected samples are replaced, so a batch itself is never empty; an empty batch is a batch's
    worth of consecutive samples of which none could be trained.
    """

    def __init__(self, batch_size: int, limit: int) -> None:
        self._batch_size = batch_size
        self._limit = limit
        self._reasons: Counter[str] = Counter()
        self._envs: Counter[str] = Counter()
        self._rewards: list[float] = []

    @property
    def num_empty(self) -> int:
        """Consecutive empty batches so far."""
        return self._reasons.total() // self._batch_size

    def restore(self, rejected: Mapping[str, int]) -> None:
        """Go on counting after a resume, without those that ended the run before."""
        done = sum(rejected.values()) // (self._limit * self._batch_size)
        done *= self._limit * self._batch_size
        for reason, count in rejected.items():
            self._reasons[reason] = max(count - done, 0)
            done = max(done - count, 0)

    def accepted(self) -> None:
        """A sample was accepted: start again."""
        if self._reasons:
            self._reasons.clear()
            self._envs.clear()
            self._rewards.clear()

    def rejected(self, group: Group, reason: str) -> None:
        """A sample was rejected. Raises EmptyBatchesError at the limit, naming the cause."""
        self._reasons[reason] += 1
        self._envs[group.task.env] += 1
        rewards = [rollout.reward for rollout in group.rollouts]
        self._rewards = [min([*self._rewards, *rewards]), max([*self._rewards, *rewards])]
        if self.num_empty < self._limit:
            return
        reasons = ", ".join(f"{count} x {why}" for why, count in self._reasons.most_common())
        envs = ", ".join(sorted(self._envs))
        low, high = self._rewards
        spread = f"every reward was {low:g}" if low == high else f"rewards {low:g} to {high:g}"
        raise EmptyBatchesError(
            f"{self._limit} empty batches in a row: {self._reasons.total()} samples with nothing "
            f"to train on ({reasons}); {spread}; environments: {envs}. Check the reward function "
            "and the task's difficulty, or change rollout.filters"
        )


class FailureGuard:
    """Stops the run after `limit` consecutive failed samples."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0

    def restore(self, failed: int) -> None:
        """Go on counting after a resume, without those that ended the run before."""
        self._count = failed % self._limit

    def finished(self) -> None:
        """A sample finished: start again."""
        self._count = 0

    def failed(self, error: HeadwayError) -> None:
        """A sample failed for good. Raises the error's own class at the limit, with the cause."""
        self._count += 1
        if self._count >= self._limit:
            raise type(error)(f"{self._count} samples failed in a row; the last one: {error}")
