"""Shared by tests: small rollouts and groups built from rewards and versions."""

from collections.abc import Sequence

import numpy as np

from headway.core.rollout import (
    FinishReason,
    Group,
    GroupId,
    Rollout,
    Source,
    Task,
    Timings,
)
from headway.core.versions import VersionRuns


def rollout(
    group_id: int = 0,
    episode: int = 0,
    *,
    reward: float = 1.0,
    versions: Sequence[int] = (0,),
    prompt_tokens: int = 2,
    source: Source = Source.LIVE,
    finish_reason: FinishReason = FinishReason.STOP,
) -> Rollout:
    """A rollout that sampled one token under each of `versions`."""
    num_tokens = prompt_tokens + len(versions)
    loss_mask = np.zeros(num_tokens, np.bool_)
    loss_mask[prompt_tokens:] = True
    return Rollout(
        group_id=GroupId(group_id),
        episode=episode,
        env="test",
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, np.float32(-0.5), np.float32(0)),
        version_runs=VersionRuns.from_versions(versions),
        reward=reward,
        num_turns=1,
        finish_reason=finish_reason,
        timings=Timings(started_at=0.0, finished_at=1.0),
        source=source,
    )


def group(
    group_id: int = 0, rewards: Sequence[float] = (0.0, 1.0), **rollout_args: object
) -> Group:
    """A group with these rewards."""
    task = Task(env="test", key=f"task-{group_id}", position=group_id, data={})
    rollouts = tuple(
        rollout(group_id, episode, reward=reward, **rollout_args)  # type: ignore[arg-type]
        for episode, reward in enumerate(rewards)
    )
    return Group(group_id=GroupId(group_id), task=task, rollouts=rollouts)
