"""What generation makes: completions, rollouts, and the groups that share a baseline.

Tokens live in numpy arrays (Python lists of ints cost 32 B a token); versions live as runs. What is
made for every rollout is a `msgspec.Struct`: frozen dataclasses, with a call for every field, were
a sixth of the control loop's instructions. Copy with `msgspec.structs.replace`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.versions import VersionRuns

GroupId = NewType("GroupId", int)
"""Number of a sample, in admission order; it stays the same across retries and resumes."""


class Source(StrEnum):
    """Where a rollout came from. Only `live` rollouts count in age statistics."""

    LIVE = "live"
    REPLAY = "replay"
    CACHED = "cached"
    EXTERNAL = "external"


class FinishReason(StrEnum):
    """Why an engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a task source: everything that an environment needs to run it.

    `position` is where the source was when it made this task, so that `restore(position)` makes it
    again. `key` names the prompt across resumes. `data` belongs to the environment.
    """

    env: str
    key: str
    position: int
    data: Mapping[str, Any]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine call sampled.

    `token_ids` int32 `(T,)`; `logprobs` float32 `(T,)`, natural log, of the distribution that was
    sampled from (after temperature); `version_runs` covers all `T` tokens.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    version_runs: VersionRuns
    finish_reason: FinishReason


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one rollout went; instants `_at` are in loop time, seconds."""

    started_at: float
    finished_at: float
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0
    reward_seconds: float = 0.0


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One whole trajectory: prompt, model turns, environment replies, and its reward.

    Shapes: `token_ids` int32 `(T,)`; `loss_mask` bool `(T,)`, true where the model sampled;
    `logprobs` float32 `(T,)`, behaviour log-probabilities, 0 outside the mask; `version_runs`
    covers the masked tokens in order.

    Raises:
        ValueError: when the shapes, or the runs and the mask, do not agree.
    """

    group_id: GroupId
    episode: int
    """Index within the group, `0 <= episode < group_size`."""
    env: str
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    version_runs: VersionRuns
    reward: float
    num_turns: int
    finish_reason: FinishReason
    timings: Timings
    source: Source = Source.LIVE
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    num_trimmed: int = 0
    """Sampled tokens that were taken out of the loss mask for their age."""

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        masked = int(np.count_nonzero(self.loss_mask))
        if self.loss_mask.shape != shape or self.logprobs.shape != shape or len(shape) != 1:
            raise ValueError(
                f"rollout {self.rollout_id}: token_ids {shape}, loss_mask {self.loss_mask.shape} "
                f"and logprobs {self.logprobs.shape} must be equally long vectors"
            )
        if masked != self.version_runs.num_tokens:
            raise ValueError(
                f"rollout {self.rollout_id}: {masked} tokens in the loss mask but version runs "
                f"{self.version_runs.runs} cover {self.version_runs.num_tokens}"
            )

    @property
    def rollout_id(self) -> str:
        """Stable name, unique within a run: group number and episode."""
        return f"{self.group_id}.{self.episode}"

    @property
    def num_tokens(self) -> int:
        """Length of the whole trajectory in tokens."""
        return len(self.token_ids)

    @property
    def num_trainable(self) -> int:
        """Tokens in the loss mask."""
        return self.version_runs.num_tokens


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of one prompt: the sample that the gate counts, sharing one baseline."""

    group_id: GroupId
    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Shape `(group_size,)`."""
        return np.array([rollout.reward for rollout in self.rollouts])


class TrainableGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that passed the filters, with one advantage per rollout, shape `(group_size,)`."""

    group: Group
    advantages: NDArray[np.float32]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy update is computed from. Batch `step` is trained at version `step`."""

    step: int
    groups: tuple[TrainableGroup, ...]

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, group by group, in the order in which they are persisted."""
        return [rollout for trainable in self.groups for rollout in trainable.group.rollouts]

    @property
    def num_trainable(self) -> int:
        """Tokens that contribute to the loss."""
        return sum(rollout.num_trainable for rollout in self.rollouts)

    @property
    def num_trimmed(self) -> int:
        """Sampled tokens that do not, for their age."""
        return sum(rollout.num_trimmed for rollout in self.rollouts)
