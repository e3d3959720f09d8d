"""The conservation ledger: every admitted sample is in exactly one state.

    admitted = running + finished + accepted + batched + trained + rejected + failed + dropped
             + interrupted

`accepted` samples are buffered until a batch takes them. The ledger is the only place that counts
samples; the gate, the metrics and the summary read it.
"""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from headway.core.gate import GateState
from headway.core.rollout import GroupId
from headway.errors import InvariantError


class Admission(NamedTuple):
    """What is known of a sample from the moment it is admitted."""

    version: int
    """The policy's when it was admitted: none of its tokens is older."""
    env: str


class SampleState(StrEnum):
    """The life of a sample.

    | from     | to                            | on                                              |
    |----------|-------------------------------|-------------------------------------------------|
    | (none)   | running                       | the gate admits it                              |
    | running  | finished                      | all its rollouts ended and it is fetched        |
    | running  | failed(class)                 | retries are used up                             |
    | running  | dropped(reason)               | the run ends before it does                     |
    | running  | interrupted                   | the same, of a run that can be resumed          |
    | interrupted | running                    | a resumed run issues it again, under its number |
    | finished | accepted                      | advantages and filters let it pass              |
    | finished | rejected(reason)              | a filter names it                               |
    | finished | dropped(reason), interrupted  | the run ends before it is judged                |
    | accepted | batched                       | a batch takes it                                |
    | accepted | dropped(reason)               | it is too old for every batch to come           |
    | batched  | trained                       | the version that its batch produced is served   |

    trained, rejected, failed and dropped are final. An interrupted sample is not in the system: it
    passes the gate again, and counts as admitted once.
    """

    RUNNING = "running"
    FINISHED = "finished"
    ACCEPTED = "accepted"
    BATCHED = "batched"
    TRAINED = "trained"
    REJECTED = "rejected"
    FAILED = "failed"
    DROPPED = "dropped"
    INTERRUPTED = "interrupted"


ARROWS: Mapping[SampleState, frozenset[SampleState]] = {
    SampleState.RUNNING: frozenset(
        {
            SampleState.FINISHED,
            SampleState.FAILED,
            SampleState.DROPPED,
            SampleState.INTERRUPTED,
        }
    ),
    SampleState.FINISHED: frozenset(
        {
            SampleState.ACCEPTED,
            SampleState.REJECTED,
            SampleState.DROPPED,
            SampleState.INTERRUPTED,
        }
    ),
    SampleState.INTERRUPTED: frozenset({SampleState.RUNNING}),
    SampleState.ACCEPTED: frozenset({SampleState.BATCHED, SampleState.DROPPED}),
    SampleState.BATCHED: frozenset({SampleState.TRAINED}),
    SampleState.TRAINED: frozenset(),
    SampleState.REJECTED: frozenset(),
    SampleState.FAILED: frozenset(),
    SampleState.DROPPED: frozenset(),
}

LOST = frozenset({SampleState.REJECTED, SampleState.FAILED, SampleState.DROPPED})

UNBATCHED_NO_MORE = LOST | {SampleState.BATCHED, SampleState.INTERRUPTED}


