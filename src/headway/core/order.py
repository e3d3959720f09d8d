"""Order: which of the finished samples a batch takes."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from headway.core.rollout import GroupId


class Order(StrEnum):
    """Among the samples that could be trained, which come first."""

    COMPLETION = "completion"
    """Whatever finished first."""
    OLDEST_FIRST = "oldest_first"
    """Whatever was admitted first."""
    WINDOW = "window"
    """Whatever finished first among the oldest `W` samples: nobody is overtaken by more than
    `W - 1` younger ones."""


class Candidate(NamedTuple):
    """A finished sample that a batch could take."""

    group_id: GroupId
    env: str
    admitted_version: int
    head: int | None
    """Oldest version among its live tokens; None when it has none."""
    tail: int | None
    """Newest version among its live tokens."""


def in_order(candidates: Iterable[Candidate], order: Order) -> list[Candidate]:
    """Sort candidates, given in completion order, by preference."""
    if order is Order.OLDEST_FIRST:
        return sorted(candidates, key=lambda candidate: candidate.group_id)
    return list(candidates)


def window_end(
    unbatched: Iterable[GroupId], overtaking: Iterable[GroupId], window: int
) -> GroupId | None:
    """The youngest sample that a batch may take under `Order.WINDOW`; None when there is none.

    The window is the `window` oldest samples from the oldest unbatched one on, counting those that
    were taken already: otherwise it would slide on past a straggler.

    Args:
        unbatched: samples that are running, finished or accepted.
        overtaking: samples that were taken although an older one was unbatched.

    Example:
        >>> window_end([3, 7, 8], [4, 5], window=4)
        7
    """
    waiting = list(unbatched)
    if not waiting:
        return None
    oldest = min(waiting)
    ranked = sorted([*waiting, *(taken for taken in overtaking if taken > oldest)])
    return ranked[min(window, len(ranked)) - 1]
