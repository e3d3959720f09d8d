"""The capacity gate: whether a new sample may be admitted.

    capacity = min(max_concurrent - running, (S + version + 1) * B - (accepted + running))

The formula is AReaL's `StalenessManager` (arXiv:2505.24298). It bounds *admission*: of all samples
admitted while the policy is at version `v`, at most `(S + v + 1) * B` are in the system, so a
sample admitted at `v` is among the first `(S + v + 1) * B` to be admitted and, **if samples
finish in the order in which they were admitted**, is trained in batch `v + S` or before, at an age
of at most `S`. Any other completion order loses that bound; `core/bound.py` is what is done about
it.

The gate's state is data and is read off the ledger, which is the only place that counts samples:
there is no second counter that a resume could forget.
"""

from dataclasses import dataclass
from typing import Self

from headway.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """Counts of samples since version 0; `accepted` are those finished and not rejected.

    A sample that has finished but has not been judged yet counts as accepted: rejecting it gives
    its place back.
    """

    version: int = 0
    admitted: int = 0
    accepted: int = 0
    rejected: int = 0
    running: int = 0

    @classmethod
    def recovered(cls, version: int, batch_size: int) -> Self:
        """The state of a run that trained `version` batches and has nothing else in the system."""
        return cls(version=version, admitted=version * batch_size, accepted=version * batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityGate:
    """The limits of the gate.

    Args:
        max_head_offpolicyness: `S`, versions. None removes the staleness term.
        batch_size: `B`, samples.
        max_concurrent: samples in flight.
        target_samples: samples that the whole run can use (`steps * B`); None for no end. Near the
            step target admission closes by itself, so that little is generated in vain.
        spare_samples: admitted beyond that, so that the last batches need not wait for the last
            stragglers.
    """

    max_head_offpolicyness: int | None
    batch_size: int
    max_concurrent: int
    target_samples: int | None = None
    spare_samples: int = 0

    def capacity(self, state: GateState) -> int:
        """How many samples may be admitted now; negative when the limits were lowered.

        Example:
            >>> gate = CapacityGate(max_head_offpolicyness=4, batch_size=8, max_concurrent=12)
            >>> gate.capacity(GateState())
            12
        """
        return self.slots(state.version, state.accepted, state.running)

    def slots(self, version: int, accepted: int, running: int) -> int:
        """`capacity` on bare numbers, for the admission loop."""
        slots = self.max_concurrent - running
        in_system = accepted + running
        if self.max_head_offpolicyness is not None:
            fresh = (self.max_head_offpolicyness + version + 1) * self.batch_size - in_system
            slots = min(slots, fresh)
        if self.target_samples is not None:
            slots = min(slots, self.target_samples + self.spare_samples - in_system)
        return slots

    @property
    def first_step_limit(self) -> int | None:
        """Most admissions before the first version bump after a start or resume: `(S + 1) * B`."""
        if self.max_head_offpolicyness is None:
            return None
        return (self.max_head_offpolicyness + 1) * self.batch_size

    @property
    def most_unbatched(self) -> int:
        """Samples that can be in the system beside what is trained, as long as batches are taken:
        the concurrency limit and one batch, or `(S + 1) * B` if that is less."""
        most = self.max_concurrent + self.batch_size
        limit = self.first_step_limit
        return most if limit is None else min(most, limit)


def check_start(gate: CapacityGate, start: GateState) -> None:
    """Refuse a start state that opens more than `(S + 1) * B` places at once.

    That is how a resume loses its bound for the rest of the run: the version is restored and the
    counters are not. A concurrency limit would only hide the burst, so it is left out here.

    Raises:
        InvariantError: with every operand.
    """
    limit = gate.first_step_limit
    if limit is None or gate.max_head_offpolicyness is None:
        return
    in_system = start.accepted + start.running
    opens = (gate.max_head_offpolicyness + start.version + 1) * gate.batch_size - in_system
    if opens > limit:
        raise InvariantError(
            f"the first step would admit {opens} samples, at most (S + 1) * B = {limit} are "
            f"allowed: the counters do not belong to the version (S = "
            f"{gate.max_head_offpolicyness}, B = {gate.batch_size}, {start})"
        )


def check_first_step(gate: CapacityGate, num_admitted: int, num_freed: int) -> None:
    """What was admitted until the first version bump after a start must fit into `(S + 1) * B`, not
    counting places that samples gave back (`num_freed`: rejected, failed or dropped since).

    Raises:
        InvariantError: with every operand.
    """
    limit = gate.first_step_limit
    if limit is not None and num_admitted - num_freed > limit:
        raise InvariantError(
            f"the first step admitted {num_admitted} samples, of which {num_freed} gave their "
            f"place back: more than (S + 1) * B = {limit} (S = {gate.max_head_offpolicyness}, B = "
            f"{gate.batch_size})"
        )
