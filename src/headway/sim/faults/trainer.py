"""A trainer that works on the run's real files as the reference trainer does, without torch."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from headway.config import Config
from headway.errors import HeadwayError, TrainerError
from headway.sim.faults.disk import Disk
from headway.sim.faults.schedule import TRAINER_STAGES, Fault, FaultKind
from headway.sim.faults.state import (
    INITIAL,
    read_checkpoint,
    read_state,
    trained,
    write_checkpoint,
    write_model,
)
from headway.store.batches import batch_path
from headway.trainer.checkpoints import latest_checkpoint, save_folder
from headway.trainer.client import look_for
from headway.weights.folder import publish_folder, version_name

CRASHED = -9
"""Exit code of a trainer that was killed."""


class TrainerObserver(Protocol):
    """Is told what the trainer does."""

    def trains(self, step: int, content: bytes) -> None:
        """It has read the file of a batch that was handed over."""
        ...

    def published(self, version: int, state: bytes) -> None:
        """A version is there."""
        ...

    def saved(self, version: int, state: bytes) -> None:
        """A checkpoint is there."""
        ...


class _Died(BaseException):
    """The trainer's process is no more."""


class FileTrainer:
    """One trainer process: a task beside the loop, which dies and hangs as the faults state.

    Args:
        run_dir: the run directory.
        is_resumed: go on from the newest sound checkpoint.
        train_seconds: by step.
        faults: of this life.

    Raises:
        TrainerError: its checkpoint cannot be used.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        *,
        is_resumed: bool,
        train_seconds: Callable[[int], float],
        disk: Disk,
        faults: Sequence[Fault],
        observer: TrainerObserver,
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._train_seconds = train_seconds
        self._disk = disk
        self._faults = faults
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self.fired: set[Fault] = set()
        self.version, self._state = 0, INITIAL
        if is_resumed and (found := latest_checkpoint(run_dir)) is not None:
            self.version, folder = found
            self._state = read_checkpoint(folder)
            if read_state(folder) != self._state:
                raise TrainerError(f"{folder} holds weights of another state than its optimizer")
        self._saved = self.version
        self._at_hand: bytes | None = None
        """Content of the batch that is being trained."""
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._is_exit_expected = False
        self.failure: HeadwayError | None = None
        self._task = asyncio.create_task(self._run(), name="trainer process")

    # --- as the run sees the process ------------------------------------------------------------

    async def watch(self) -> None:
        """As `ManagedProcess.watch`."""
        code = await asyncio.shield(self._exit)
        if not (self._is_exit_expected and code == 0):
            raise TrainerError(f"trainer ended with exit code {code}: {self.failure}")

    def expect_exit(self) -> None:
        """As `ManagedProcess.expect_exit`."""
        self._is_exit_expected = True

    async def stop(self) -> None:
        """End it at once."""
        self._task.cancel()
        await asyncio.wait({self._task})  # no deadline: it ends at its next await

    @property
    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._exit.result() if self._exit.done() else None

    # --- what goes wrong ------------------------------------------------------------------------

    def _is_due(self, stage: int) -> bool:
        """Whether it is to die at this stage of its work."""
        for fault in self._faults:
            is_here = fault.which % len(TRAINER_STAGES) == stage
            if fault.kind is FaultKind.TRAINER_CRASH and is_here and fault.at <= self._loop.time():
                self.fired.add(fault)
                return True
        return False

    def _die_at(self, stage: int) -> None:
        if self._is_due(stage):
            raise _Died

    def _die_within(self, stage: int, folder: Path) -> None:
        """Leave half of a folder under its temporary name."""
        if self._is_due(stage):
            half = folder.with_name(f".{folder.name}.4242.tmp")
            half.mkdir(parents=True, exist_ok=True)
            (half / "config.json").write_text('{"model_ty', encoding="utf-8")
            raise _Died

    async def _hang(self) -> None:
        for fault in self._faults:
            if fault.kind is FaultKind.TRAINER_HANG and fault.is_active(self._loop.time()):
                self.fired.add(fault)
                if fault.seconds is None:
                    await self._loop.create_future()
                await asyncio.sleep(fault.at + (fault.seconds or 0.0) - self._loop.time())

    def _values_are_finite(self) -> bool:
        for fault in self._faults:
            if fault.kind is FaultKind.BAD_WEIGHTS and fault.is_active(self._loop.time()):
                self.fired.add(fault)
                return False
        return True

    # --- its work -------------------------------------------------------------------------------

    async def _run(self) -> None:
        code = 0
        try:
            await self._train()
        except _Died:
            code = CRASHED
        except HeadwayError as error:
            self.failure, code = error, error.exit_code
        except OSError as error:  # its process would end with a traceback
            self.failure, code = TrainerError(str(error)), 1
        finally:
            if not self._exit.done():
                self._exit.set_result(code)

    async def _train(self) -> None:
        every = self._config.actor.checkpoint_every
        while await self._is_shipped(self.version):
            step = self.version
            content = batch_path(self._run_dir, step).read_bytes()
            self._observer.trains(step, content)
            self._at_hand = content
            seconds = self._train_seconds(step)
            await asyncio.sleep(seconds / 2)
            self._die_at(1)
            await self._hang()
            await asyncio.sleep(seconds / 2)
            self._die_at(2)
            await self._use_disk(self._publish, seconds)
            self._die_at(4)
            if every and self.version % every == 0:
                await self._use_disk(self._save)
                self._die_at(6)
        if self._saved != self.version:
            await self._use_disk(self._save)
            self._die_at(6)

    async def _is_shipped(self, step: int) -> bool:
        while (found := look_for(self._run_dir, step)) is None:
            self._die_at(0)
            await self._hang()
            await asyncio.sleep(self._config.weights.poll_seconds)
        return found

    async def _use_disk(self, func: Callable[..., None], *args: float) -> None:
        if seconds := self._disk.seconds(self._loop.time()):
            await asyncio.sleep(seconds)
        self._disk.call(func, *args)

    def _publish(self, seconds: float) -> None:
        assert self._at_hand is not None
        state = trained(self._state, self._at_hand)
        version = self.version + 1
        weights = self._run_dir / "weights"
        self._die_within(3, weights / version_name(version))
        is_finite = self._values_are_finite()
        publish_folder(
            weights,
            version,
            partial(write_model, state=state, is_finite=is_finite),
            stats={"train_seconds": seconds, "idle_seconds": 0.0},
            keep_last=self._config.weights.keep_last,
        )
        self.version, self._state, self._at_hand = version, state, None
        self._observer.published(version, state)

    def _save(self) -> None:
        self._die_within(5, self._run_dir / "checkpoints" / f"step-{self.version:06d}")
        save_folder(
            self._run_dir,
            self.version,
            partial(write_checkpoint, state=self._state),
            keep_last=self._config.actor.keep_checkpoints,
        )
        self._saved = self.version
        self._observer.saved(self.version, self._state)

    def outlive(self) -> None:
        """The run was killed; this process notices a moment later, and ends its update first."""
        try:
            if self._at_hand is not None and self.exit_code is None:
                self._disk.call(self._publish, 0.0)
                self._disk.call(self._save)
        except (_Died, HeadwayError, OSError):  # it dies of it: its last words reach nobody
            return
