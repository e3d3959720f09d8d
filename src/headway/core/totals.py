"""What the summary of a run counts of every step: kept with the run, so that a resume goes on
counting where the last life was cut off."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.core.ages import AgeHistogram, Ages
from headway.core.rollout import Batch, Group


class Length(NamedTuple):
    """How long a rollout was, in tokens sampled before trimming, tokens in the loss, and turns."""

    tokens: int
    in_loss: int
    turns: int


def lengths_of(group: Group, *, is_trained: bool) -> tuple[Length, ...]:
    """Of the rollouts of a group, in their order; nothing of one that is not trained is in the
    loss."""
    return tuple(
        Length(
            one.num_trainable + one.num_trimmed,
            one.num_trainable if is_trained else 0,
            one.num_turns,
        )
        for one in group.rollouts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTotals:
    """Of a batch, as soon as it is on disk; keys as in its `step` row (docs/metrics.md)."""

    reward_mean: float
    num_tokens: int
    num_trimmed: int
    token_ages: Mapping[int, int]
    head_ages: Mapping[int, int]
    held_seconds: float = 0.0
    starved_seconds: float = 0.0

    @classmethod
    def of(cls, batch: Batch) -> "BatchTotals":
        """What the batch alone tells: the rewards are those of its own rollouts."""
        ages = Ages.of_batch(batch.step, batch.rollouts)
        rewards = [rollout.reward for rollout in batch.rollouts]
        return cls(
            reward_mean=sum(rewards) / len(rewards),
            num_tokens=batch.num_trainable,
            num_trimmed=batch.num_trimmed,
            token_ages=ages.tokens.counts,
            head_ages=ages.heads.counts,
        )

    @property
    def ages(self) -> Ages:
        """The two histograms."""
        return Ages(
            tokens=AgeHistogram(Counter(self.token_ages)),
            heads=AgeHistogram(Counter(self.head_ages)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Of a step whose version is served. `tokens_generated` and `engine_*` are sums since the start
    of the run; `engine_seconds` is the time in which engines could have been busy."""

    step_seconds: float
    admissions: int
    trainer_idle_seconds: float
    trainer_busy_seconds: float
    tokens_generated: int
    engine_idle_seconds: float
    engine_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InARow:
    """What the guards count: samples that failed, and that were rejected for each reason, since the
    last that did not."""

    failed: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
