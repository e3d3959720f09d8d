"""Many engines as one: routing, retries on another engine, ejection and re-admission.

An engine is *live* (it takes requests, and serves the newest weights or is being updated to them)
or *out*. It is ejected when it fails, hangs, or did not load a version; its requests in flight move
on to others from the start, so that no token of it is kept. It is admitted again only after it is
healthy, fits the run and has loaded the newest weights, all before a single request.

| part       | does                                             | ends by                        |
|------------|--------------------------------------------------|--------------------------------|
| generate   | a request on one live engine, or on others       | an answer, `max_retries`,      |
|            | when that one breaks off                         | `live_seconds` with none live  |
| update     | all live engines at the same time; the late and  | `update_seconds` for each      |
|            | the failing are ejected                          |                                |
| `run`      | one keeper for each member: health of the live,  | never: the orchestrator        |
|            | return of the ones that are out                  | watches it                     |
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from headway.core.rollout import Completion
from headway.engines.canary import EngineCanary
from headway.engines.capabilities import Capabilities
from headway.engines.checkpoint_check import CheckpointChecker
from headway.engines.keeper import Keeper
from headway.engines.members import Member, OnEvent, Roster, Router
from headway.errors import (
    EngineError,
    EngineRefusal,
    TransportError,
    UnusableAnswer,
    WrongVersion,
)
from headway.ports import Engine, EngineStatistics, GenerateRequest, PublishedWeights

_MAX_FAILURES = 3
_AGAIN_SECONDS = 0.25
_HOLD_SECONDS = 1.0
_MAX_HOLD_SECONDS = 10.0


class _CutOff(TransportError):
    """The engine was ejected while it ran the request."""


def _silent(level: str, text: str) -> None:
    """Nobody listens."""


class EnginePool:
    """An Engine made of engines.

    Args:
        engines: at least one, names unique. Those that are no `EngineClient` are trusted to be
            healthy.
        update_seconds: deadline for each engine to load one version, and to come back.
        version: what the engines serve at the start.
        max_retries: how often a request that an engine broke off is sent to another one.
        health_seconds: between two health checks of an engine.
        health_deadline_seconds: for one of them.
        live_seconds: how long requests wait while no engine is live.
        slow_start_seconds: as in `Router`.
        checker: looks at every version before an engine is told of it.
        canary: asks every engine in `check_start` and after every update.
        against: reasons why an engine of these capabilities cannot be in this pool.
        on_event: is told what happens: level (`info`, `warning`) and text.

    `connect` comes first, and `run` must run for ejected engines to come back; without it, health
    is not checked either.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        update_seconds: float,
        version: int = 0,
        max_retries: int = 2,
        health_seconds: float = 2.0,
        health_deadline_seconds: float = 10.0,
        live_seconds: float = 120.0,
        slow_start_seconds: float = 5.0,
        checker: CheckpointChecker | None = None,
        canary: EngineCanary | None = None,
        against: Callable[[Capabilities], Sequence[str]] = lambda _: (),
        on_event: OnEvent = _silent,
    ) -> None:
        names = [engine.name for engine in engines]
        if not engines or len(set(names)) < len(names):
            raise ValueError(f"a pool needs engines with unique names, not {names}")
        self._roster = Roster(engines, version, on_event)
        self._router = Router(slow_start_seconds)
        self._keeper = Keeper(
            self._roster,
            update_seconds=update_seconds,
            health_seconds=health_seconds,
            health_deadline_seconds=health_deadline_seconds,
            canary=canary,
            against=against,
        )
        self._update_seconds = update_seconds
        self._version = version
        self._max_retries = max_retries
        self._live_seconds = live_seconds
        self._checker = checker

    @property
    def name(self) -> str:
        """`pool`."""
        return "pool"

    @property
    def version(self) -> int:
        """The newest version that was served."""
        return self._version

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Requests sent and not yet answered, by engine."""
        return {name: member.in_flight for name, member in self._roster.members.items()}

    @property
    def live(self) -> tuple[str, ...]:
        """Names of the engines that take requests."""
        return tuple(member.name for member in self._roster.live)

    # --- membership ---------------------------------------------------------------------------

    async def connect(self) -> None:
        """Find out what every engine can do, and whether all of them fit the run and each other.

        Raises EngineError for the first that does not: at the start, all must.
        """
        roster = self._roster
        for result in await asyncio.gather(
            *(self._keeper.connect(one, roster.start_version) for one in roster.members.values()),
            return_exceptions=True,
        ):
            if isinstance(result, BaseException):
                raise result

    async def check_start(self, folder: Path) -> None:
        """Ask every engine whether it serves the weights that the run begins with.

        `folder` holds the canary of these (`canary.json`), which the trainer wrote; without one
        nothing is asked. Called once, after `connect` and before the first rollout. Raises
        EngineError for an engine that does not, unless that is only told; WeightsError when the
        canary cannot be read.
        """
        await self._keeper.check_start(PublishedWeights(version=self._version, path=folder))

    async def run(self) -> None:
        """Keep the members: for ever. Raises EngineError when the canary ends the run."""
        await self._keeper.run()

    def add(self, engine: Engine) -> None:
        """Let an engine join: `run` admits it once it is healthy and has the newest weights.
        Raises ValueError when its name is taken."""
        self._keeper.keep(self._roster.add(engine))

    async def remove(self, name: str) -> None:
        """Take an engine out for good; its requests move on to others. Raises KeyError."""
        member = self._roster.members[name]
        self._roster.eject(member, "it was removed", level="info")
        del self._roster.members[name]
        if member.keeper is not None:
            member.keeper.cancel()
        await member.engine.aclose()

    def eject(self, name: str, reason: str) -> None:
        """Stop using an engine whose end somebody else saw, such as that of its process. It comes
        back like any other. When it is out already, this reason is told too; an unknown name is
        passed over."""
        member = self._roster.members.get(name)
        if member is None:
            return
        if not member.is_live:
            # Its requests saw it first, but this says why.
            self._roster.say("warning", f"engine {name} ejected: {reason}; it was out already")
            member.reason = reason
        self._roster.eject(member, reason)

    # --- requests -----------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample on one engine, or on another when that one breaks it off.

        A request whose answer was read, usable or not, is never sent again. Raises EngineError.
        """
        failed: list[str] = []
        while True:
            member = await self._choose(request.request_id, failed)
            attempt = request
            if failed:  # the one that broke it off may still hold the same name
                attempt = msgspec.structs.replace(
                    request, request_id=f"{request.request_id}-r{len(failed):02d}"
                )
            try:
                return await self._ask(member, attempt)
            except EngineError as error:
                may_retry = self._judge(member, error)
                failed.append(member.name)
                if not may_retry or len(failed) > self._max_retries:
                    raise

    async def _ask(self, member: Member, request: GenerateRequest) -> Completion:
        limit = asyncio.timeout(None)
        try:
            async with limit:
                with member.running(limit):
                    completion = await member.engine.generate(request)
        except TimeoutError:
            if not limit.expired():
                raise
            raise _CutOff(
                f"engine {member.name} was ejected while it ran {request.request_id}: "
                f"{member.reason}"
            ) from None
        member.num_failures = 0
        return completion

    def _judge(self, member: Member, error: EngineError) -> bool:
        """What a failed request says of its engine. Returns whether to send it to another."""
        if isinstance(error, _CutOff):
            return True  # it says nothing new, and the engine may be back by now
        if not member.is_live:
            return isinstance(error, TransportError)
        match error:
            case WrongVersion():
                self._roster.eject(member, str(error))
                return False
            case EngineRefusal() if error.is_busy:
                seconds = error.retry_after_seconds or _HOLD_SECONDS
                now = asyncio.get_running_loop().time()
                member.held_until = now + min(seconds, _MAX_HOLD_SECONDS)
                return True
            case EngineRefusal() if not error.is_engines_fault:
                return False  # it would be refused everywhere
            case TransportError() | EngineRefusal() | UnusableAnswer():
                member.num_failures += 1
                if member.num_failures >= _MAX_FAILURES:
                    self._roster.eject(
                        member, f"{member.num_failures} requests failed in a row: {error}"
                    )
                else:
                    member.wake.set()  # look at it now, not at the next interval
                return not isinstance(error, UnusableAnswer)
        return False

    async def _choose(self, request_id: str, failed: Sequence[str]) -> Member:
        """A live engine, if possible none that failed already; waits while there is none."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._live_seconds
        if failed and all(member.name in failed for member in self._roster.live):
            # There is no other: give its health check the time to say what is wrong with it.
            pause = _AGAIN_SECONDS * 2 ** (len(failed) - 1)
            await self._roster.until_changed(loop.time() + pause)
        while True:
            now = loop.time()
            live = self._roster.live
            untried = [member for member in live if member.name not in failed] or live
            free = [member for member in untried if member.held_until <= now]
            if free:
                return self._router.choose(free, request_id, now)
            if live:  # all of them asked to be left alone for a while
                await self._roster.until_changed(min(member.held_until for member in untried))
            elif not self._keeper.is_running or now >= give_up_at:
                raise EngineError(self._roster.nobody())
            else:
                await self._roster.until_changed(give_up_at)

    # --- weights ------------------------------------------------------------------------------

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Check the weights, then update all live engines at the same time.

        An engine that fails or is late is ejected, and the update succeeds with the others; when
        all refuse, all stay as they are. Raises WeightsError before any engine was told, and
        EngineError when no engine serves the version in the end. One call at a time.
        """
        if self._checker is not None:
            await self._checker.check(weights)
        give_up_at = asyncio.get_running_loop().time() + self._update_seconds
        before, self._roster.target = self._roster.target, weights
        live = self._roster.live
        results = await asyncio.gather(*(self._update(member, weights) for member in live))
        failures = [error for error in results if error is not None]
        if live and sum(isinstance(error, EngineRefusal) for error in failures) == len(live):
            self._roster.target = before
            raise failures[0]
        for member, error in zip(live, results, strict=True):
            if error is not None:
                self._roster.eject(member, str(error))
        while not self._roster.live:
            if not self._keeper.is_running or asyncio.get_running_loop().time() >= give_up_at:
                raise failures[0] if len(failures) == 1 else EngineError(self._roster.nobody())
            await self._roster.until_changed(give_up_at)
        self._version = weights.version

    async def _update(self, member: Member, weights: PublishedWeights) -> EngineError | None:
        """One engine within its deadline; returns what went wrong."""
        try:
            async with asyncio.timeout(self._update_seconds), member.lock:
                await member.engine.update_weights(weights)
        except TimeoutError:
            return EngineError(
                f"engine {member.name} did not load version {weights.version} within "
                f"{self._update_seconds:g} s (engine.update_seconds)"
            )
        except EngineError as error:
            return error
        except asyncio.CancelledError:
            self._roster.eject(member, f"loading version {weights.version} was cut off")
            raise
        member.version = weights.version
        await self._keeper.ask_canary(member, weights)
        return None

    # --- the rest of the port -----------------------------------------------------------------

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """By engine name; one that is out or does not answer says so with `is_live` and zeros."""
        members = [*self._roster.members.values()]
        results = await asyncio.gather(*(self._statistics(member) for member in members))
        return {member.name: one for member, one in zip(members, results, strict=True)}

    async def _statistics(self, member: Member) -> EngineStatistics:
        unknown = EngineStatistics(is_live=member.is_live, version=member.version)
        if not member.is_live:
            return unknown
        try:
            found = (await member.engine.statistics())[member.name]
        except EngineError:
            member.wake.set()
            return unknown
        return dataclasses.replace(found, is_live=member.is_live, version=member.version)

    async def aclose(self) -> None:
        """Close all engines."""
        for member in self._roster.members.values():
            await member.engine.aclose()
