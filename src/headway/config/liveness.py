"""Section `liveness`: how long each part of a run may go without progress."""

from enum import StrEnum
from typing import Self

from headway.config.base import Seconds, Section

_FOR_EVER = 1e9


class OnStall(StrEnum):
    """What follows when a part makes no progress."""

    STOP = "stop"
    WARN = "warn"


class LivenessConfig(Section):
    """How long each part may go without progress; docs/reliability.md says how to choose. Rollouts
    and engines have theirs where they are set: `rollout.deadline_seconds`, `engine.update_seconds`,
    `engine.live_seconds`."""

    on_stall: OnStall = OnStall.STOP
    """A part that made no progress within its limit ends the run (`stop`), or is an event that says
    so once, and once more when it moves again (`warn`). Both name what everything waits for."""
    trainer_seconds: Seconds = 3600.0
    """From a batch that the trainer has to the version that it makes of it: one update and one
    publication, the first ones included."""
    disk_seconds: Seconds = 300.0
    """For one write to the run directory, of a batch or of records, to return."""
    tasks_seconds: Seconds = 600.0
    """For the task source to give a prompt when there is room for one."""
    rollout_seconds: Seconds = 60.0
    """For a rollout to end once it was told to, its `rollout.deadline_seconds` being over."""
    eval_seconds: Seconds = 3600.0
    """For any of the rollouts that an evaluation still lacks to come back."""

    @classmethod
    def all_of(cls, seconds: float) -> Self:
        """The same limit for every part."""
        limits = [name for name in cls.model_fields if name.endswith("_seconds")]
        return cls.model_validate(dict.fromkeys(limits, seconds))

    @classmethod
    def unlimited(cls) -> Self:
        """For times that are not those of this machine: a replay, a plan."""
        return cls.all_of(_FOR_EVER)
