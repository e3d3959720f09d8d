"""`headway simulate`: a whole run in virtual time, with the files that a real one leaves."""

import asyncio
import signal
import time
from contextlib import nullcontext
from typing import Any

from headway.collector import tame_collector
from headway.config import Config
from headway.loop.outcome import Outcome
from headway.loop.summary import summarize
from headway.ports import MetricsSink
from headway.sim.clock import run_virtual
from headway.sim.run import build_simulation
from headway.store.run_dir import FanOut, RunDir
from headway.versions_of import versions_of


def simulate(config: Config, *, view: MetricsSink | None = None) -> dict[str, Any]:
    """Run the stated workload (`config.simulate`) and return the summary, times in virtual seconds.

    Writes the run directory: config, metric rows, trace, summary. Batches are not kept. Raises
    RunDirError.
    """
    config = _with_long_intervals(config)
    tame_collector()
    run_dir = RunDir.create(config)
    run_dir.write_versions(versions_of(engine="simulated", trainer="simulated"))
    kept = run_dir.open_trace() if config.store.trace else nullcontext()
    with run_dir.open_metrics() as rows, kept as trace:
        sink = FanOut(rows, view)
        summary = simulate_in_memory(config, metrics=sink, trace=trace)
        sink.emit({"kind": "summary", "time": summary["wall_seconds"], **summary})
    run_dir.write_summary(summary)
    return summary


def _with_long_intervals(config: Config) -> Config:
    """An interval row a virtual minute where nothing else was asked for: hours pass in seconds."""
    if "metrics_interval_seconds" in config.run.model_fields_set:
        return config
    run = config.run.model_copy(update={"metrics_interval_seconds": 60.0})
    return config.model_copy(update={"run": run})


def simulate_in_memory(
    config: Config, *, metrics: MetricsSink | None = None, trace: MetricsSink | None = None
) -> dict[str, Any]:
    """Run the stated workload and return the summary; leaves no files. Raises Deadlock."""

    async def main() -> dict[str, Any]:
        orchestrator = build_simulation(config, metrics=metrics, replaced={"trace": trace})
        try:
            outcome = await orchestrator.run()
        except asyncio.CancelledError:  # Ctrl-C: what there is, is the result
            outcome = Outcome(exit_reason="interrupted", exit_code=128 + signal.SIGINT)
        seconds = asyncio.get_running_loop().time() - orchestrator.started_at
        return summarize(
            config,
            orchestrator,
            outcome,
            wall_seconds=seconds,
            loop_seconds=seconds,
            versions_of=versions_of(engine="simulated", trainer="simulated"),
        )

    started = time.process_time()
    summary = run_virtual(main())
    summary["cpu_seconds"] = time.process_time() - started
    return summary
