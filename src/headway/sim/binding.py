"""What a simulated run is limited by: the loop is asked again and again what it waits for."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headway.config import Config
from headway.loop.orchestrator import Orchestrator
from headway.sim.distributions import curve_of

LOOKS_PER_STEP = 8
"""How often per mean step the loop is asked what it waits for."""

GOLDEN = 0.618034
"""Its multiples, without their whole parts, spread evenly over 0 to 1."""

MIN_PAUSE = 1e-6
"""Virtual seconds between two looks, at least: the clock cannot tell much shorter ones apart."""

BUSY = 0.03
"""A trainer that is idle for a smaller share of the time is what limits the run."""

SATURATED = 0.97
"""Engines that sample at this share of the most that they can are full."""


class Binding(StrEnum):
    """What a setting's step time is limited by: what would have to change to make it shorter."""

    TRAINER = "trainer"
    """The trainer is never short of a batch."""
    CONCURRENCY = "concurrency"
    """Generation, by `max_concurrent_rollouts`."""
    ENGINES = "engines"
    """Generation, and the engines cannot sample faster."""
    STALENESS = "staleness"
    """Generation, held back by the gate: `S`."""
    STRAGGLERS = "stragglers"
    """Full batches wait for samples that must be in them."""
    PACING = "pacing"
    """Generation, held back by the pacing controller."""
    UPDATES = "updates"
    """Generation, which stands still or drains while new weights reach the engines."""


BINDING_TEXT = {
    Binding.TRAINER: "the trainer is busy all the time",
    Binding.CONCURRENCY: "too few rollouts in flight",
    Binding.ENGINES: "the engines are full",
    Binding.STALENESS: "the staleness gate holds generation back",
    Binding.STRAGGLERS: "batches wait for stragglers",
    Binding.PACING: "pacing holds generation back",
    Binding.UPDATES: "the engines take new weights for much of the time",
}


@dataclass(slots=True)
class Window:
    """What is seen of a simulated run between its warm-up and its end."""

    first: int
    last: int
    deadline: float
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    started_at: float = 0.0
    steps: int = 0
    waits: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Virtual seconds by what held admission back, while no update was under way."""
    loads: list[tuple[int, float]] = field(default_factory=list)
    """Requests that an engine ran, and for how many virtual seconds that stands."""
    max_load: int = 0
    num_looks: int = 0
    end: asyncio.Event = field(default_factory=asyncio.Event)

    def emit(self, row: Mapping[str, Any]) -> None:
        """A MetricsSink that keeps the step rows."""
        if row["kind"] != "step":
            return
        self.steps += 1
        if row["step"] < self.first:
            self.started_at = row["time"]
        elif not self.end.is_set():
            self.rows.append(row)
        if row["step"] >= self.last or time.monotonic() > self.deadline:
            self.end.set()

    @property
    def load(self) -> float:
        """Mean running requests per engine."""
        return self.mean(float)

    def mean(self, value: Callable[[int], float]) -> float:
        """Mean over time of a value of the load; 0 before the first look."""
        total = sum(seconds for _, seconds in self.loads)
        return sum(value(one) * span for one, span in self.loads) / total if total else 0.0

    async def watch(self, run: Orchestrator) -> None:
        """Look at what holds admission back, several times a step.

        The pause follows the mean step so far: steps may come in bursts, and a pause that followed
        the last one would shrink to nothing. It varies a little, lest all looks fall on the same
        moments of a regular step; each counts for the time since the one before.
        """
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        while True:
            elapsed = loop.time() - began_at
            mean = elapsed / (self.steps * LOOKS_PER_STEP) if self.steps else elapsed
            self.num_looks += 1
            pause = max(mean * (0.5 + self.num_looks * GOLDEN % 1), MIN_PAUSE)
            await asyncio.sleep(pause)
            engines = await run.engine.statistics()
            running = [one.num_running for one in engines.values()]
            self.max_load = max(self.max_load, *running)
            if not self.rows:
                continue
            self.loads += [(one, pause) for one in running]
            if run.policy.announced > run.policy.version:
                continue  # what admission waits for now is the update's doing
            wait = run.waits.current.get("submission")
            self.waits[_held_by(wait.what if wait else "")] += pause


def binding_of(
    config: Config,
    window: Window,
    trainer_idle: float,
    held: float,
    step_seconds: float,
    updating: float,
) -> tuple[Binding, str]:
    """What limits a run whose steady state was seen through a window, and how that shows.

    Args:
        trainer_idle: as a share of the time.
        held: seconds per step that a full batch waited for samples that must be in it.
        updating: the share of the time in which a version was announced and not yet served.
    """
    idle = f"trainer idle {100 * trainer_idle:.0f} %"
    if trainer_idle < BUSY:
        return Binding.TRAINER, idle
    if held > 0.5 * trainer_idle * step_seconds:
        return Binding.STRAGGLERS, f"{idle}, full batches held {held:.2g} s a step"
    stated = config.simulate
    if stated.rollout_tokens is not None and window.loads:
        curve = curve_of(stated.engine.throughput)
        use = window.mean(curve) / curve(stated.engine.slots)
        if use >= SATURATED:
            return Binding.ENGINES, f"{idle}, engines at {100 * use:.0f} % of their speed"
    looked = sum(window.waits.values())
    left = (1 - updating) / looked if looked else 0.0
    held_by = {kind: window.waits[kind] * left for kind in Binding}
    held_by[Binding.UPDATES] = updating
    kind = max(held_by, key=lambda one: held_by[one])
    share = f"{100 * held_by[kind]:.0f} % of the time"
    if kind is Binding.UPDATES and updating >= BUSY:
        return kind, f"{idle}, a new version is on its way to the engines {share}"
    if kind is Binding.UPDATES or not held_by[kind]:
        return Binding.ENGINES, f"{idle}, {window.load:.3g} requests run per engine"
    return kind, f"{idle}, admission held back by it {share}"


def _held_by(what: str) -> str:
    """What held admission back, from the words of the wait board."""
    for words, kind in (
        ("max_concurrent_rollouts", Binding.CONCURRENCY),
        ("max_head_offpolicyness", Binding.STALENESS),
        ("to be served", Binding.STALENESS),
        ("pacing", Binding.PACING),
    ):
        if words in what:
            return kind
    return ""
