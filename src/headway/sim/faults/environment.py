"""A simulated environment whose episodes break and hang."""

import asyncio
from collections.abc import Sequence

from headway.core.rollout import Completion, Task
from headway.errors import EnvironmentFailure
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
    """An Environment that plays as another one does, while nothing is wrong."""

    def __init__(self, inner: SimulatedEnvironment, faults: Sequence[Fault]) -> None:
        self._inner = inner
        self._faults = faults
        self.fired: set[Fault] = set()

    @property
    def name(self) -> str:
        """Stamped on rollouts."""
        return self._inner.name

    async def run(self, transcript: Transcript) -> None:
        """One episode. Raises whatever code of a user's may raise."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        await self._inner.run(transcript)
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
