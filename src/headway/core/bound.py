"""The bound: what is done about age, where, and what that guarantees.

`docs/bounds.md` has the proofs; `Bound.guaranteed_age` is asserted on every batch of every run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np

from headway.core.order import Order
from headway.core.rollout import Rollout, Source
from headway.core.versions import VersionRuns


class Enforcement(StrEnum):
    """Where generation is held back."""

    ADMISSION = "admission"
    """The capacity formula: nothing is admitted that completion in order would train too late."""
    SHIP = "ship"
    """Only at the ship gate: nothing is admitted while a full batch is parked there."""
    BOTH = "both"
    """The formula, and nothing is admitted while a full batch is parked."""

    @property
    def bounds_admission(self) -> bool:
        """Whether the formula's staleness term holds."""
        return self is not Enforcement.SHIP

    @property
    def holds_while_parked(self) -> bool:
        """Whether a parked batch stops admission."""
        return self is not Enforcement.ADMISSION


class OverBound(StrEnum):
    """What happens to a sample, or a token, that would be older than `S` when it is trained."""

    ADMIT = "admit"
    """It is trained all the same, and its age reported."""
    WAIT = "wait"
    """It does not come to that: the batch is held until the samples that must be in it are."""
    DROP = "drop"
    """The sample is discarded and its prompt requeued."""
    TRIM = "trim"
    """Its tokens older than `S` leave the loss mask; its younger ones are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The staleness policy of a run.

    Args:
        max_age: `S`, versions.
        batch_size: `B`, samples.
        window: `W`, samples; only for `Order.WINDOW`.
        over_bound: for environments that `by_env` does not name.
        envs: the environments of the run.
        wait_seconds: how long a batch is held for `wait`; None: as long as it takes.
        after_wait: what happens to samples that were not waited for any longer.
    """

    max_age: int
    batch_size: int
    enforcement: Enforcement
    order: Order
    over_bound: OverBound
    window: int | None = None
    by_env: Mapping[str, OverBound] = field(default_factory=dict)
    envs: tuple[str, ...] = ()
    wait_seconds: float | None = None
    after_wait: OverBound = OverBound.TRIM

    def choice(self, env: str) -> OverBound:
        """What is done about samples of this environment."""
        return self.by_env.get(env, self.over_bound)

    def remedy(self, env: str) -> OverBound:
        """What is done about a sample of this environment that is over the bound already.

        A wait that was given up turns into `after_wait`; a wait without a time limit has no such
        samples, and whatever breaks that promise shall meet the assertion of the bound.
        """
        choice = self.choice(env)
        if choice is OverBound.WAIT:
            return OverBound.ADMIT if self.wait_seconds is None else self.after_wait
        return choice

    @property
    def waits(self) -> bool:
        """Whether some samples must be waited for."""
        return OverBound.WAIT in self._choices

    @property
    def holds(self) -> bool:
        """Whether a batch can be held for unfinished samples although enough others are there."""
        return self.waits or self.order is Order.WINDOW

    @property
    def trims(self) -> bool:
        """Whether some tokens may be trimmed."""
        return any(
            choice is OverBound.TRIM
            or (
                choice is OverBound.WAIT and self.wait_seconds and self.after_wait is OverBound.TRIM
            )
            for choice in self._choices
        )

    @property
    def admission_limit(self) -> int:
        """Samples that the formula lets into the system at one version: `(S + 1) * B`."""
        return (self.max_age + 1) * self.batch_size

    @property
    def _choices(self) -> set[OverBound]:
        return {self.choice(env) for env in self.envs} or {self.over_bound}

    @property
    def guaranteed_age(self) -> int | None:
        """No contributing token of a live rollout is older than this when trained; None: no bound.

        The largest over all environments of: `S` for `drop`, `trim` and an unlimited `wait`; the
        bound of the order alone for `admit`; that of `after_wait` for a wait with a time limit.
        """
        ages = [self._guaranteed(choice) for choice in self._choices]
        known = [age for age in ages if age is not None]
        return max(known) if len(known) == len(ages) else None

    def _guaranteed(self, choice: OverBound) -> int | None:
        if choice is OverBound.WAIT and self.wait_seconds is not None:
            choice = self.after_wait
        if choice is not OverBound.ADMIT:
            return self.max_age
        if not self.enforcement.bounds_admission:
            return None
        if self.max_age == 0:
            # A batch is exactly the samples admitted at its own version, in whatever order.
            return 0
        if self.order is not Order.WINDOW or self.window is None:
            return None
        return self.max_age + 1 + (self.window - 2) // self.batch_size

    def problems(self) -> Iterable[tuple[str, str]]:
        """`(name of the setting, reason)` of every combination that cannot work."""
        if self.order is Order.WINDOW and self.window is None:
            yield "window", "order: window needs its size, in samples"
        if self.order is Order.WINDOW and self.waits:
            yield "order", "window and over_bound: wait both say who comes first; choose one"
        if self.order is Order.WINDOW and not self.enforcement.bounds_admission:
            yield (
                "order",
                "window needs enforcement: admission or both. Without the admission formula ever "
                "more samples finish behind the one that the window waits for, until it cannot "
                "get past them",
            )
        if self.waits and self.wait_seconds is None and not self.enforcement.bounds_admission:
            yield (
                "over_bound",
                "wait needs enforcement: admission or both. Without the admission formula more "
                "samples can be due than a batch holds, and no waiting saves the bound; or set "
                "wait_seconds",
            )
        if self.after_wait is OverBound.WAIT:
            yield "after_wait", "must be what follows a wait: admit, drop or trim"


def trimmed(rollout: Rollout, oldest_version: int) -> Rollout:
    """The rollout with its tokens sampled before `oldest_version` out of the loss mask.

    Tokens stay in the sequence, as context of the later ones; their log-probabilities become 0 like
    everything outside the mask. Rollouts that are not live have no meaningful version and are left
    alone.
    """
    runs = rollout.version_runs
    if rollout.source is not Source.LIVE or not runs or runs.head >= oldest_version:
        return rollout
    sampled = np.flatnonzero(rollout.loss_mask)
    loss_mask = rollout.loss_mask.copy()
    logprobs = rollout.logprobs.copy()
    start = 0
    for version, count in runs:
        if version < oldest_version:
            old = sampled[start : start + count]
            loss_mask[old] = False
            logprobs[old] = 0
        start += count
    young = VersionRuns.of(run for run in runs if run[0] >= oldest_version)
    return msgspec.structs.replace(
        rollout,
        loss_mask=loss_mask,
        logprobs=logprobs,
        version_runs=young,
        num_trimmed=rollout.num_trimmed + runs.num_tokens - young.num_tokens,
    )
