"""Wires the real orchestrator to simulated parts; runs under any event loop, best a virtual one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from headway import __version__
from headway.config import Config
from headway.core.gate import GateState
from headway.core.rollout import Task
from headway.loop.orchestrator import Orchestrator, Ports
from headway.ports import MetricsSink, RunStore
from headway.sim.engine import SimulatedEngine, latency_sampler
from headway.sim.environment import CountingTasks, SimulatedEnvironment
from headway.sim.trainer import MemoryStore, RowList, SimulatedTrainer


def build_simulation(
    config: Config,
    *,
    latency: Callable[[], float] | None = None,
    start: GateState | None = None,
    check_first_step: bool = True,
    store: RunStore | None = None,
    metrics: MetricsSink | None = None,
    replaced: Mapping[str, Any] | None = None,
) -> Orchestrator:
    """The orchestrator of a simulated run, as `config.simulate` states the workload.

    Args:
        latency: draws the seconds of one engine request instead of `simulate.rollout_seconds`.
        replaced: fields of Ports that something else takes the place of.
        start, check_first_step: as in Orchestrator.
    """
    stated = config.simulate
    rng = np.random.default_rng(config.run.seed)
    version = start.version if start else 0
    engine = SimulatedEngine(
        latency=latency or latency_sampler(stated.rollout_seconds, rng),
        tokens_per_second=stated.tokens_per_second,
        sync_seconds=stated.weight_sync_seconds,
        version=version,
    )
    trainer = SimulatedTrainer(train_seconds=lambda: stated.train_seconds, version=version)
    label = config.envs[0].label
    environment = SimulatedEnvironment(
        label,
        prompt_tokens=stated.prompt_tokens,
        reward_probability=stated.reward_probability,
        rng=np.random.default_rng([config.run.seed, 1]),
    )
    num_evals = config.eval.num_tasks if config.eval.every else 0
    ports = Ports(
        engine=engine,
        environments={label: environment},
        source=CountingTasks(label),
        trainer=trainer,
        channel=trainer,
        store=store or MemoryStore(),
        metrics=metrics or RowList(),
        eval_tasks=[
            Task(env=label, key=f"eval-{index}", position=index, data={})
            for index in range(num_evals)
        ],
        watched={"trainer": trainer.run},
        labels={"simulated": True, "engines": [engine.name], "headway": __version__},
    )
    return Orchestrator(
        config,
        dataclasses.replace(ports, **(replaced or {})),
        start=start,
        check_first_step=check_first_step,
    )
