"""Filters: whether a finished group may be trained, and the name of the reason if not."""

from collections.abc import Sequence
from enum import StrEnum
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from headway.core.rollout import Group


class FilterName(StrEnum):
    """What can be rejected by configuration. The name is the reason in the ledger."""

    ZERO_ADVANTAGE = "zero_advantage"
    """All rollouts of the group have the same advantage 0 (a constant reward): no gradient."""
    TRUNCATED = "truncated"
    """Some rollout ended at its token limit."""


EMPTY_COMPLETION = "empty_completion"
"""Reason when no rollout of the group sampled a single token: nothing could be trained, whatever
filters are configured."""


def rejection(
    group: Group, advantages: NDArray[np.float32], filters: Sequence[FilterName]
) -> str | None:
    """The reason why this group is not trained, or None when it is."""
    if not any(rollout.num_trainable for rollout in group.rollouts):
        return EMPTY_COMPLETION
    for name in filters:
        match name:
            case FilterName.ZERO_ADVANTAGE:
                hit = not np.any(advantages)
            case FilterName.TRUNCATED:
                hit = any(rollout.finish_reason == "length" for rollout in group.rollouts)
            case _:
                assert_never(name)
        if hit:
            return str(name)
    return None
