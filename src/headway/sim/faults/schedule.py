"""A schedule of faults, as data: the same schedule gives the same run, event by event."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from headway.config import Config
from headway.errors import ConfigError


class FaultKind(StrEnum):
    """What goes wrong. `which` of a fault chooses among engines, stages or strays."""

    ENGINE_CRASH = "engine_crash"
    """Requests fail; the engine comes back with the weights that it was started on, or never."""
    ENGINE_HANG = "engine_hang"
    """Nothing is answered, neither requests nor health checks nor updates; then all of it is."""
    SLOW_START = "slow_start"
    """The engine takes its time to connect."""
    LATE_ANSWERS = "late_answers"
    """Requests that were given up are answered all the same."""
    WRONG_ANSWERS = "wrong_answers"
    """Too few log-probabilities, a version that went backwards, no usable answer."""
    UPDATE_FAILS = "update_fails"
    """The next weight updates of the engine fail half-way."""
    UPDATE_REFUSED = "update_refused"
    """The next weight updates of the engine are refused; it serves on as before."""
    UPDATE_HANGS = "update_hangs"
    """The next weight update of the engine never ends."""
    ENV_ERROR = "env_error"
    """Episodes raise, each something else."""
    ENV_HANG = "env_hang"
    """Episodes that begin never end."""
    TRAINER_CRASH = "trainer_crash"
    """The trainer dies at a stage of its work (`TRAINER_STAGES`)."""
    TRAINER_HANG = "trainer_hang"
    """The trainer stands still."""
    BAD_WEIGHTS = "bad_weights"
    """The next version holds values that are not finite."""
    CORRUPT_CHECKPOINT = "corrupt_checkpoint"
    """Before the life, the newest checkpoint loses or changes bytes."""
    STRAY_FILES = "stray_files"
    """Before the life and at an instant in it, files that are nobody's lie in every folder."""
    SLOW_DISK = "slow_disk"
    """Every use of the disk takes up to a second."""
    FULL_DISK = "full_disk"
    """Every write fails, after some bytes."""
    KILL = "kill"
    """The process is killed before the `at`-th callback of its event loop; `which` odd: the trainer
    lives a little longer and ends what it was doing."""
    KILL_IN_RECOVERY = "kill_in_recovery"
    """The resume is killed at its `at`-th call, before the loop begins."""
    CLOCK_JUMP = "clock_jump"
    """The machine was suspended: every timer that is due fires at once."""
    STOP = "stop"
    """SIGTERM; `which` odd: again, `seconds` later."""


TRAINER_STAGES = (
    "while it waits",
    "while it trains",
    "before it publishes",
    "while it publishes",
    "after it has published",
    "while it saves",
    "after it has saved",
)

AT_START = frozenset(
    {FaultKind.CORRUPT_CHECKPOINT, FaultKind.KILL_IN_RECOVERY, FaultKind.SLOW_START}
)
"""Kinds whose instant is the start of a life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Args:
        life: in which life of the run, from 0 on.
        at: virtual seconds since its start; for kills, callbacks or calls.
        seconds: how long it lasts; None: for the rest of the life.
    """

    kind: FaultKind
    life: int = 0
    at: float = 0.0
    seconds: float | None = None
    which: int = 0

    def is_active(self, now: float) -> bool:
        """Whether it lasts at this instant of its life."""
        return self.at <= now and (self.seconds is None or now < self.at + self.seconds)

    def __str__(self) -> str:
        where = f"life {self.life}"
        if self.kind in (FaultKind.KILL, FaultKind.KILL_IN_RECOVERY):
            unit = "callback" if self.kind is FaultKind.KILL else "call"
            return f"{where}: {self.kind} before {unit} {self.at:g} (which {self.which})"
        lasts = "" if self.seconds is None else f" for {self.seconds:g} s"
        at = "" if self.kind in AT_START else f" at {self.at:g} s"
        return f"{where}: {self.kind}{at}{lasts} (which {self.which})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A run and all that goes wrong with it.

    Args:
        seed: that it was drawn from, or that the parts of the run draw from.
        config: sections of the configuration, as a file would have them.
        seconds: how long the run takes undisturbed, in virtual seconds; None: unknown.
    """

    seed: int
    config: Mapping[str, Any]
    faults: tuple[Fault, ...] = ()
    seconds: float | None = None

    @property
    def time_limit(self) -> float | None:
        """Virtual seconds after which any life of it should have ended, whatever is broken."""
        return None if self.seconds is None else 3_000.0 + 20 * self.seconds

    def resolved(self) -> Config:
        """The configuration. Raises pydantic's ValidationError."""
        return Config.model_validate(self.config)

    def of_life(self, life: int) -> tuple[Fault, ...]:
        """What goes wrong in one life."""
        return tuple(fault for fault in self.faults if fault.life == life)

    @property
    def num_broken_lives(self) -> int:
        """Lives up to the last one in which something goes wrong."""
        return max((fault.life + 1 for fault in self.faults), default=0)

    def with_faults(self, faults: tuple[Fault, ...]) -> Self:
        """The same run, and other faults."""
        return dataclasses.replace(self, faults=faults)

    def with_steps(self, steps: int) -> Self:
        """The same, up to another step."""
        run = {**self.config.get("run", {}), "steps": steps}
        return dataclasses.replace(self, config={**self.config, "run": run})

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises ConfigError when it is no schedule."""
        try:
            content = json.loads(text)
            faults = tuple(
                Fault(**{**one, "kind": FaultKind(one["kind"])}) for one in content["faults"]
            )
            return cls(
                seed=int(content["seed"]),
                config=content["config"],
                faults=faults,
                seconds=content.get("seconds"),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"this is no schedule of faults ({type(error).__name__}: {error}): give one as "
                "headway simulate --faults prints it"
            ) from error
