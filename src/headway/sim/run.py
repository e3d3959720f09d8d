"""Wires the real orchestrator to simulated parts; runs under any event loop, best a virtual one."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from headway import __version__
from headway.config import Config
from headway.core.gate import GateState
from headway.core.pacing import PacingState
from headway.core.records import RunState
from headway.core.rollout import Task
from headway.engines.pool import EnginePool
from headway.envs.mixture import MixedTasks
from headway.loop.orchestrator import Orchestrator
from headway.ports import Engine, MetricsSink, Ports, RunStore, TaskSource
from headway.sim.distributions import curve_of
from headway.sim.engine import SimulatedEngine
from headway.sim.environment import CountingTasks, SimulatedEnvironment
from headway.sim.trainer import MemoryStore, RowList, SimulatedTrainer
from headway.sim.workload import Workload


def build_simulation(
    config: Config,
    *,
    latency: Callable[[], float] | None = None,
    start: GateState | None = None,
    check_first_step: bool = True,
    pacing: PacingState | None = None,
    resume: RunState | None = None,
    store: RunStore | None = None,
    metrics: MetricsSink | None = None,
    replaced: Mapping[str, Any] | None = None,
) -> Orchestrator:
    """The orchestrator of a simulated run, as `config.simulate` states the workload.

    Args:
        latency: draws the seconds of one engine request instead of `simulate.rollout_seconds`.
        replaced: fields of Ports that something else takes the place of.
        start, check_first_step, pacing, resume: as in Orchestrator.

    Raises:
        ConfigError: a file of values that the workload names cannot be used.
    """
    workload = Workload(config, latency=latency)
    begun = resume or start
    version = begun.version if begun else 0
    trainer = SimulatedTrainer(train_seconds=workload.train_seconds, version=version)
    engine, names = _engines(config, workload, version)
    num_evals = config.eval.num_tasks if config.eval.every else 0
    ports = Ports(
        engine=engine,
        environments={label: SimulatedEnvironment(label, workload) for label in workload.labels},
        source=tasks_of(config),
        trainer=trainer,
        channel=trainer,
        store=store or MemoryStore(),
        metrics=metrics or RowList(),
        eval_tasks=[
            Task(env=label, key=f"eval-{index}", position=index, data={})
            for label in workload.labels
            for index in range(num_evals)
        ],
        watched={"trainer": trainer.run},
        labels={"simulated": True, "engines": names, "headway": __version__},
    )
    return Orchestrator(
        config,
        dataclasses.replace(ports, **(replaced or {})),
        start=start,
        check_first_step=check_first_step,
        pacing=pacing,
        resume=resume,
    )


def _engines(config: Config, workload: Workload, version: int) -> tuple[Engine, list[str]]:
    """One engine, or a pool of several, and their names."""
    count, start = config.engine.count, engine_maker(config, workload, version)
    engines = [
        start("simulated engine" if count == 1 else f"simulated engine {number}")
        for number in range(count)
    ]
    names = [engine.name for engine in engines]
    if count == 1:
        return engines[0], names
    seconds = config.engine.update_seconds
    return EnginePool(engines, update_seconds=seconds, version=version), names


def engine_maker(
    config: Config, workload: Workload, version: int
) -> Callable[[str], SimulatedEngine]:
    """Makes an engine of this name, which serves `version`, as `config.simulate` states it."""
    stated = config.simulate
    load: dict[str, Any] = {"tokens_per_work": stated.tokens_per_second}
    if stated.rollout_tokens is not None:
        curve = curve_of(stated.engine.throughput)
        load = {"speed": cache(lambda num: curve(num) / num), "slots": stated.engine.slots}

    def make(name: str) -> SimulatedEngine:
        return SimulatedEngine(
            turn=workload.turn,
            **load,
            sync_seconds=stated.weight_sync_seconds,
            recompute_seconds=stated.recompute_seconds,
            update_mode=config.engine.update_mode,
            stamps_tokens=config.engine.stamps_tokens,
            version=version,
            name=name,
        )

    return make


def tasks_of(config: Config) -> TaskSource:
    """Endless tasks, mixed by the environments' weights."""
    labels = [env.label for env in config.envs]
    if len(labels) == 1:
        return CountingTasks(labels[0])
    weights = [env.weight for env in config.envs]
    return MixedTasks({label: CountingTasks(label) for label in labels}, weights)
