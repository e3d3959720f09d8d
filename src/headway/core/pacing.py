"""Pacing: how much of the budget that `S` allows is used."""

from enum import StrEnum


class Pacing(StrEnum):
    """How many samples are admitted."""

    FILL = "fill"
    """As many as the gate allows."""
    JUST_IN_TIME = "just_in_time"
    """As many as keep the trainer busy; `S` is only a ceiling."""