class Ledger:
    """Counts samples by state and reason, and refuses every move that is not an arrow.

    Args:
        start: counts to start from (a resumed run); samples that it holds as accepted were trained
            before, `running` must be 0. `RunState.ledger` restores more than counts.

    Raises:
        InvariantError: on a move without an arrow, an unknown or a doubled sample.
    """

    def __init__(self, start: GateState | None = None) -> None:
        start = start or GateState()
        if start.running or start.admitted != start.accepted + start.rejected:
            raise InvariantError(
                f"cannot start from {start}: running must be 0 and admitted = accepted + rejected"
            )
        self._states: dict[GroupId, SampleState] = {}
        self.counts: dict[SampleState, int] = dict.fromkeys(SampleState, 0)
        self.counts[SampleState.TRAINED] = start.accepted
        self.counts[SampleState.REJECTED] = start.rejected
        self.reasons: dict[SampleState, Counter[str]] = {
            SampleState.REJECTED: Counter(),
            SampleState.FAILED: Counter(),
            SampleState.DROPPED: Counter(),
        }
        if start.rejected:
            self.reasons[SampleState.REJECTED]["before_resume"] = start.rejected
        self.unbatched: dict[GroupId, Admission] = {}
        """Samples that are running, finished or accepted, in the order of their admission."""
        self.num_admitted = start.admitted
        self.num_running = 0
        self.num_lost = start.rejected

    @property
    def num_accepted(self) -> int:
        """The gate's `accepted`: everything admitted that is neither running, interrupted nor
        lost."""
        interrupted = self.counts[SampleState.INTERRUPTED]
        return self.num_admitted - self.num_running - self.num_lost - interrupted

    def restore(self, group_id: GroupId, state: SampleState, admission: Admission | None) -> None:
        """Count a sample of an earlier life of the run; `admission` of one that is accepted."""
        if group_id in self._states:
            raise InvariantError(f"sample {group_id} was restored twice")
        if admission is not None:
            self.unbatched[group_id] = admission
        self._states[group_id] = state
        self.counts[state] += 1
        self.num_admitted += 1

    def restore_lost(self, state: SampleState, reasons: Mapping[str, int]) -> None:
        """Count samples of an earlier life that ended without being trained."""
        self.reasons[state].update(reasons)
        count = sum(reasons.values())
        self.counts[state] += count
        self.num_lost += count
        self.num_admitted += count

    def gate_state(self, version: int) -> GateState:
        """What the gate needs to know, as data."""
        return GateState(
            version=version,
            admitted=self.num_admitted,
            accepted=self.num_accepted,
            rejected=self.num_lost,
            running=self.num_running,
        )

    def admit(self, group_id: GroupId, admission: Admission) -> None:
        """A new sample is running, or an interrupted one again."""
        now = self._states.get(group_id)
        if now is SampleState.INTERRUPTED:
            self.counts[now] -= 1
        elif now is None:
            self.num_admitted += 1
        else:
            raise InvariantError(f"sample {group_id} was admitted twice")
        self.unbatched[group_id] = admission
        self._states[group_id] = SampleState.RUNNING
        self.counts[SampleState.RUNNING] += 1
        self.num_running += 1

    def move(self, group_id: GroupId, to: SampleState, reason: str | None = None) -> None:
        """Follow an arrow; `reason` is required for rejected, failed and dropped."""
        now = self._states.get(group_id)
        if now is None or to not in ARROWS[now] or to is SampleState.RUNNING:  # that is `admit`
            raise InvariantError(f"sample {group_id} cannot go from {now} to {to} ({reason})")
        self.counts[now] -= 1
        self.counts[to] += 1
        if now is SampleState.RUNNING:
            self.num_running -= 1
        if to in LOST:
            if reason is None:
                raise InvariantError(f"sample {group_id} became {to} without a reason")
            self.reasons[to][reason] += 1
            self.num_lost += 1
        if to in UNBATCHED_NO_MORE:
            del self.unbatched[group_id]
        if ARROWS[to]:
            self._states[group_id] = to
        else:
            del self._states[group_id]

    def living(self) -> dict[GroupId, SampleState]:
        """Samples that have not reached a final state."""
        return dict(self._states)

    def check(self) -> None:
        """Raise InvariantError unless every admitted sample is in exactly one state."""
        total = sum(self.counts.values())
        final = sum(self.counts[state] for state, arrows in ARROWS.items() if not arrows)
        if (
            total != self.num_admitted
            or total - final != len(self._states)
            or min(self.counts.values()) < 0
            or self.counts[SampleState.RUNNING] != self.num_running
            or sum(self.counts[state] for state in LOST) != self.num_lost
            or len(self.unbatched) + self.counts[SampleState.INTERRUPTED]
            != len(self._states) - self.counts[SampleState.BATCHED]
        ):
            raise InvariantError(
                f"the ledger does not add up: admitted {self.num_admitted}, states {self.counts}, "
                f"{len(self._states)} living, {self.num_running} running, {self.num_lost} lost"
            )

    def summary(self) -> dict[str, object]:
        """Counts by state and reason, as `summary.json` gives them."""
        return {
            "admitted": self.num_admitted,
            **{str(state): count for state, count in self.counts.items()},
            "reasons": {str(state): dict(why) for state, why in self.reasons.items()},
        }
