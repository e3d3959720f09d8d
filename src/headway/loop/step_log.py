"""What is remembered of every batch from the moment it is full until its version is served."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headway.core.ages import Ages
from headway.core.bias import Bias
from headway.core.ledger import Ledger, SampleState
from headway.core.records import RunState
from headway.core.rollout import Batch, GroupId
from headway.core.totals import BatchTotals, StepTotals
from headway.loop.engine_meter import EngineMeter
from headway.loop.weight_watcher import VersionServed


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBatch:
    """A batch at the moment when it was put together; instants `_at` are seconds since the start.

    `full_at`: a batch's worth of samples was there. `ready_at`: the trainer could have had it;
    `num_ready` accepted samples were there then. `held_seconds`: from both on, until everything was
    there that it had to wait for. `num_unbatched`: in the system when it was taken, its own too.
    """

    batch: Batch
    ages: Ages
    rewards: list[float]
    full_at: float
    ready_at: float
    taken_at: float
    num_ready: int
    num_unbatched: int
    held_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedBatch:
    """A batch that the trainer has, without its tokens; times in seconds."""

    step: int
    group_ids: tuple[GroupId, ...]
    ages: Ages
    num_rollouts: int
    num_tokens: int
    rollout_tokens_mean: float
    reward_mean: float
    reward_std: float
    """Over all rollouts judged since the batch before, rejected ones too."""
    trained_reward_mean: float
    """Over the rollouts of the batch."""
    env_metrics: Mapping[str, float]
    assembled_seconds: float
    parked_seconds: float
    starved_seconds: float
    held_seconds: float
    write_seconds: float
    num_trimmed: int

    @property
    def totals(self) -> BatchTotals:
        """What the summary counts of it."""
        return BatchTotals(
            reward_mean=self.reward_mean,
            num_tokens=self.num_tokens,
            num_trimmed=self.num_trimmed,
            token_ages=self.ages.tokens.counts,
            head_ages=self.ages.heads.counts,
            held_seconds=self.held_seconds,
            starved_seconds=self.starved_seconds,
        )

    def as_before(self, totals: BatchTotals | None) -> "ShippedBatch":
        """The same batch, shipped again: what an earlier life knew of it beyond the batch itself
        is as it was."""
        if totals is None:
            return self
        return replace(
            self,
            reward_mean=totals.reward_mean,
            held_seconds=totals.held_seconds,
            starved_seconds=totals.starved_seconds,
        )

    @classmethod
    def of(cls, taken: TakenBatch, *, write_seconds: float) -> "ShippedBatch":
        """Condense a batch. When all of it was judged before the batch before was taken (it was
        full twice over), the rewards are its own."""
        batch = taken.batch
        rollouts = batch.rollouts
        trained = [rollout.reward for rollout in rollouts]
        rewards = taken.rewards or trained
        finished = [rollout.timings.finished_at for rollout in rollouts]
        metrics: dict[str, list[float]] = defaultdict(list)
        for rollout in rollouts:
            for name, value in rollout.metrics.items():
                metrics[name].append(value)
        return cls(
            step=batch.step,
            group_ids=tuple(trainable.group.group_id for trainable in batch.groups),
            ages=taken.ages,
            num_rollouts=len(rollouts),
            num_tokens=batch.num_trainable,
            rollout_tokens_mean=batch.num_trainable / len(rollouts),
            reward_mean=float(np.mean(rewards)),
            reward_std=float(np.std(rewards)),
            trained_reward_mean=float(np.mean(trained)),
            env_metrics={name: float(np.mean(values)) for name, values in metrics.items()},
            assembled_seconds=max(finished) - min(finished),
            parked_seconds=max(taken.ready_at - taken.full_at, 0.0),
            starved_seconds=taken.taken_at - taken.ready_at - taken.held_seconds,
            held_seconds=taken.held_seconds,
            write_seconds=write_seconds,
            num_trimmed=batch.num_trimmed,
        )


@dataclass(slots=True)
class StepLog:
    """Totals over the trained batches, and the rows that describe each of them."""

    ledger: Ledger
    bias: Bias
    engine: EngineMeter
    on_trained: Callable[[int, StepTotals], None]
    """Told of every step, to be recorded. Synchronous."""
    first_step: int = 0
    ages: Ages = field(default_factory=Ages)
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step, in step order."""
    step_seconds: list[float] = field(default_factory=list)
    admissions: list[int] = field(default_factory=list)
    """Samples admitted between one version bump and the next; the first entry is the first step's.
    """
    num_tokens_trained: int = 0
    num_tokens_trimmed: int = 0
    held_seconds: float = 0.0
    starved_seconds: float = 0.0
    trainer_idle_seconds: float = 0.0
    trainer_busy_seconds: float = 0.0
    started_at: float = field(init=False)
    """In loop time."""
    _last_at: float = field(init=False)
    _last_admissions: int = 0
    _last_reasons: dict[SampleState, Counter[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started_at = self._last_at = asyncio.get_running_loop().time()
        self._last_reasons = {state: why.copy() for state, why in self.ledger.reasons.items()}

    def restore(self, state: RunState) -> None:
        """Go on counting after a resume: what was trained before is in the totals, too."""
        known = [step for step in range(state.version) if step in state.batches]
        for step in known:
            self._count(state.batches[step])
            if (totals := state.steps.get(step)) is not None:
                self._count_step(totals)
        self.first_step = state.version - len(known)

    @property
    def num_trained(self) -> int:
        """Batches trained, in earlier lives of the run too."""
        return len(self.rewards)

    @property
    def trainer_idle_share(self) -> float | None:
        """Share of the trainer's time in which it waited for a batch; None before the first."""
        total = self.trainer_idle_seconds + self.trainer_busy_seconds
        return self.trainer_idle_seconds / total if total > 0 else None

    def trained(
        self, shipped: ShippedBatch, served: VersionServed, *, admissions: int
    ) -> dict[str, Any]:
        """Count a trained batch and return its row; `admissions` is the total so far."""
        stats = dict(served.weights.stats)
        train_seconds = stats.pop("train_seconds", None)
        idle_seconds = stats.pop("idle_seconds", None)
        publish_seconds = stats.pop("publish_seconds", None)
        now = asyncio.get_running_loop().time()
        totals = StepTotals(
            step_seconds=now - self._last_at,
            admissions=admissions - self._last_admissions,
            trainer_idle_seconds=idle_seconds or 0.0,
            trainer_busy_seconds=(train_seconds or 0.0) + (publish_seconds or 0.0),
            tokens_generated=self.engine.num_tokens,
            engine_idle_seconds=self.engine.idle_seconds,
            engine_seconds=self.engine.seconds,
        )
        self.on_trained(shipped.step, totals)
        self._count(shipped.totals)
        self._count_step(totals)
        row = {
            "kind": "step",
            "step": shipped.step,
            "reward_mean": shipped.reward_mean,
            "reward_std": shipped.reward_std,
            "trained_reward_mean": shipped.trained_reward_mean,
            "age": shipped.ages.summary(),
            "age_counts": {
                str(age): count for age, count in sorted(shipped.ages.tokens.counts.items())
            },
            "num_samples": len(shipped.group_ids),
            "num_rollouts": shipped.num_rollouts,
            "num_tokens": shipped.num_tokens,
            "rollout_tokens_mean": shipped.rollout_tokens_mean,
            "admissions": totals.admissions,
            "rejected": self._new_reasons(SampleState.REJECTED),
            "failed": self._new_reasons(SampleState.FAILED),
            "dropped": self._new_reasons(SampleState.DROPPED),
            "tokens_trimmed": shipped.num_trimmed,
            "bias": self.bias.since_last(),
            "assembled_seconds": shipped.assembled_seconds,
            "parked_seconds": shipped.parked_seconds,
            "starved_seconds": shipped.starved_seconds,
            "held_seconds": shipped.held_seconds,
            "write_seconds": shipped.write_seconds,
            "train_seconds": train_seconds,
            "trainer_idle_seconds": idle_seconds,
            "publish_seconds": publish_seconds,
            "sync_seconds": served.sync_seconds,
            "step_seconds": totals.step_seconds,
            "trainer": stats,
            "env_metrics": shipped.env_metrics,
        }
        self._last_at = now
        self._last_admissions = admissions
        return row

    def _count(self, batch: BatchTotals) -> None:
        self.ages.merge(batch.ages)
        self.rewards.append(batch.reward_mean)
        self.num_tokens_trained += batch.num_tokens
        self.num_tokens_trimmed += batch.num_trimmed
        self.held_seconds += batch.held_seconds
        self.starved_seconds += batch.starved_seconds

    def _count_step(self, step: StepTotals) -> None:
        self.step_seconds.append(step.step_seconds)
        self.admissions.append(step.admissions)
        self.trainer_idle_seconds += step.trainer_idle_seconds
        self.trainer_busy_seconds += step.trainer_busy_seconds

    def _new_reasons(self, state: SampleState) -> dict[str, int]:
        now = self.ledger.reasons[state]
        new = now - self._last_reasons.get(state, Counter())
        self._last_reasons[state] = now.copy()
        return dict(new)
