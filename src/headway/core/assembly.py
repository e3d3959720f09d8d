"""Assembly: which samples batch `k` takes, which it discards, and which it has to wait for.

One pure function over everything that is unbatched; it decides nothing about time. The order says
which of the finished samples are preferred, the bound says what is done about their age.

**Waiting.** A sample admitted at version `a` must be in batch `a + S` or before (its *due* batch).
It is not enough to hold batch `k` for the samples due in it: if a batch takes samples that are due
late while early ones still run, more can become due in one batch than it holds. So for every
`d >= k`, the samples due in batch `d` or before that batch `k` leaves behind must fit into the
batches `k + 1 .. d`, which is `(d - k) * B` places. The admission formula makes this possible for
`k = 0`, and each batch that keeps to it leaves it possible for the next (docs/bounds.md).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from headway.core.bound import Bound, OverBound
from headway.core.ledger import Admission
from headway.core.order import Candidate, Order, in_order, in_window
from headway.core.rollout import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What becomes of the finished samples."""

    taken: tuple[GroupId, ...] = ()
    """`B` samples, or none when the batch cannot be put together yet."""
    dropped: tuple[GroupId, ...] = ()
    """Samples that are too old for this batch and all later ones."""
    held_for: tuple[GroupId, ...] = ()
    """Unfinished samples for which the batch is held although `B` samples are there."""


def select(
    step: int,
    candidates: Sequence[Candidate],
    unbatched: Mapping[GroupId, Admission],
    bound: Bound,
    *,
    overtaking: Collection[GroupId] = (),
    gave_up: bool = False,
) -> Selection:
    """Choose the samples of batch `step`.

    Args:
        candidates: accepted samples, in completion order.
        unbatched: these and all that are still running, in the order of admission.
        overtaking: as in `order.in_window`.
        gave_up: whether this batch was held for `wait_seconds` already.
    """
    dropped = tuple(one.group_id for one in candidates if _is_lost(one, step, bound))
    if dropped:
        candidates = [one for one in candidates if not _is_lost(one, step, bound)]
    if len(candidates) < bound.batch_size:
        return Selection(dropped=dropped)
    if bound.order is Order.WINDOW and bound.window is not None:
        waiting = unbatched.keys() - set(dropped)
        preferred, held_up_by = in_window(candidates, waiting, overtaking, bound.window)
        if len(preferred) < bound.batch_size:
            return Selection(dropped=dropped, held_for=tuple(held_up_by))
    else:
        preferred = in_order(candidates, bound.order)
    required: list[Candidate] = []
    if bound.waits and not gave_up:
        ready = {one.group_id for one in candidates} | set(dropped)
        pending = {one: at for one, at in unbatched.items() if one not in ready}
        required, held_for = _required(step, candidates, pending, bound)
        if held_for:
            return Selection(dropped=dropped, held_for=held_for)
    chosen = [one.group_id for one in required]
    first = set(chosen)
    rest = (one.group_id for one in preferred if one.group_id not in first)
    chosen += islice(rest, bound.batch_size - len(chosen))
    return Selection(taken=tuple(chosen), dropped=dropped)


def _is_lost(one: Candidate, step: int, bound: Bound) -> bool:
    """Whether nothing of a sample may be trained in batch `step`, nor in a later one."""
    oldest = step - bound.max_age
    if one.head is None or one.tail is None or one.head >= oldest:
        return False
    match bound.remedy(one.env):
        case OverBound.DROP:
            return True
        case OverBound.TRIM:
            return one.tail < oldest
        case _:
            return False


def _required(
    step: int,
    candidates: Iterable[Candidate],
    unfinished: Mapping[GroupId, Admission],
    bound: Bound,
) -> tuple[list[Candidate], tuple[GroupId, ...]]:
    """The finished samples that batch `step` must take, and the unfinished ones it must wait for.

    Samples that are overdue (after a wait that was given up) are not waited for again.
    """

    def due(version: int) -> int:
        return version + bound.max_age

    waited = [
        one
        for one in candidates
        if bound.choice(one.env) is OverBound.WAIT and due(one.admitted_version) >= step
    ]
    pending = {
        group_id: due(admission.version)
        for group_id, admission in unfinished.items()
        if bound.choice(admission.env) is OverBound.WAIT and due(admission.version) >= step
    }
    counts = Counter(due(one.admitted_version) for one in waited)
    counts.update(pending.values())
    queue = sorted(waited, key=lambda one: (one.admitted_version, one.group_id))
    num_required = total = 0
    for last in sorted(counts):
        total += counts[last]
        places_later = (last - step) * bound.batch_size
        needed = min(total - places_later, bound.batch_size)
        if needed <= num_required:
            continue
        num_ready = sum(1 for one in queue if due(one.admitted_version) <= last)
        if num_ready < needed:
            return [], tuple(one for one, due_at in pending.items() if due_at <= last)
        num_required = needed
    return queue[:num_required], ()
