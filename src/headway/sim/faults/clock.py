"""A virtual event loop that can be killed, whose clock can jump, and whose threads are one."""

import asyncio
import contextlib
import warnings
from collections.abc import Callable
from typing import Any

from headway.sim.clock import VirtualTimeLoop
from headway.sim.faults.disk import Disk
from headway.sim.faults.kill import Killed


class FaultLoop(VirtualTimeLoop):
    """A VirtualTimeLoop for one life of a process.

    What the loop hands to a thread runs in a callback of its own, after as long as the disk takes,
    also when whoever waits for it is cancelled meanwhile, as in a thread that has begun.

    Args:
        disk: every call that would go to a thread passes through it.
        kill_before: raise Killed instead of running this callback, counted from 0; None: never.
    """

    def __init__(self, disk: Disk, kill_before: int | None = None) -> None:
        super().__init__()
        self._disk = disk
        self._kill_before = kill_before
        self._calls: dict[int, Callable[[], None]] = {}
        self._num_calls = 0
        self.num_callbacks = 0
        self.is_dead = False
        """Killed: nothing may be written any more."""
        self.set_exception_handler(self._note)
        self.unhandled: list[str] = []
        """What nobody caught."""

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self.is_dead:
            self.unhandled.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _run_once(self) -> None:
        ready = self._gather()
        for _ in range(len(ready)):
            if self.num_callbacks == self._kill_before:
                self.is_dead = True
                raise Killed
            self.num_callbacks += 1
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def jump(self, seconds: float) -> None:
        """The clock is found to be this much later than it should be."""
        self._jump_to(self._now + seconds)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """As a thread would, without one."""
        future: asyncio.Future[Any] = self.create_future()
        if self.is_dead:
            return future
        number = self._num_calls = self._num_calls + 1

        def call() -> None:
            if self._calls.pop(number, None) is None:
                return  # it was run at the end of the life
            try:
                result = self._disk.call(func, *args)
            except Exception as error:  # it is the caller's, as from a thread
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self._calls[number] = call
        if seconds := self._disk.seconds(self._now):
            self.call_later(seconds, call)
        else:
            self.call_soon(call)
        return future

    def finish_calls(self) -> None:
        """End what threads have begun, as the end of a process waits for them."""
        for call in [*self._calls.values()]:
            call()

    def bury(self) -> None:
        """Let go of all tasks without letting them write: those of a killed process vanish."""
        self.is_dead = True
        self._calls.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that never began
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine: Any = task.get_coro()
                # What its handlers raise concerns nobody: they would not have run.
                with contextlib.suppress(BaseException):
                    coroutine.close()
        self.close()
