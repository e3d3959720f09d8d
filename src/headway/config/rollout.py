"""Section `rollout`: generation, its bounds, and the staleness policies by name."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from headway.config.base import Count, ImpossibleError, Seconds, Section
from headway.core.bound import Enforcement, OverBound
from headway.core.filters import FilterName
from headway.core.order import Order
from headway.core.pacing import Pacing


class Preset(StrEnum):
    """A staleness policy by name: sets enforcement, order, over_bound and pacing at once."""

    RECOMMENDED = "recommended"
    """Bounded, nothing discarded, nothing waits: trim, oldest first, just in time."""
    ADMISSION = "admission"
    """The admission formula alone, oldest first, the whole budget used. No bound."""
    SHIP_DROP = "ship_drop"
    """Generate freely, park full batches, discard what is too old."""
    WAIT_OLDEST = "wait_oldest"
    """The admission formula, and every batch waits for the oldest samples."""


PRESETS: Mapping[Preset, Mapping[str, StrEnum]] = {
    Preset.RECOMMENDED: {
        "enforcement": Enforcement.ADMISSION,
        "order": Order.OLDEST_FIRST,
        "over_bound": OverBound.TRIM,
        "pacing": Pacing.JUST_IN_TIME,
    },
    Preset.ADMISSION: {
        "enforcement": Enforcement.ADMISSION,
        "order": Order.OLDEST_FIRST,
        "over_bound": OverBound.ADMIT,
        "pacing": Pacing.FILL,
    },
    Preset.SHIP_DROP: {
        "enforcement": Enforcement.SHIP,
        "order": Order.COMPLETION,
        "over_bound": OverBound.DROP,
        "pacing": Pacing.FILL,
    },
    Preset.WAIT_OLDEST: {
        "enforcement": Enforcement.ADMISSION,
        "order": Order.OLDEST_FIRST,
        "over_bound": OverBound.WAIT,
        "pacing": Pacing.FILL,
    },
}


class RolloutConfig(Section):
    """Generation and its bounds."""

    max_head_offpolicyness: int = Field(default=2, ge=0)
    """`S`, in versions. 0 is the synchronous loop."""
    preset: Preset = Preset.RECOMMENDED
    """A staleness policy by name: the default of the next four fields. `recommended`,
    `admission` (what AReaL does), `ship_drop`, `wait_oldest`."""
    enforcement: Enforcement = Enforcement.ADMISSION
    """Where generation is held back: at `admission` (the capacity formula), at the `ship` gate
    (nothing is admitted while a full batch is parked), or `both`."""
    order: Order = Order.OLDEST_FIRST
    """Which finished samples a batch takes: first in `completion`, `oldest_first`, or first
    finished within the `window` of the oldest."""
    window: Count | None = None
    """`order: window`: its size `W`, in samples."""
    over_bound: OverBound = OverBound.TRIM
    """What would be older than `S` when trained: `admit` it, `wait` for it in time, `drop` the
    sample and requeue its prompt, or `trim` its old tokens from the loss mask."""
    wait_seconds: Seconds | None = None
    """`over_bound: wait`: a batch is held for at most this long; unset: as long as it takes."""
    after_wait: OverBound = OverBound.TRIM
    """What happens to samples that were not waited for any longer: `admit`, `drop` or `trim`."""
    pacing: Pacing = Pacing.JUST_IN_TIME
    """`fill` uses the whole budget that `S` allows; `just_in_time` admits what keeps the trainer
    busy and no more."""
    consumer_batch_size: Count = 16
    """`B`, in samples (groups) per batch."""
    max_concurrent_rollouts: Count | None = None
    """Samples in flight; `consumer_batch_size` when unset."""
    queue_size: Count = 1024
    """Size of the dispatcher's input and output queue, in samples."""
    group_size: Count = 8
    """Rollouts per sample: they share a prompt and an advantage baseline. 1 needs
    `actor.advantage: mean`."""
    max_new_tokens: Count = 64
    """Tokens per model turn."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling; log-probabilities are of the distribution that was sampled from."""
    deadline_seconds: Seconds = 300.0
    """For one rollout, all its turns and its environment included."""
    max_infrastructure_retries: int = Field(default=3, ge=0)
    """Per rollout, when an engine fails; then the sample fails."""
    max_environment_retries: int = Field(default=1, ge=0)
    """Per rollout, when its environment or reward raises; then the sample fails."""
    max_failed_samples: Count = 64
    """Consecutive failed samples, with no success between them, that end the run."""
    max_batches_ahead: int = Field(default=0, ge=0)
    """Ship gate: batch `k` is put together and handed over once the trainer has published version
    `k - max_batches_ahead`. 1 hides the hand-over from a slow disk, at one more version of age."""
    filters: tuple[FilterName, ...] = (FilterName.ZERO_ADVANTAGE,)
    """Groups that these name are rejected, and replaced by new samples."""

    @property
    def max_concurrent(self) -> int:
        """The concurrency limit in force, in samples."""
        return self.max_concurrent_rollouts or self.consumer_batch_size

    @model_validator(mode="after")
    def _preset(self) -> Self:
        for name, value in PRESETS[self.preset].items():
            if name not in self.model_fields_set:
                self.__dict__[name] = value  # frozen for everybody else
        return self

    @model_validator(mode="after")
    def _possible(self) -> Self:
        problems = []
        if self.queue_size < self.consumer_batch_size:
            problems.append(
                (
                    "queue_size",
                    f"{self.queue_size} is smaller than consumer_batch_size "
                    f"({self.consumer_batch_size}): no batch could pass; raise queue_size",
                )
            )
        if problems:
            raise ImpossibleError(problems)
        return self
