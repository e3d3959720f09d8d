"""Every error that Headway raises on purpose, named for the boundary that was crossed.

A message says what was wrong, where, and what to do. `exit_code` is what the process ends with, so
that a launcher never takes a failed run for a finished one.
"""

from enum import StrEnum


class FailureClass(StrEnum):
    """Who is to blame for a rollout that did not finish (docs/glossary.md)."""

    INFRASTRUCTURE = "infrastructure"
    """An engine or sandbox died: the prompt is retried and never trained as a zero."""
    ENVIRONMENT = "environment"
    """The task or its reward broke: bounded retry, then the sample fails and is counted."""


class HeadwayError(Exception):
    """Base of all errors that Headway raises on purpose."""

    exit_code = 1
    exit_reason = "error"
    """What `summary.json` says when this ended the run."""


class ConfigError(HeadwayError):
    """The configuration cannot work; nothing was started."""

    exit_code = 2


class RunDirError(HeadwayError):
    """The run directory exists already, cannot be written, or lacks something."""

    exit_code = 2


class EngineError(HeadwayError):
    """An inference engine refused, broke off, or answered with something unusable."""

    exit_reason = "engine_failed"
    failure_class = FailureClass.INFRASTRUCTURE


class TransportError(EngineError):
    """The connection to an engine failed before a whole answer was read."""


class EngineRefusal(EngineError):
    """An engine answered, and said no: its state is what it was.

    `status` is the HTTP status; `retry_after_seconds` is how long it asked to be left alone.
    """

    def __init__(self, message: str, *, status: int, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_busy(self) -> bool:
        """Whether it would take the same request later."""
        return self.status in (429, 503)

    @property
    def is_engines_fault(self) -> bool:
        """Whether another engine may take what this one refused."""
        return self.is_busy or self.status >= 500


class UnusableAnswer(EngineError):
    """A whole answer that cannot be data: no JSON, fewer log-probabilities than tokens, ..."""


class WrongVersion(UnusableAnswer):
    """An answer whose version stamps contradict what the engine was told to load."""


class EnvironmentFailure(HeadwayError):
    """An environment or its reward function raised; `stage` is `"environment"` or `"reward"`."""

    exit_reason = "environment_failed"
    failure_class = FailureClass.ENVIRONMENT

    def __init__(self, message: str, *, stage: str = "environment") -> None:
        super().__init__(message)
        self.stage = stage


class TrainerError(HeadwayError):
    """The trainer died, or published something unusable."""

    exit_reason = "trainer_failed"


class WeightsError(HeadwayError):
    """A published checkpoint is incomplete or does not match its manifest."""

    exit_reason = "trainer_failed"


class StoreError(HeadwayError):
    """Writing or reading the run directory failed."""

    exit_reason = "store_failed"


class EmptyBatchesError(HeadwayError):
    """Too many batches in a row held nothing to train on."""

    exit_reason = "empty_batches"


class TaskSourceExhausted(HeadwayError):
    """The task source ended before the step target could be reached."""

    exit_reason = "tasks_exhausted"


class StallError(HeadwayError):
    """A wait outlived its deadline; the message names what everything waits for."""

    exit_reason = "stalled"


class PartEndedError(HeadwayError):
    """A part of the loop ended although the run had not."""

    exit_reason = "part_ended"


class InvariantError(HeadwayError):
    """Headway itself is wrong: an invariant broke. The message holds every operand."""

    exit_reason = "invariant_broken"
    exit_code = 3
