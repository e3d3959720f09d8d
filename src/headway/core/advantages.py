"""Group-relative advantages: how much better a rollout did than its siblings."""

from enum import StrEnum
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-6
"""Added to the standard deviation; with all rewards equal the advantages are exactly 0."""


class Baseline(StrEnum):
    """What a rollout's reward is compared with."""

    GRPO = "grpo"
    """`(r - mean) / (std + 1e-6)`, population std (Shao et al. 2024, arXiv:2402.03300)."""
    GRPO_NO_STD = "grpo_no_std"
    """`r - mean` (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)."""
    RLOO = "rloo"
    """`r - mean of the others` (Ahmadian et al. 2024, arXiv:2402.14740)."""
    MEAN = "mean"
    """`r - running mean of all rewards so far`: the only one that works for groups of one."""


def group_advantages(
    rewards: NDArray[np.float64], baseline: Baseline, running_mean: float = 0.0
) -> NDArray[np.float32]:
    """One advantage per rollout of a group.

    Args:
        rewards: shape `(group_size,)`.
        baseline: what to compare with.
        running_mean: mean of the rewards of earlier groups; used by `Baseline.MEAN` only.

    Returns:
        float32, shape `(group_size,)`. A group of one gives 0 except with `Baseline.MEAN`.

    Example:
        >>> group_advantages(np.array([0.0, 1.0]), Baseline.RLOO)
        array([-1.,  1.], dtype=float32)
    """
    match baseline:
        case Baseline.GRPO:
            centered = rewards - rewards.mean()
            advantages = centered / (rewards.std() + STD_EPSILON)
        case Baseline.GRPO_NO_STD:
            advantages = rewards - rewards.mean()
        case Baseline.RLOO:
            others = max(len(rewards) - 1, 1)
            advantages = (rewards - rewards.mean()) * (len(rewards) / others)
        case Baseline.MEAN:
            advantages = rewards - running_mean
        case _:
            assert_never(baseline)
    if baseline is not Baseline.MEAN and rewards.min() == rewards.max():
        advantages = np.zeros_like(rewards)
    return np.asarray(advantages, np.float32)
