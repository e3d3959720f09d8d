"""`headway run`: wires the real parts, starts engines and trainer, and ends them again.

Start: run directory, model, environments, then engines and trainer side by side, then the loop.
End: the loop first, then the trainer (it ends by itself once it has trained what was shipped), then
the engines, each within its share of `run.shutdown_seconds`; then summary and report.
"""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway import __version__
from headway.collector import share_interpreter, tame_collector
from headway.config import Config
from headway.engines.launch import Fleet, start_engines
from headway.envs.registry import Tasks, load_tasks
from headway.errors import HeadwayError, StoreError, TrainerError
from headway.loop.orchestrator import Orchestrator
from headway.loop.outcome import Outcome, outcome_of
from headway.loop.stopping import PREEMPTED, interrupted
from headway.loop.summary import summarize
from headway.ports import MetricsSink, Ports
from headway.processes import ManagedProcess
from headway.resume import Recovered, recover
from headway.retention import estimate, human, prune_batches
from headway.store.database import RunDatabase
from headway.store.journal import GroupedJournal
from headway.store.run_dir import FanOut, RunDir
from headway.store.run_store import ParquetRunStore
from headway.trainer.link import FolderTrainerLink
from headway.versions_of import versions_of
from headway.views.report import write_report
from headway.weights.folder import FolderWeightChannel

TELL_SECONDS = 10.0
"""Between two lines that say what a start waits for."""
LOW_BYTES = 1 << 24
"""A disk with less than this is what a failure is likely to come from."""


def run(
    config: Config, *, model_dir: Path, view: MetricsSink | None = None, resume: bool = False
) -> dict[str, Any]:
    """Run to the end and return the summary; `exit_code` in it says how it went.

    Args:
        config: the resolved configuration.
        model_dir: folder of the initial model (`builtin_model.ensure_model`).
        view: shows metric rows while it runs.
        resume: go on with the run that `config.run.dir` holds.

    Raises:
        ConfigError, RunDirError, StoreError: nothing was started.
    """
    tasks = load_tasks(config, model_dir)
    run_dir = RunDir(Path(config.run.dir)) if resume else RunDir.create(config)
    with run_dir.lock():
        recovered = recover(config, run_dir, model_dir) if resume else None
        database = recovered.database if recovered else RunDatabase(run_dir.ledger)
        try:
            return _run(config, run_dir, model_dir, tasks, view, recovered, database)
        finally:
            database.close()


def _run(
    config: Config,
    run_dir: RunDir,
    model_dir: Path,
    tasks: Tasks,
    view: MetricsSink | None,
    recovered: Recovered | None,
    database: RunDatabase,
) -> dict[str, Any]:
    run_dir.write_config(config)
    versions = versions_of(engine=config.engine.kind, trainer="headway reference")
    run_dir.write_versions(versions)
    tame_collector()
    share_interpreter()
    kept = run_dir.open_trace() if config.store.trace else nullcontext()
    with run_dir.open_metrics() as rows, kept as trace:
        sink = FanOut(rows, view)
        real = _RealRun(
            config,
            run_dir,
            model_dir,
            tasks,
            database,
            recovered,
            metrics=sink,
            trace=trace,
        )
        runner = asyncio.Runner()
        try:
            summary = runner.run(real.main(versions))
        finally:
            if not real.is_abandoned:  # closing waits for tasks that ignore their cancellation
                runner.close()
        sink.emit({"kind": "summary", "time": summary["loop_seconds"], **summary})
    try:
        run_dir.write_summary(summary)
        write_report(run_dir.path)
    except OSError as error:
        if not summary["exit_code"]:
            summary |= {"exit_reason": StoreError.exit_reason, "exit_code": StoreError.exit_code}
        lost = f"summary or report cannot be written: {error}"
        summary["message"] = f"{summary['message']}; {lost}" if summary["message"] else lost
    return summary


