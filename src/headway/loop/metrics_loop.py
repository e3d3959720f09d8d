"""The metrics loop: one row on a fixed interval, independent of the training path."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from headway.config import Config
from headway.loop.dispatcher import Dispatcher
from headway.loop.engine_meter import EngineMeter
from headway.loop.policy import PolicyHandle
from headway.loop.ship_gate import ShipGate
from headway.loop.signal import WaitBoard
from headway.loop.step_log import StepLog
from headway.loop.train_sink import TrainSink
from headway.ports import MetricsSink

PARTS = ("feed", "submission", "fetch", "ship", "watcher")


def run_row(config: Config, labels: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first row of a run: what was set, and the bound that it guarantees."""
    rollout = config.rollout
    return {
        "kind": "run",
        "run_dir": config.run.dir,
        "seed": config.run.seed,
        "steps": config.run.steps,
        "configured": rollout.max_head_offpolicyness,
        "guaranteed": config.bound.guaranteed_age,
        "enforcement": rollout.enforcement,
        "order": rollout.order,
        "over_bound": rollout.over_bound,
        "pacing": rollout.pacing,
        "batch_size": rollout.consumer_batch_size,
        "group_size": rollout.group_size,
        "max_concurrent": rollout.max_concurrent,
        **labels,
    }


class IntervalRow:
    """Reads all parts at one instant; `docs/metrics.md` names the keys."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        train_sink: TrainSink,
        ship_gate: ShipGate,
        engine: EngineMeter,
        policy: PolicyHandle,
        log: StepLog,
        waits: WaitBoard,
        now: Callable[[], float],
    ) -> None:
        self._now = now
        self._dispatcher = dispatcher
        self._train_sink = train_sink
        self._ship_gate = ship_gate
        self._engine = engine
        self._policy = policy
        self._log = log
        self._waits = waits
        self._process = psutil.Process()
        self._last_at = log.started_at
        self._last_tokens = engine.num_tokens

    async def read(self) -> Mapping[str, Any]:
        """The row. Raises EngineError when an engine does not answer."""
        engines = await self._engine.statistics()
        # From here on there is no await: everything belongs to the same instant.
        now = asyncio.get_running_loop().time()
        tokens = self._engine.num_tokens
        seconds, new_tokens = now - self._last_at, tokens - self._last_tokens
        self._last_at, self._last_tokens = now, tokens
        dispatcher = self._dispatcher.statistics()
        shipped = self._ship_gate.num_shipped
        waits = self._waits.current
        return {
            "kind": "interval",
            "time": self._now(),
            "version": self._policy.version,
            "step": shipped,
            "num_running": dispatcher.num_running,
            "capacity": dispatcher.capacity,
            "in_queue": dispatcher.in_queue,
            "out_queue": dispatcher.out_queue,
            "num_buffered": len(self._train_sink),
            "batches_waiting": int(self._train_sink.is_full),
            "batches_shipped": shipped,
            "age": self._log.ages.summary(),
            "tokens_generated": tokens,
            "tokens_per_second": new_tokens / seconds if seconds > 0 else 0.0,
            "eval_running": dispatcher.num_eval_running,
            "waiting_for": {
                **{part: waits[part].what if part in waits else None for part in PARTS},
                "trainer": f"batch {shipped}" if self._policy.version >= shipped else None,
            },
            "engines": {
                name: {
                    "num_running": one.num_running,
                    "num_waiting": one.num_waiting,
                    "tokens_per_second": one.tokens_per_second,
                    "pause_seconds": one.pause_seconds,
                }
                for name, one in engines.items()
            },
            "idle": {"trainer": self._log.trainer_idle_share, "engine": self._engine.idle_share},
            "rss_mb": self._process.memory_info().rss / 2**20,
        }


class MetricsLoop:
    """Emits a row every `interval_seconds` of loop time, whatever the other parts do."""

    def __init__(self, *, row: IntervalRow, sink: MetricsSink, interval_seconds: float) -> None:
        self._row = row
        self._sink = sink
        self._interval_seconds = interval_seconds

    async def run(self) -> None:
        """For ever. Raises EngineError."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            self._sink.emit(await self._row.read())
