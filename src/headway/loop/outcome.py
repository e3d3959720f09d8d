"""How a run ended, told truthfully."""

from collections.abc import Sequence
from dataclasses import dataclass

from headway.errors import HeadwayError, InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. `error` is None for a completed or interrupted run."""

    exit_reason: str
    exit_code: int
    message: str | None = None
    error: BaseException | None = None


COMPLETED = Outcome(exit_reason="completed", exit_code=0)


class RunEnded(Exception):
    """Raised inside the run's TaskGroup to end all parts with an outcome that is no error."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.exit_reason)
        self.outcome = outcome


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of what ended the run.

    A broken invariant comes before all others, then what has no name (a bug), then the first named
    error; a regular end counts only when nothing went wrong beside it.
    """
    leaves = _leaves(error)
    ended = [leaf.outcome for leaf in leaves if isinstance(leaf, RunEnded)]
    wrong = [leaf for leaf in leaves if not isinstance(leaf, RunEnded)]
    if not wrong:
        return ended[0]
    broken = [leaf for leaf in wrong if isinstance(leaf, InvariantError)]
    unnamed = [leaf for leaf in wrong if not isinstance(leaf, HeadwayError)]
    first = (broken or unnamed or wrong)[0]
    if isinstance(first, HeadwayError):
        return Outcome(
            exit_reason=first.exit_reason,
            exit_code=first.exit_code,
            message=str(first),
            error=first,
        )
    message = f"{type(first).__name__}: {first}"
    return Outcome(exit_reason="error", exit_code=1, message=message, error=first)


def _leaves(error: BaseException) -> Sequence[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
