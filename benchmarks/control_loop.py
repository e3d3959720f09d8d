"""CPU time of the control loop per instant rollout, by number in flight.

The whole orchestrator runs in virtual time over an engine that computes nothing: it holds the given
number of requests and answers the oldest ones with a ready-made completion. What is measured is
therefore Headway's own CPU time: feed, gate, dispatch, deadlines, transcript, ledger, sink,
advantages, batch, ship gate, version bump, rows. Import and filling are left out.

    python -m benchmarks.control_loop [--json]
"""

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from headway.collector import tame_collector
from headway.config import Config
from headway.core.rollout import Completion, FinishReason
from headway.core.versions import VersionRuns
from headway.loop.orchestrator import Orchestrator
from headway.loop.outcome import Outcome
from headway.ports import EngineStatistics, GenerateRequest, PublishedWeights
from headway.sim.clock import run_virtual
from headway.sim.run import build_simulation

IN_FLIGHT = (64, 1024, 8192, 100_000)
ANSWERS = 64
NUM_MEASURED = 100_000
"""Rollouts measured at each size, at least twice the number in flight."""


def config_for(in_flight: int) -> Config:
    """`in_flight` samples of one rollout, batches of 64, the gate never the limit."""
    return Config.model_validate(
        {
            "run": {"steps": 10**9, "stall_seconds": 10**6, "metrics_interval_seconds": 1.0},
            "rollout": {
                "max_head_offpolicyness": 10**6,
                "consumer_batch_size": 64,
                "group_size": 1,
                "max_concurrent_rollouts": in_flight,
                "pacing": "fill",
                "filters": [],
                "max_batches_ahead": 64,
                "queue_size": 1024,
            },
            "actor": {"advantage": "mean"},
            "eval": {"every": 0},
            "weights": {"keep_last": 100},
            "simulate": {
                "train_seconds": 0.0,
                "weight_sync_seconds": 0.0,
            },
        }
    )


class InstantEngine:
    """Answers the oldest requests, `ANSWERS` at a time, whenever all places are taken."""

    name = "instant engine"

    def __init__(self, in_flight: int) -> None:
        self._in_flight = in_flight
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._version = 0
        self._token_ids = np.zeros(16, np.int32)
        self._logprobs = np.zeros(16, np.float32)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Wait for a turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if len(self._waiting) == self._in_flight:
            for _ in range(min(ANSWERS, self._in_flight)):
                self._waiting.popleft().set_result(None)
        await turn
        return Completion(
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            version_runs=VersionRuns(((self._version, 16),)),
            finish_reason=FinishReason.STOP,
        )

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Stamp with the new version from now on."""
        self._version = weights.version

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """How many wait."""
        return {self.name: EngineStatistics(num_running=len(self._waiting))}

    async def aclose(self) -> None:
        """Nothing to release."""


async def measure(in_flight: int) -> dict[str, Any]:
    """Fill the pipeline, then time `NUM_MEASURED` rollouts or two full turns."""
    tame_collector()
    orchestrator = build_simulation(
        config_for(in_flight), replaced={"engine": InstantEngine(in_flight)}
    )
    running = asyncio.ensure_future(orchestrator.run())
    num_rollouts = max(NUM_MEASURED, 2 * in_flight)
    await _until_admitted(orchestrator, running, in_flight)
    started, before = time.process_time(), orchestrator.dispatcher.admissions
    await _until_admitted(orchestrator, running, before + num_rollouts)
    seconds = time.process_time() - started
    done = orchestrator.dispatcher.admissions - before
    in_flight_seen = orchestrator.ledger.num_running
    orchestrator.stop()
    orchestrator.stop()
    await running
    return {
        "in_flight": in_flight,
        "in_flight_seen": in_flight_seen,
        "rollouts": done,
        "cpu_us_per_rollout": seconds / done * 1e6,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def _until_admitted(
    orchestrator: Orchestrator, running: "asyncio.Future[Outcome]", admissions: int
) -> None:
    while orchestrator.dispatcher.admissions < admissions:
        if running.done():
            raise RuntimeError(f"the run ended: {running.result()}")
        await asyncio.sleep(0)


def main() -> None:
    """One process per size, so that peak memory is that size's own."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(run_virtual(measure(int(sys.argv[2])))))
        return
    rows = []
    for in_flight in IN_FLIGHT:
        command = [sys.executable, "-m", "benchmarks.control_loop", "--one", str(in_flight)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    if "--json" in sys.argv:
        print(json.dumps(rows))
        return
    print("Control loop, instant rollouts (virtual time)")
    print(f"{'in flight':>10} {'CPU us/rollout':>15} {'peak memory MB':>15} {'rollouts':>10}")
    for row in rows:
        print(
            f"{row['in_flight']:>10,} {row['cpu_us_per_rollout']:>15.1f} "
            f"{row['peak_memory_mb']:>15.0f} {row['rollouts']:>10,}"
        )
    costs = [row["cpu_us_per_rollout"] for row in rows]
    print(f"largest over smallest: {max(costs) / min(costs):.2f}x")


if __name__ == "__main__":
    main()
