"""Child processes that a run owns: started in a group of their own, watched, and always ended.

A `ManagedProcess` never outlives its parent (Linux: the kernel kills it, or its guard does), never
dies unnoticed (`watch`), and never survives `stop`.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from headway.errors import EngineError, HeadwayError
from headway.guard import die_with

_T = TypeVar("_T")

_NUM_LOG_LINES = 10
_LOG_TAIL_BYTES = 16_384
_GUARD_SECONDS = 2.0


class ManagedProcess:
    """One child process; output of both kinds goes to `log_path`.

    Args:
        name: what messages call it, such as `engine-0`.
        command: program and arguments.
        log_path: appended to; its folder is made.
        env: added to this process's environment.
        error: what is raised when it dies, `EngineError` or `TrainerError`.
        has_children: it starts processes of its own, which may outlive it: run it under
            `headway.guard`, which is then the process that `pid` names.

    Example:
        >>> engine = ManagedProcess(name="engine-0", command=command, log_path=log)
        >>> await engine.start()
        >>> await engine.wait_ready(is_healthy, deadline_seconds=120)
        >>> task_group.create_task(engine.watch())
        >>> ...
        >>> await engine.stop(window_seconds=5)
    """

    def __init__(
        self,
        *,
        name: str,
        command: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        error: type[HeadwayError] = EngineError,
        has_children: bool = False,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._has_children = has_children
        self._command = list(command)
        self._env = dict(env or {})
        self._error = error
        self._process: asyncio.subprocess.Process | None = None
        self._exit: asyncio.Task[int] | None = None
        self._exit_expected = False
        self._stopping = False

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group. Raises the error class before `start`."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """None while it runs (or before the start); negative: the signal that killed it."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start it, or start it again after its end. Call this from the main thread: the kernel
        ties the child's life to the thread that made it. Raises the error class when the program
        cannot be run."""
        self._stopping = self._exit_expected = False
        command, stdin = self._command, asyncio.subprocess.DEVNULL
        tie = die_with(os.getpid())
        if self._has_children:
            # The guard must outlive this process, to clean up; the end of the pipe wakes it.
            command, stdin = [sys.executable, "-m", "headway.guard", *command], subprocess.PIPE
            tie = None
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=stdin,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._env},
                    start_new_session=True,
                    preexec_fn=tie,
                )
        except OSError as error:
            raise self._error(
                f"{self.name} could not be started ({self._command[0]}): {error}"
            ) from error
        self._exit = asyncio.create_task(self._process.wait(), name=f"exit of {self.name}")

    async def wait_ready(
        self,
        check: Callable[[], Awaitable[bool]],
        deadline_seconds: float,
        *,
        poll_seconds: float = 0.05,
    ) -> None:
        """Return once `check()` says true; ask every `poll_seconds`.

        Raises the error class as soon as the process dies, or when the deadline passes.
        """
        try:
            async with asyncio.timeout(deadline_seconds):
                while not await self._unless_dead(check()):
                    await self._unless_dead(asyncio.sleep(poll_seconds))
        except TimeoutError:
            raise self._error(
                f"{self.name} was not ready within {deadline_seconds:g} s. {self._log_tail()}"
            ) from None

    async def watch(self) -> None:
        """Wait for the end of the process; there is no deadline, since it lives as long as the run.

        Returns when the exit was announced (`expect_exit` and code 0, or `stop`); otherwise raises
        the error class with name, exit code or signal, and the last lines of its log.
        """
        code = await asyncio.shield(self._exit_task())
        self._signal_group(signal.SIGKILL)  # its children may not be gone
        if self._stopping or (self._exit_expected and code == 0):
            return
        raise self._error(self._obituary(code))

    def expect_exit(self) -> None:
        """From now on an exit with code 0 is the end of its work, not a failure."""
        self._exit_expected = True

    async def stop(self, window_seconds: float) -> None:
        """End it and its group: SIGTERM, then SIGKILL after `window_seconds`. Idempotent, and
        harmless before `start`. When cancelled, it kills at once."""
        self._stopping = True
        if self._process is None:
            return
        try:
            if self._process.returncode is None:
                self._signal_group(signal.SIGTERM)
                await asyncio.wait({self._exit_task()}, timeout=window_seconds)
        finally:
            if self._process.stdin is not None:
                # The guard ends the workers too that left its group; then it ends itself.
                self._process.stdin.close()
                await asyncio.wait({self._exit_task()}, timeout=_GUARD_SECONDS)
            # Also when the process itself is gone: its children may not be.
            self._signal_group(signal.SIGKILL)
        # No deadline: the kernel does not refuse SIGKILL.
        await asyncio.shield(self._exit_task())

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # nobody left

    async def _unless_dead(self, work: Awaitable[_T]) -> _T:
        """Result of `work`, or the error class as soon as the process ends."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._exit_task()}, return_when=asyncio.FIRST_COMPLETED)
            if self._exit_task().done():
                raise self._error(self._obituary(self._exit_task().result()))
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})  # no deadline: it ends at its next await

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise self._error(f"{self.name} was not started")
        return self._process

    def _exit_task(self) -> "asyncio.Task[int]":
        self._started()
        assert self._exit is not None
        return self._exit

    def _obituary(self, code: int) -> str:
        if code >= 0:
            how = f"ended with exit code {code}"
        else:
            how = f"was killed by {_signal_name(-code)}"
        return f"{self.name} (pid {self.pid}) {how} although the run had not. {self._log_tail()}"

    def _log_tail(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES, 0))
                lines = log.read().decode(errors="replace").splitlines()[-_NUM_LOG_LINES:]
        except OSError as error:
            return f"Its log {self.log_path} cannot be read: {error}"
        if not lines:
            return f"Its log {self.log_path} is empty."
        return "\n  ".join([f"The end of its log {self.log_path}:", *lines])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
