"""Pacing: how much of the budget that `S` allows is used."""

from enum import StrEnum


class Pacing(StrEnum):
    """How many samples are admitted."""

    FILL = "fill"
    """As many as the gate allows."""
    JUST_IN_TIME = "just_in_time"
    """As many as keep the trainer busy; `S` is only a ceiling."""


class PacingState:
    """Stub until the controller is there."""


class JustInTime:
    """Stub until the controller is there."""

    def __init__(self, *, batch_size: int, ceiling: int | None, state: PacingState | None) -> None:
        self._limit = ceiling or 10**9

    def limit(self) -> int:
        return self._limit

    def batch_taken(self, taken: object) -> None:
        pass
