"""Shared by tests: simulated runs of the real orchestrator in virtual time."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.config import Config
from headway.loop.orchestrator import Orchestrator
from headway.loop.outcome import Outcome
from headway.sim.clock import run_virtual
from headway.sim.run import build_simulation
from headway.sim.trainer import MemoryStore, RowList


@dataclass(frozen=True)
class SimulatedRun:
    """A finished simulated run."""

    orchestrator: Orchestrator
    outcome: Outcome
    rows: list[dict[str, Any]]
    store: MemoryStore
    virtual_seconds: float

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Rows of one kind."""
        return [row for row in self.rows if row["kind"] == kind]


def sim_config(*, envs: Sequence[dict[str, Any]] | None = None, **sections: Any) -> Config:
    """A small configuration whose sections can be overridden; eval is off."""
    base: dict[str, dict[str, Any]] = {
        "run": {"steps": 20, "stall_seconds": 10_000},
        "rollout": {
            "max_head_offpolicyness": 2,
            "order": "completion",
            "over_bound": "admit",
            "pacing": "fill",
            "consumer_batch_size": 8,
            "group_size": 1,
            "filters": [],
            "max_concurrent_rollouts": 64,
            "deadline_seconds": 1000,
        },
        "actor": {"advantage": "mean"},
        "eval": {"every": 0},
        "simulate": {
            "rollout_seconds": {"kind": "lognormal", "median": 5.0, "sigma": 1.0},
            "tokens_per_second": 10,
            "train_seconds": 2.0,
            "weight_sync_seconds": 0.1,
        },
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate(base if envs is None else {**base, "envs": envs})


def simulate_in_memory(
    config: Config,
    *,
    script: Callable[[Orchestrator], Any] | None = None,
    keep_batches: int | None = 0,
    ports: dict[str, Any] | None = None,
    **options: Any,
) -> SimulatedRun:
    """Run to the end in virtual time; `script(orchestrator)` is a coroutine that runs beside, and
    `ports` replaces fields of the orchestrator's Ports."""

    async def main() -> SimulatedRun:
        rows = RowList()
        store = MemoryStore(keep=keep_batches)
        orchestrator = build_simulation(
            config, metrics=rows, store=store, replaced=ports or {}, **options
        )
        beside = asyncio.ensure_future(script(orchestrator)) if script else None
        outcome = await orchestrator.run()
        if beside:
            beside.cancel()
        loop_time = asyncio.get_running_loop().time()
        return SimulatedRun(orchestrator, outcome, rows.rows, store, loop_time)

    return run_virtual(main())


def tick_latency(low: int, high: int) -> Callable[[], float]:
    """Latencies of the reference model, in ticks; half a tick less, so that whatever finishes in a
    tick has been trained when the next one begins."""
    rng = np.random.default_rng(0)

    def draw() -> float:
        ticks = low if high <= low else int(rng.integers(low, high))
        return ticks - 0.5

    return draw


async def admit_on_ticks(orchestrator: Orchestrator, ticks: int) -> list[int]:
    """Let the dispatcher admit only at whole ticks, then stop the run; admissions per tick."""
    admissions = []
    for _ in range(ticks):
        before = orchestrator.dispatcher.admissions
        orchestrator.dispatcher.resume()
        await asyncio.sleep(0.25)
        orchestrator.dispatcher.pause()
        admissions.append(orchestrator.dispatcher.admissions - before)
        await asyncio.sleep(0.75)
    orchestrator.stop()
    orchestrator.stop()
    return admissions
