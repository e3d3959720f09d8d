"""One life of a run: from its start, or from what a resume finds, to its end or its kill.

Everything is what `headway run` is made of, wired in the same order: the loop, the pool, the
journal and its database, batch files, the folder of weights, the hand-over. Engines, environments
and trainer let time pass, and break as the schedule says.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headway.core.records import Record
from headway.core.rollout import Batch, Task
from headway.engines.checkpoint_check import CheckpointChecker
from headway.engines.pool import EnginePool
from headway.errors import HeadwayError, StoreError, TrainerError
from headway.loop.orchestrator import Orchestrator
from headway.loop.outcome import Outcome, outcome_of
from headway.ports import Ports
from headway.resume import Recovered, recover
from headway.sim.clock import Deadlock
from headway.sim.environment import SimulatedEnvironment
from headway.sim.faults.clock import FaultLoop
from headway.sim.faults.disk import Disk
from headway.sim.faults.engine import FaultyEngine
from headway.sim.faults.environment import FaultyEnvironment
from headway.sim.faults.invariants import Invariants
from headway.sim.faults.kill import Killed, killed_at, snapshot
from headway.sim.faults.schedule import Fault, FaultKind, Schedule
from headway.sim.faults.strays import corrupt, plant
from headway.sim.faults.trainer import FileTrainer
from headway.sim.run import engine_maker, tasks_of
from headway.sim.workload import Workload
from headway.store.database import RunDatabase
from headway.store.journal import GroupedJournal
from headway.store.run_dir import JsonLines, RunDir
from headway.store.run_store import ParquetRunStore
from headway.trainer.link import FolderTrainerLink
from headway.weights.folder import FolderWeightChannel


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeReport:
    """What became of one life. `outcome` is None for one that was killed or refused."""

    life: int
    outcome: Outcome | None
    refusal: Exception | None = None
    """Why it did not begin."""
    fired: frozenset[Fault] = frozenset()
    """The faults that had an effect, or at least the chance."""
    seconds: float = 0.0
    num_callbacks: int = 0
    events: tuple[tuple[str, str], ...] = ()
    """Level and text of what the run said."""
    left_over: tuple[str, ...] = ()
    """Tasks that have no owner any more, and exceptions that nobody caught."""
    endless: str = ""
    """Why it would never have ended."""
    is_abandoned: bool = False
    trainer_code: int | None = None
    trainer_version: int = 0
    orchestrator: Orchestrator | None = None

    @property
    def how(self) -> str:
        """In a word."""
        if self.outcome is not None:
            return self.outcome.exit_reason
        return "killed" if self.refusal is None else f"refused: {self.refusal!r}"


def live(schedule: Schedule, life: int, run_dir: RunDir, invariants: Invariants) -> LifeReport:
    """Live one life of a run, to its end. The model's folder lies beside the run directory."""
    return _Life(schedule, life, run_dir, invariants).live()


