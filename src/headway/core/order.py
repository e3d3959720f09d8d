"""Order: which of the finished samples a batch takes."""

import heapq
from collections.abc import Collection, Iterable, Sequence, Set
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
    `W - 1` younger ones. `W = 1` is strictly the order of admission."""


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
    """Sort candidates, given in completion order, by preference; not for `Order.WINDOW`."""
    if order is Order.OLDEST_FIRST:
        return sorted(candidates, key=lambda candidate: candidate.group_id)
    return list(candidates)


def in_window(
    candidates: Sequence[Candidate],
    unbatched: Set[GroupId],
    overtaking: Collection[GroupId],
    window: int,
) -> tuple[list[Candidate], list[GroupId]]:
    """What may be taken under `Order.WINDOW`, one after the other, and who holds up the rest.

    The window is the `window` oldest samples from the oldest unbatched one on, counting those that
    were taken already: otherwise it would slide on past a straggler. It slides while samples are
    taken, so that a finished oldest sample never blocks it.

    Args:
        candidates: finished samples, in completion order.
        unbatched: samples that are running, finished or accepted.
        overtaking: samples that were taken although an older one is unbatched.

    Returns:
        The samples in the order in which they may be taken, and the unfinished ones in the window
        after that.
    """
    rank = {one: index for index, one in enumerate(sorted({*unbatched, *overtaking}))}
    by_age = sorted(
        (rank[candidate.group_id], number) for number, candidate in enumerate(candidates)
    )
    left = sorted(rank[one] for one in unbatched)
    taken: set[int] = set()
    order: list[Candidate] = []
    eligible: list[int] = []  # a heap of positions in completion order
    oldest = admitted = 0
    while True:
        while oldest < len(left) and left[oldest] in taken:
            oldest += 1
        if oldest == len(left):
            return order, []
        end = left[oldest] + window
        while admitted < len(by_age) and by_age[admitted][0] < end:
            heapq.heappush(eligible, by_age[admitted][1])
            admitted += 1
        if not eligible:
            unfinished = unbatched - {candidate.group_id for candidate in candidates}
            return order, sorted(one for one in unfinished if rank[one] < end)
        chosen = candidates[heapq.heappop(eligible)]
        taken.add(rank[chosen.group_id])
        order.append(chosen)
