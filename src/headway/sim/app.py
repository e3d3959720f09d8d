"""`headway simulate`: a whole run in virtual time, with the files that a real one leaves."""

import asyncio
import time
from typing import Any

from headway.config import Config
from headway.loop.summary import summarize
from headway.ports import MetricsSink
from headway.sim.clock import run_virtual
from headway.sim.run import build_simulation
from headway.store.run_dir import FanOut, RunDir
from headway.versions_of import versions_of


def simulate(config: Config, *, view: MetricsSink | None = None) -> dict[str, Any]:
    """Run the stated workload (`config.simulate`) and return the summary, times in virtual seconds.

    Writes the run directory: config, metric rows, summary. Batches are not kept. Raises
    RunDirError.
    """
    run_dir = RunDir.create(config)
    versions = versions_of(engine="simulated", trainer="simulated")
    run_dir.write_versions(versions)
    with run_dir.open_metrics() as rows:
        sink = FanOut(rows, view)
        started = time.process_time()

        async def main() -> dict[str, Any]:
            orchestrator = build_simulation(config, metrics=sink)
            outcome = await orchestrator.run()
            seconds = asyncio.get_running_loop().time() - orchestrator.started_at
            return summarize(
                config,
                orchestrator,
                outcome,
                wall_seconds=seconds,
                loop_seconds=seconds,
                versions_of=versions,
            )

        summary = run_virtual(main())
        summary["cpu_seconds"] = time.process_time() - started
        sink.emit({"kind": "summary", "time": summary["wall_seconds"], **summary})
    run_dir.write_summary(summary)
    return summary