class _Life:
    def __init__(
        self, schedule: Schedule, life: int, run_dir: RunDir, invariants: Invariants
    ) -> None:
        config = schedule.resolved()
        run = config.run.model_copy(update={"dir": str(run_dir.path)})
        self._config = config.model_copy(update={"run": run})
        self._life = life
        self._run_dir = run_dir
        self._invariants = invariants
        self._faults = schedule.of_life(life)
        self._time_limit = schedule.time_limit
        self._fired: set[Fault] = set()
        self._disk = Disk(self._faults, self._now, hash((schedule.seed, life)))
        kills = self._of_kind(FaultKind.KILL)
        self._kill = kills[0] if kills else None
        self._loop = FaultLoop(self._disk, int(self._kill.at) if self._kill else None)
        # A life of its own draws what it samples anew, as a real one would.
        seed = run.model_copy(update={"seed": config.run.seed + 1_000_003 * life})
        self._workload = Workload(config.model_copy(update={"run": seed}))
        self._events: list[tuple[str, str]] = []
        self._engines: list[FaultyEngine] = []
        self._environments: dict[str, FaultyEnvironment] = {}
        self._trainer: FileTrainer | None = None
        self._orchestrator: Orchestrator | None = None
        self._metrics: JsonLines | None = None
        self._recovered: Recovered | None = None
        self._database: RunDatabase

    def _now(self) -> float:
        return self._loop.time()

    def _of_kind(self, kind: FaultKind) -> list[Fault]:
        return [fault for fault in self._faults if fault.kind is kind]

    # --- beginning and end ----------------------------------------------------------------------

    def live(self) -> LifeReport:
        """From recovery to burial."""
        try:
            self._break_folder()
            try:
                # A run that could not even be made leaves nothing to go on with.
                self._database = self._disk.call(self._open) if self._life else self._open()
            except Killed:
                self._fired.update(self._of_kind(FaultKind.KILL_IN_RECOVERY))
                return self._report(None)
            except Exception as error:  # judged by its kind
                return self._report(None, refusal=error)
            return self._run()
        finally:
            self._loop.bury()

    def _break_folder(self) -> None:
        for fault in self._of_kind(FaultKind.CORRUPT_CHECKPOINT):
            if (version := corrupt(self._run_dir.path, fault.which)) is not None:
                self._fired.add(fault)
                self._invariants.damaged(version)
        for fault in self._of_kind(FaultKind.STRAY_FILES):
            if self._life:
                plant(self._run_dir.path, fault.which, is_between_lives=True)

    def _open(self) -> RunDatabase:
        """Begin a run, or go on with it. Raises HeadwayError, and Killed as the faults state."""
        if self._life == 0:
            self._run_dir.path.mkdir()
            for folder in (self._run_dir.batches, self._run_dir.weights, self._run_dir.logs):
                folder.mkdir()
            self._run_dir.trainer_ready.parent.mkdir()
            self._run_dir.write_config(self._config)
            return RunDatabase(self._run_dir.ledger, is_safe=False)
        kills = self._of_kind(FaultKind.KILL_IN_RECOVERY)
        with killed_at(int(kills[0].at) if kills else None):
            self._recovered = recover(self._config, self._run_dir, self._model_dir)
        return self._recovered.database

    @property
    def _model_dir(self) -> Path:
        return self._run_dir.path.parent / "model"

    def _run(self) -> LifeReport:
        outcome, endless, is_killed = None, "", False
        main = self._main()
        try:
            outcome = self._loop.run_until_complete(main)
        except Killed:
            assert self._kill is not None
            self._fired.add(self._kill)
            is_killed = True
            if self._trainer is not None and self._kill.which % 2:
                self._trainer.outlive()
        except Deadlock as error:
            endless = str(error)
        except TimeoutError:
            endless = f"it had not ended after {self._time_limit} s"
        left_over: list[str] = []
        if not is_killed:
            left_over = [str(task) for task in asyncio.all_tasks(self._loop)]
            left_over += self._loop.unhandled
            self._loop.finish_calls()
        report = self._report(outcome, left_over=tuple(left_over), endless=endless)
        before = snapshot(self._run_dir.path) if is_killed else {}
        self._loop.bury()
        if is_killed:
            after = snapshot(self._run_dir.path)
            self._invariants.require(
                before == after,
                "a killed process writes nothing",
                lambda: f"{sorted(before.items() ^ after.items())}",
            )
        if self._metrics is not None:
            with contextlib.suppress(StoreError):  # rows were lost on a full disk
                self._metrics.close()
        self._database.close()
        return report

    def _report(
        self,
        outcome: Outcome | None,
        *,
        refusal: Exception | None = None,
        left_over: tuple[str, ...] = (),
        endless: str = "",
    ) -> LifeReport:
        parts: list[Any] = [self._disk, *self._engines, *self._environments.values()]
        if self._trainer is not None:
            parts.append(self._trainer)
        fired = self._fired.union(*(part.fired for part in parts))
        return LifeReport(
            life=self._life,
            outcome=outcome,
            refusal=refusal,
            fired=frozenset(fired),
            seconds=self._now(),
            num_callbacks=self._loop.num_callbacks,
            events=tuple(self._events),
            left_over=left_over,
            endless=endless,
            is_abandoned=self._orchestrator is not None and self._orchestrator.is_abandoned,
            trainer_code=self._trainer.exit_code if self._trainer else None,
            trainer_version=self._trainer.version if self._trainer else 0,
            orchestrator=self._orchestrator,
        )

    # --- the process ----------------------------------------------------------------------------

    async def _main(self) -> Outcome:
        """As `headway run` does it."""
        try:
            async with asyncio.timeout(self._time_limit):
                outcome = await self._start_and_run()
        finally:
            if self._trainer is not None:
                await self._trainer.stop()
            for engine in self._engines:
                await engine.aclose()
        # Whatever is on its way out may take its last step.
        mine = asyncio.current_task()
        rest = {task for task in asyncio.all_tasks() if task is not mine}
        if rest:
            await asyncio.wait(rest, timeout=1.0)
        return outcome

    async def _start_and_run(self) -> Outcome:
        recovered, config = self._recovered, self._config
        version = recovered.state.version if recovered else 0
        try:
            self._disk.call(self._run_dir.write_config, config)
            self._metrics = self._run_dir.open_metrics()
            self._trainer = FileTrainer(
                self._run_dir.path,
                config,
                is_resumed=recovered is not None,
                train_seconds=self._workload.train_seconds,
                disk=self._disk,
                faults=self._faults,
                observer=self._invariants,
            )
            self._invariants.begins(self._life, self._now, recovered, self._trainer.version)
            pool = self._pool(version)
            self._schedule_faults()
            await pool.connect()
        except HeadwayError as error:
            return outcome_of(error)
        except OSError as error:  # the command would print it
            return outcome_of(StoreError(str(error)))
        orchestrator = self._orchestrator = self._make_orchestrator(pool)
        engines = {engine.name: engine for engine in self._engines}
        self._invariants.runs(
            orchestrator, lambda: {name: engines[name].version for name in pool.live}
        )
        for fault in self._of_kind(FaultKind.STOP):
            self._loop.call_at(max(fault.at, self._now()), self._stop, fault)
        outcome = await orchestrator.run()
        return await self._end_trainer(outcome)

    def _pool(self, version: int) -> EnginePool:
        config = self._config
        make = engine_maker(config, self._workload, version)
        for number in range(config.engine.count):
            start = partial(make, f"engine-{number}")
            faults = [one for one in self._faults if one.which % config.engine.count == number]
            loaded = partial(self._invariants.loaded, f"engine-{number}")
            self._engines.append(FaultyEngine(start, version=version, faults=faults, loaded=loaded))
        engine, level = config.engine, config.engine.check_weights
        return EnginePool(
            self._engines,
            update_seconds=engine.update_seconds,
            version=version,
            max_retries=engine.max_retries,
            health_seconds=engine.health_seconds,
            health_deadline_seconds=engine.health_deadline_seconds,
            live_seconds=engine.live_seconds,
            slow_start_seconds=engine.slow_start_seconds,
            checker=None if level == "off" else CheckpointChecker(self._model_dir, level=level),
            on_event=lambda level, text: self._events.append((level, text)),
        )

    def _make_orchestrator(self, pool: EnginePool) -> Orchestrator:
        config, recovered, trainer = self._config, self._recovered, self._trainer
        assert trainer is not None
        labels = self._workload.labels
        for label in labels:
            inner = SimulatedEnvironment(label, self._workload)
            self._environments[label] = FaultyEnvironment(
                inner, self._faults, self._invariants.unexpected
            )
        num_evals = config.eval.num_tasks if config.eval.every else 0
        evals = [
            Task(env=label, key=f"eval-{index}", position=index, data={})
            for label in labels
            for index in range(num_evals)
        ]
        ports = Ports(
            engine=pool,
            environments=self._environments,
            source=tasks_of(config),
            trainer=_WatchedLink(self._run_dir.path, self._invariants),
            channel=FolderWeightChannel(self._run_dir.weights, config.weights.poll_seconds),
            store=ParquetRunStore(self._run_dir.path, {}),
            metrics=self,
            trace=self._invariants,
            journal=GroupedJournal(lambda records: asyncio.to_thread(self._apply, records)),
            eval_tasks=evals,
            watched={"trainer": trainer.watch, "engine pool": pool.run},
        )
        return Orchestrator(
            config,
            ports,
            resume=recovered.state if recovered else None,
            elapsed_seconds=recovered.seconds if recovered else 0.0,
        )

    def _apply(self, records: Sequence[Record]) -> None:
        self._database.apply(records)
        self._invariants.applied(records)

    async def _end_trainer(self, outcome: Outcome) -> Outcome:
        trainer, window = self._trainer, self._config.run.shutdown_seconds
        assert trainer is not None
        trainer.expect_exit()
        if outcome.error is not None:
            return outcome
        try:
            async with asyncio.timeout(window):
                await trainer.watch()
        except TimeoutError:
            return outcome_of(TrainerError(f"the trainer did not end within {window:g} s"))
        except TrainerError as error:
            return outcome_of(error)
        return outcome

    # --- what goes wrong ------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        for fault in self._faults:
            if fault.kind is FaultKind.CLOCK_JUMP:
                self._loop.call_at(fault.at, self._jump, fault)
            elif fault.kind is FaultKind.STRAY_FILES:
                self._loop.call_at(fault.at, self._plant, fault)

    def _jump(self, fault: Fault) -> None:
        self._fired.add(fault)
        self._invariants.event(f"the clock jumps by {fault.seconds or 0.0:g} s")
        self._loop.jump(fault.seconds or 0.0)

    def _plant(self, fault: Fault) -> None:
        self._fired.add(fault)
        plant(self._run_dir.path, fault.which, is_between_lives=False)

    def _stop(self, fault: Fault) -> None:
        assert self._orchestrator is not None
        if fault not in self._fired and fault.which % 2:
            self._loop.call_later(fault.seconds or 0.0, self._stop, fault)
        self._fired.add(fault)
        self._invariants.event("SIGTERM")
        self._orchestrator.stop()

    def emit(self, row: Mapping[str, Any]) -> None:
        """A metric row."""
        if row.get("kind") == "event":
            self._events.append((row["level"], row["text"]))
        if self._metrics is not None and not self._loop.is_dead:
            self._disk.call(self._metrics.emit, row)


class _WatchedLink(FolderTrainerLink):
    """The real hand-over, which says first that it is about to happen."""

    def __init__(self, run_dir: Path, invariants: Invariants) -> None:
        super().__init__(run_dir)
        self._invariants = invariants

    async def ship(self, batch: Batch) -> None:
        """As the real one."""
        self._invariants.handed_over(batch)
        await super().ship(batch)
