"""A simulated environment whose episodes break and hang."""

import asyncio
from collections.abc import Callable, Sequence

from headway.core.rollout import Completion, Task
from headway.errors import EngineError, EnvironmentFailure
from headway.ports import Score, Transcript
from headway.sim.environment import SimulatedEnvironment
from headway.sim.faults.schedule import Fault, FaultKind

_RAISED: tuple[type[BaseException], ...] = (
    EnvironmentFailure,
    KeyError,
    SystemExit,
    asyncio.CancelledError,
    TimeoutError,
    ExceptionGroup,
)


class FaultyEnvironment:
    """An Environment that plays as another one does, while nothing is wrong.

    Args:
        unexpected: is told what the other one raises that no fault accounts for. To the loop it
            would be one more environment that broke.
    """

    def __init__(
        self,
        inner: SimulatedEnvironment,
        faults: Sequence[Fault],
        unexpected: Callable[[Exception], None],
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._unexpected = unexpected
        self.fired: set[Fault] = set()

    @property
    def name(self) -> str:
        """Stamped on rollouts."""
        return self._inner.name

    async def run(self, transcript: Transcript) -> None:
        """One episode. Raises whatever code of a user's may raise."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            await self._inner.run(transcript)
        except (EngineError, EnvironmentFailure):
            raise
        except Exception as error:  # re-raised
            self._unexpected(error)
            raise
        for fault in self._faults:
            if fault.kind is FaultKind.ENV_HANG and fault.is_active(began_at):
                self.fired.add(fault)
                await loop.create_future()  # the rollout's deadline ends it
            if fault.kind is FaultKind.ENV_ERROR and fault.is_active(loop.time()):
                self.fired.add(fault)
                kind = _RAISED[fault.which % len(_RAISED)]
                if kind is ExceptionGroup:
                    raise ExceptionGroup("of an environment", [ValueError("broken on purpose")])
                raise kind("broken on purpose")

    def score(self, task: Task, completions: list[Completion]) -> Score:
        """As the other one."""
        return self._inner.score(task, completions)