class _RealRun:
    """One run with real processes."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        model_dir: Path,
        tasks: Tasks,
        database: RunDatabase,
        recovered: Recovered | None,
        *,
        metrics: MetricsSink,
        trace: MetricsSink | None,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._model_dir = model_dir
        self._tasks = tasks
        self._database = database
        self._recovered = recovered
        self._metrics = metrics
        self._trace_sink = trace
        self.is_abandoned = False
        self._started_at: float | None = None
        self._began_at = 0.0
        self._starting: asyncio.Task[None] | None = None
        self._engines: Fleet | None = None
        self._orchestrator: Orchestrator | None = None
        self._stopped: Outcome | None = None

    async def main(self, versions: Mapping[str, str]) -> dict[str, Any]:
        """Start, run, stop; there is a summary whatever happens."""
        started_at = time.monotonic()
        loop = asyncio.get_running_loop()
        self._began_at = loop.time()
        preempt_signal = signal.Signals[self._config.run.preempt_signal]
        stops = {number: interrupted(128 + number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number, ending in {**stops, preempt_signal: PREEMPTED}.items():
            loop.add_signal_handler(number, self._stop, ending)
        trainer = self._trainer()
        loop_seconds = 0.0
        try:
            outcome = await self._started(trainer)
            if outcome is None:
                assert self._engines is not None
                orchestrator = self._orchestrator = self._wired(trainer, self._engines)
                outcome = await orchestrator.run()
                for number in {*stops} - {preempt_signal}:  # from now on, they end it on the spot
                    loop.remove_signal_handler(number)
                loop_seconds = loop.time() - orchestrator.started_at
                self.is_abandoned = orchestrator.is_abandoned
                outcome = await self._end_trainer(trainer, outcome)
        finally:
            # Whatever raised above: no process outlives the run.
            window = self._config.run.shutdown_seconds / 2
            await trainer.stop(window)
            if self._engines:
                await self._engines.stop(window)
        free = shutil.disk_usage(self._run_dir.path).free
        if outcome.error is not None and free < LOW_BYTES:
            full = f"the disk of {self._run_dir.path} is full ({human(free)} left)"
            outcome = replace(outcome, message=f"{outcome.message}; {full}")
        return summarize(
            self._config,
            self._orchestrator,
            outcome,
            wall_seconds=time.monotonic() - started_at,
            loop_seconds=loop_seconds,
            versions_of=versions,
        )

    def _stop(self, outcome: Outcome) -> None:
        """A signal. While the loop runs, the first one drains it and a second one cuts the drain
        off; before that, it ends the start. One that comes later does not end the process."""
        if self._orchestrator is not None:
            self._orchestrator.stop(outcome)
        elif self._stopped is None:
            self._stopped = outcome
            if self._starting is not None:
                self._starting.cancel()

    async def _started(self, trainer: ManagedProcess) -> Outcome | None:
        """None once engines and trainer are up, else why they are not."""
        self._starting = asyncio.create_task(self._start(trainer), name="start")
        try:
            await self._starting
        except (HeadwayError, ExceptionGroup) as error:
            return outcome_of(error)
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
        return self._stopped

    async def _tell_start(self) -> None:
        """Say what a start waits for, again and again."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            seconds = asyncio.get_running_loop().time() - self._began_at
            urls = self._config.engine.urls
            engines = f"engines at {', '.join(urls)}" if urls else "engines"
            missing = [] if self._engines else [engines]
            missing += [] if self._run_dir.trainer_ready.exists() else ["trainer"]
            if missing:
                self._event(
                    "info",
                    f"{' and '.join(missing)} not ready after {seconds:.0f} s (limit: "
                    f"run.start_seconds = {self._config.run.start_seconds:g}); they write to "
                    f"{self._run_dir.logs}",
                )

    def _trainer(self) -> ManagedProcess:
        arguments = ["--run", str(self._run_dir.path), "--model", str(self._model_dir)]
        arguments += ["--parent-pid", str(os.getpid())]
        return ManagedProcess(
            name="trainer",
            command=[sys.executable, "-m", "headway.trainer", *arguments],
            log_path=self._run_dir.logs / "trainer.log",
            env={"OMP_NUM_THREADS": str(self._config.actor.num_threads)},
            error=TrainerError,
        )

    async def _start(self, trainer: ManagedProcess) -> None:
        """Engines and trainer side by side. Raises HeadwayErrors in a group."""
        config, recovered = self._config, self._recovered
        version = recovered.state.version if recovered else 0

        async def trainer_is_ready() -> bool:
            return self._run_dir.trainer_ready.exists()

        async def start_trainer() -> None:
            await trainer.start()
            await trainer.wait_ready(trainer_is_ready, config.run.start_seconds)

        async def start_fleet() -> None:
            self._engines = await start_engines(
                config.engine,
                model_dir=recovered.model_dir if recovered else self._model_dir,
                logs_dir=self._run_dir.logs,
                start_seconds=config.run.start_seconds,
                version=version,
                seed=config.run.seed + version,  # or each life would draw the same numbers
                temperature=config.rollout.temperature,
                on_event=self._event,
            )

        async with asyncio.TaskGroup() as group:
            telling = group.create_task(self._tell_start())
            await asyncio.wait({group.create_task(one()) for one in (start_trainer, start_fleet)})
            telling.cancel()
        assert self._engines is not None
        await self._engines.pool.check_start(self._run_dir.path)

    def _wired(self, trainer: ManagedProcess, engines: Fleet) -> Orchestrator:
        config = self._config
        size = estimate(config, self._model_dir)
        watched = {
            "trainer": trainer.watch,
            "engines": engines.watch,
            "engine pool": engines.pool.run,
        }
        ports = Ports(
            engine=engines.pool,
            environments=self._tasks.environments,
            source=self._tasks.source,
            trainer=FolderTrainerLink(self._run_dir.path),
            channel=FolderWeightChannel(self._run_dir.weights, config.weights.poll_seconds),
            store=ParquetRunStore(self._run_dir.path, {"headway": __version__}, self._prune),
            metrics=self._metrics,
            trace=self._trace_sink,
            journal=GroupedJournal(
                lambda records: asyncio.to_thread(self._database.apply, records)
            ),
            eval_tasks=self._tasks.eval_tasks,
            watched=watched,
            labels={
                "simulated": False,
                "engines": engines.names,
                "headway": __version__,
                "size": size.as_dict(),
            },
        )
        recovered = self._recovered
        orchestrator = Orchestrator(
            config,
            ports,
            resume=recovered.state if recovered else None,
            elapsed_seconds=recovered.seconds if recovered else 0.0,
            life_began_at=self._began_at,
        )
        self._started_at = orchestrator.started_at
        if recovered:
            self._tell(recovered)
        self._event("info", f"size on disk: {size}")
        if shortage := size.shortage(self._run_dir.path):
            self._event("warning", shortage)
        return orchestrator

    def _prune(self, newest: int) -> None:
        """Delete batches that are not kept any more; called in the writer's thread."""
        if (keep := self._config.store.keep_batches) is not None:
            num = self._config.actor.keep_checkpoints
            prune_batches(self._run_dir.path, newest, keep=keep, keep_checkpoints=num)

    def _tell(self, recovered: Recovered) -> None:
        """Say in all records that a new life begins here."""
        state = recovered.state
        if self._trace_sink is not None:
            row = {"t": recovered.seconds, "e": "resumed", "version": state.version}
            self._trace_sink.emit(row)
        self._event(
            "warning",
            f"resumed at version {state.version}: {state.num_batches - state.version} batches are "
            f"trained again, {len(state.accepted)} finished samples wait for a batch, "
            f"{len(state.interrupted)} are issued again",
        )
        for change in recovered.changes:
            self._event("warning", f"the configuration changed: {change}")

    def _event(self, level: str, text: str) -> None:
        """What happens to engines, at the loop's own time; 0 before it runs."""
        time = 0.0
        if self._started_at is not None:
            time = asyncio.get_running_loop().time() - self._started_at
        self._metrics.emit({"kind": "event", "time": time, "level": level, "text": text})

    async def _end_trainer(self, trainer: ManagedProcess, outcome: Outcome) -> Outcome:
        """Let the trainer save and end by itself; one that cannot fails the run."""
        trainer.expect_exit()
        if outcome.error is not None:
            return outcome
        window = self._config.run.shutdown_seconds
        try:
            async with asyncio.timeout(window):
                await trainer.watch()
        except TimeoutError:
            return outcome_of(
                TrainerError(
                    f"the trainer did not save and end within {window:g} s after the last batch "
                    "(run.shutdown_seconds)"
                )
            )
        except TrainerError as error:
            return outcome_of(error)
        return outcome
