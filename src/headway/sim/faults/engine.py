"""A simulated server with faults, as a pool sees one: it crashes, hangs, lies, and comes back."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from headway.core.rollout import Completion
from headway.engines.capabilities import Capabilities
from headway.errors import (
    EngineError,
    EngineRefusal,
    TransportError,
    UnusableAnswer,
    WeightsError,
    WrongVersion,
)
from headway.ports import EngineStatistics, GenerateRequest, PublishedWeights
from headway.sim.engine import SimulatedEngine
from headway.sim.faults.schedule import Fault, FaultKind
from headway.sim.faults.state import read_state

_T = TypeVar("_T")
_LATE_SECONDS = 0.5


class FaultyEngine:
    """An `EngineClient` around simulated servers: a new one after every crash.

    As the real clients do, it holds every answer against what it ordered, and refuses all of them
    after an update that broke off.

    Args:
        start: makes the server, with the weights of the life's start.
        version: of these.
        faults: of this engine in this life; instants count from now.
        loaded: is told the version and the trainer's state in it, of every load.
    """

    def __init__(
        self,
        start: Callable[[], SimulatedEngine],
        *,
        version: int,
        faults: Sequence[Fault],
        loaded: Callable[[int, bytes], None],
    ) -> None:
        self._start = start
        self._server = start()
        self._start_version = version
        self._served = version
        """What the server serves."""
        self.version = version
        """What the client takes it to serve."""
        self._loaded = loaded
        self._faults = faults
        self.fired: set[Fault] = set()
        self._loop = asyncio.get_running_loop()
        self._is_up = True
        self._is_broken = False
        self._num_breaks = 0
        self._serving = asyncio.Event()
        self._serving.set()
        self._awake = asyncio.Event()
        self._awake.set()
        self._crashed: asyncio.Future[None] = self._loop.create_future()
        self._num_wrong = 0
        self._has_connected = False
        for fault in faults:
            if fault.kind is FaultKind.ENGINE_CRASH:
                self._loop.call_at(fault.at, self._crash, fault)
            elif fault.kind is FaultKind.ENGINE_HANG:
                self._loop.call_at(fault.at, self._hang, fault)

    # --- what goes wrong ------------------------------------------------------------------------

    def _crash(self, fault: Fault) -> None:
        self.fired.add(fault)
        self._is_up = False
        self._crashed.set_result(None)
        self._crashed = self._loop.create_future()
        if fault.seconds is not None:
            self._loop.call_later(fault.seconds, self._come_back)

    def _come_back(self) -> None:
        self._server = self._start()
        self._served = self._start_version
        self._is_up = True

    def _hang(self, fault: Fault) -> None:
        self.fired.add(fault)
        self._awake.clear()
        if fault.seconds is not None:
            self._loop.call_later(fault.seconds, self._awake.set)

    def _active(self, kind: FaultKind) -> Fault | None:
        now = self._loop.time()
        for fault in self._faults:
            if fault.kind is kind and fault.is_active(now):
                self.fired.add(fault)
                return fault
        return None

    async def _unless_crashed(self, work: Coroutine[Any, Any, _T], what: str) -> _T:
        """The result of what the server does. Raises TransportError when it dies meanwhile."""
        crashed = self._crashed
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, crashed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise TransportError(f"engine {self.name} died during {what}")
            return task.result()
        except asyncio.CancelledError:
            if self._active(FaultKind.LATE_ANSWERS) is None or self._crashed is not crashed:
                raise
            await asyncio.sleep(_LATE_SECONDS)
            if not task.done():
                raise
            return task.result()
        finally:
            task.cancel()

    # --- the port -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The server's."""
        return self._server.name

    @property
    def capabilities(self) -> Capabilities | None:
        """None before the first `connect`."""
        return Capabilities(engine="simulated") if self._has_connected else None

    @property
    def pause_seconds(self) -> float:
        """Nobody measures it here."""
        return 0.0

    async def connect(self, version: int | None) -> Capabilities:
        """Raises EngineError while it is down."""
        for fault in self._faults:
            if fault.kind is FaultKind.SLOW_START and not self._has_connected:
                self.fired.add(fault)
                await asyncio.sleep(fault.seconds or 0.0)
        self._require_up("connect")
        await self._awake.wait()  # no deadline: the pool's
        self._has_connected = True
        return Capabilities(engine="simulated")

    async def is_healthy(self) -> bool:
        """Whether it is up; hangs with it."""
        await self._awake.wait()  # no deadline: the pool's
        return self._is_up

    async def lag(self) -> str | None:
        """Whether it was started again and nobody noticed."""
        await self._awake.wait()  # no deadline: the pool's
        if self._served == self.version or self._is_broken:
            return None
        return f"it serves version {self._served}, not {self.version}: it was started again"

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises EngineError as the faults state."""
        self._require_up(request.request_id)
        await self._serving.wait()  # no deadline: the end of the update under way sets it
        if self._is_broken:
            raise TransportError(f"engine {self.name} is half loaded")
        sent, num_breaks = self.version, self._num_breaks
        completion = await self._unless_crashed(self._answer(request), request.request_id)
        if self._num_breaks > num_breaks:
            raise TransportError(f"engine {self.name} broke off an update meanwhile")
        if completion.version_runs.head < sent:
            raise WrongVersion(
                f"engine {self.name} answered with version {completion.version_runs.head}, it was "
                f"told to serve {sent}"
            )
        return completion

    async def _answer(self, request: GenerateRequest) -> Completion:
        completion = await self._server.generate(request)
        await self._awake.wait()  # no deadline: the rollout's
        if self._active(FaultKind.WRONG_ANSWERS) is None:
            return completion
        self._num_wrong += 1
        match self._num_wrong % 3:
            case 0:
                raise UnusableAnswer(f"engine {self.name} answered with no JSON")
            case 1:
                return msgspec.structs.replace(completion, logprobs=completion.logprobs[:-1])
            case _:
                raise WrongVersion(f"engine {self.name} stamped an older version")

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Raises EngineError as the faults state, and when the folder is not there any more."""
        self._require_up("an update")
        if self._active(FaultKind.UPDATE_REFUSED):
            raise EngineRefusal(f"engine {self.name} refuses {weights.version}", status=500)
        if self._active(FaultKind.UPDATE_HANGS):
            await self._loop.create_future()  # the pool's deadline ends it
        await self._awake.wait()  # no deadline: the pool's
        self._serving.clear()
        try:
            state = await self._load(weights)
        except BaseException:  # cut off, too: nobody knows what it serves; re-raised
            self._is_broken = True
            self._num_breaks += 1
            raise
        finally:
            self._serving.set()
        self._is_broken = False
        self.version = self._served = weights.version
        self._loaded(weights.version, state)

    async def _load(self, weights: PublishedWeights) -> bytes:
        if self._active(FaultKind.UPDATE_FAILS):
            raise EngineError(f"engine {self.name} broke off the load of {weights.version}")
        assert weights.path is not None
        try:
            state = read_state(weights.path)
        except (OSError, WeightsError) as error:
            raise EngineError(f"engine {self.name} cannot load {weights.path}: {error}") from error
        await self._unless_crashed(self._server.update_weights(weights), "an update")
        if not weights.path.exists():
            raise EngineError(f"{weights.path} was deleted while {self.name} loaded it")
        return state

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """Raises EngineError while it is down."""
        self._require_up("statistics")
        return await self._server.statistics()

    async def aclose(self) -> None:
        """Let go of whoever still waits for it."""
        self._awake.set()
        with contextlib.suppress(asyncio.InvalidStateError):
            self._crashed.cancel()

    def _require_up(self, what: str) -> None:
        if not self._is_up:
            raise TransportError(f"engine {self.name} is down: no connection for {what}")
