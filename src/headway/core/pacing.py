"""Pacing: how much of the budget that `S` allows is used.

A batch of `B` samples that finds `N` samples unbatched (admitted and not yet taken by a batch)
trains samples that waited `N / B` batches on average: Little's law (Little 1961, L = lambda W, with
time counted in batches). The gate alone lets `N` grow to `S * B`, so that the mean age tends to `S`
whatever is needed. What is needed is a base-stock level, as in inventory control (CONWIP: a fixed
number in the system, one in for every one out): at the moment when the trainer is ready, a batch
must be buffered while the rest may still be running.

    need = B + running at that moment          limit = the largest need of the last 48 batches

While the trainer does not starve, admission follows the batches one for one, so `running` does not
depend on the limit: it is the throughput of the trainer times the latency of a sample, with its
spread, measured without a clock and whatever share the filters reject. A limit that covers the
largest recent value starves the trainer about once in as many batches, and then for the few
samples that were missing.

When the trainer starves, `running` is capped by the limit itself and says too little. The need is
then the number unbatched plus twice the shortage: of samples admitted in addition only some will
have finished when the trainer is ready. A run bound by generation is always short and therefore at
the ceiling within a few batches, which is `fill`.

The memory is long, on purpose: a pause of the trainer or a wave of quick samples empties `running`
for a while, and a limit that followed it down would starve the trainer when the slow ones are back.
A limit that is too high costs only age. Not better in simulation: a moving mean of `running` plus a
multiple of its spread (as good where latencies are a few batches long, but what it admits comes
back as `running`: at twenty batches it swung to the ceiling and steps took a fifth longer); raising
by the seconds waited (one short wait can send the limit to the ceiling); forgetting the opening
early (with one sample in ten thirty batches long, steps took a third longer).
"""

from dataclasses import dataclass
from enum import StrEnum

from headway.errors import InvariantError

_MEMORY = 48
"""Batches that a need is remembered: a few sojourns for the age that pacing is there for."""
_SHORTAGE_GAIN = 2
"""Samples that the need exceeds the number unbatched by, for every sample the trainer lacked."""
_OPENING = (4, 16)
"""Fewest and most batches' worth of samples to start with; half the ceiling in between."""


class Pacing(StrEnum):
    """How many samples are admitted."""

    FILL = "fill"
    """As many as the gate allows."""
    JUST_IN_TIME = "just_in_time"
    """As many as keep the trainer busy; `S` is only a ceiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingState:
    """All that the controller remembers; a checkpoint stores it.

    Args:
        needs: for each of the last batches, oldest first, how many unbatched samples would have
            been enough. The first one of a run is the opening, until it is forgotten.
    """

    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """What was seen of one batch.

    Args:
        num_ready: accepted samples that were buffered at the moment when the trainer became ready
            for the batch. Fewer than `B`: the trainer starved.
        num_unbatched: samples running, finished or buffered at the moment when the batch is taken,
            the batch included; at least `B`.
    """

    num_ready: int
    num_unbatched: int


class JustInTime:
    """Chooses how many samples may be unbatched so that the trainer hardly ever starves.

    The controller is asked for `limit()` whenever a sample could be admitted, and told of each
    batch as it is taken, except of the first one of a process: for that one the trainer waits for
    the start, and no pacing could have helped.

    Args:
        batch_size: `B`, samples.
        ceiling: most unbatched samples that could ever be of use: `(S + 1) * B`, or
            `max_concurrent + B` if that is less. None: no ceiling.
        state: from a checkpoint; None for a new run.

    Example:
        >>> pacing = JustInTime(batch_size=32, ceiling=288)
        >>> pacing.limit()
        144
        >>> pacing.batch_taken(BatchTaken(num_ready=30, num_unbatched=144))
        >>> pacing.limit()
        148
    """

    def __init__(
        self, *, batch_size: int, ceiling: int | None, state: PacingState | None = None
    ) -> None:
        self._batch_size = batch_size
        self._ceiling = ceiling
        self._state = state if state and state.needs else PacingState(needs=(self._opening(),))
        self._limit = self._of(self._state)

    def _opening(self) -> int:
        low, high = (batches * self._batch_size for batches in _OPENING)
        return low if self._ceiling is None else max(low, min(self._ceiling // 2, high))

    @property
    def state(self) -> PacingState:
        """What a checkpoint stores: a controller built from it goes on as this one would."""
        return self._state

    def limit(self) -> int:
        """How many samples may be unbatched now: at least `B`, at most the ceiling."""
        return self._limit

    def _of(self, state: PacingState) -> int:
        need = max(state.needs)
        if self._ceiling is not None:
            need = min(need, self._ceiling)
        return max(need, self._batch_size)

    def batch_taken(self, seen: BatchTaken) -> None:
        """Learn from one batch. Raises InvariantError when the counts cannot be a batch's."""
        if seen.num_ready < 0 or seen.num_unbatched < self._batch_size:
            raise InvariantError(
                f"a batch of {self._batch_size} samples cannot be taken from {seen}: num_unbatched "
                "is counted before the batch leaves, and includes it"
            )
        shortage = self._batch_size - seen.num_ready
        need = seen.num_unbatched + (_SHORTAGE_GAIN * shortage if shortage > 0 else shortage)
        self._state = PacingState(needs=(*self._state.needs, need)[-_MEMORY:])
        self._limit = self._of(self._state)
