"""The keeper of a pool: health of the members that are live, return of those that are out.

A member comes (back) in only after it is healthy, fits the run and the other engines, has loaded
the newest weights and passed the canary: all before a single request.
"""

import asyncio
from collections.abc import Callable, Sequence

from headway.engines.canary import EngineCanary, canary_failed
from headway.engines.capabilities import Capabilities
from headway.engines.members import Member, Roster
from headway.errors import EngineError, WrongVersion
from headway.ports import PublishedWeights

_RETURN_SECONDS = 0.5
_MAX_RETURN_SECONDS = 5.0
_STABLE_SECONDS = 30.0


class Keeper:
    """One task for each member, while `run` runs.

    Args:
        roster: of the pool.
        update_seconds: deadline for an engine to come back with the newest weights.
        health_seconds: between two health checks of an engine.
        health_deadline_seconds: for one of them.
        canary: asks every engine at the start and after every update; None: nobody does.
        against: reasons why an engine of these capabilities cannot be in this pool.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        update_seconds: float,
        health_seconds: float,
        health_deadline_seconds: float,
        canary: EngineCanary | None,
        against: Callable[[Capabilities], Sequence[str]],
    ) -> None:
        self._roster = roster
        self._update_seconds = update_seconds
        self._health_seconds = health_seconds
        self._health_deadline_seconds = health_deadline_seconds
        self._canary = canary
        self._against = against
        self._begun: PublishedWeights | None = None
        """What the run begins with, with its canary; None: nobody made one."""
        self._group: asyncio.TaskGroup | None = None

    @property
    def is_running(self) -> bool:
        """Whether members that are out can come back."""
        return self._group is not None

    async def run(self) -> None:
        """For ever. Raises EngineError when the canary ends the run."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for member in self._roster.members.values():
                    self.keep(member)
                await asyncio.Event().wait()  # no deadline: it lives as long as the run
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._group = None

    def keep(self, member: Member) -> None:
        """Look after a member from now on, or as soon as `run` runs."""
        if self._group is not None:
            member.keeper = self._group.create_task(
                self._keep(member), name=f"keeper of {member.name}"
            )

    async def connect(self, member: Member, version: int | None) -> None:
        """Raises EngineError when the engine does not fit the run or the other engines."""
        if member.client is None:
            return
        try:
            async with asyncio.timeout(self._update_seconds):
                capabilities = await member.client.connect(version)
        except TimeoutError:
            raise EngineError(
                f"engine {member.name} did not say what it can do within {self._update_seconds:g} s"
            ) from None
        if reasons := self._against(capabilities):
            raise EngineError(
                f"engine {member.name} ({capabilities.engine}) cannot be used here: "
                + "; ".join(reasons)
            )
        for other in self._roster.members.values():
            theirs = other.capabilities
            if other is member or theirs is None:
                continue
            if differences := capabilities.contract.differences(theirs.contract):
                raise EngineError(
                    f"engine {member.name} differs from {other.name}: " + "; ".join(differences)
                )
        self._roster.say("info", f"engine {member.name}: {capabilities.statement()}")

    async def check_start(self, weights: PublishedWeights) -> None:
        """As `EnginePool.check_start`. Whoever comes back before the first update is asked, too."""
        if self._canary is None:
            return
        self._begun = weights
        for result in await asyncio.gather(
            *(self._heed_canary(member, weights) for member in self._roster.live),
            return_exceptions=True,
        ):
            if isinstance(result, BaseException):
                raise result

    async def ask_canary(self, member: Member, weights: PublishedWeights) -> None:
        """After an update of a live member. While `run` runs, this does not wait for the answers,
        which may have to queue behind other requests. Raises EngineError, here or out of `run`,
        when the canary failed and the run is to stop for it."""
        if self._canary is None:
            return
        if self._group is None:
            await self._heed_canary(member, weights)
        else:
            self._group.create_task(
                self._heed_canary(member, weights), name=f"canary of {member.name}"
            )

    async def _keep(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        pause = _RETURN_SECONDS
        while True:
            if member.is_live:
                await _sleep_or_woken(member, self._health_seconds)
                await self._check_health(member)
                if member.is_live and loop.time() - member.live_since > _STABLE_SECONDS:
                    pause = _RETURN_SECONDS
            else:
                # One that comes back well and fails again must not do so at full speed.
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_RETURN_SECONDS)
                await self._readmit(member)

    async def _check_health(self, member: Member) -> None:
        async with member.lock:  # never during an update, which some engines take for sickness
            sickness = await self._sickness(member) if member.is_live else None
            if sickness is None and member.is_live:
                sickness = await self._lag(member)
        if sickness is not None:
            self._roster.eject(member, sickness)

    async def _sickness(self, member: Member) -> str | None:
        if member.client is None:
            return None
        try:
            async with asyncio.timeout(self._health_deadline_seconds):
                return None if await member.client.is_healthy() else "its health check failed"
        except TimeoutError:
            return (
                f"it did not answer a health check within {self._health_deadline_seconds:g} s "
                "(engine.health_deadline_seconds)"
            )

    async def _lag(self, member: Member) -> str | None:
        if member.client is None:
            return None
        try:
            async with asyncio.timeout(self._health_deadline_seconds):
                return await member.client.lag()
        except (EngineError, TimeoutError) as error:
            return f"it did not say which version it serves: {error}"

    async def _readmit(self, member: Member) -> None:
        """Bring a member that is out to the newest weights, and let it in if all is well."""
        target = self._roster.target
        version = self._roster.start_version if target is None else target.version
        reason: str | None
        try:
            async with asyncio.timeout(self._update_seconds), member.lock:
                reason = await self._sickness(member)
                if reason is None:
                    await self._bring_up(member, target)
        except TimeoutError:
            reason = f"it did not load version {version} within {self._update_seconds:g} s"
        except EngineError as error:
            reason = str(error)
        if reason is None:
            # No await from here on. What it loaded may not be the newest any more: once again.
            if target is not self._roster.target:
                await self._readmit(member)
            else:
                self._roster.admit(member, version)
            return
        if reason != member.reason:
            self._roster.say("warning", f"engine {member.name} is still out: {reason}")
        member.reason = reason

    async def _bring_up(self, member: Member, target: PublishedWeights | None) -> None:
        if target is None:
            await self.connect(member, self._roster.start_version)
        else:
            await self.connect(member, None)
            await member.engine.update_weights(target)
        asked = target or self._begun
        if self._canary is not None and asked is not None:
            await self._heed_canary(member, asked)

    async def _heed_canary(self, member: Member, weights: PublishedWeights) -> None:
        assert self._canary is not None
        named = _initial(weights.version) if weights is self._begun else None
        problem = await self._canary_problem(self._canary, member, weights, named)
        if problem is None:
            return
        if self._canary.action == "stop":
            raise canary_failed(problem)
        self._roster.say("warning", problem)

    @staticmethod
    async def _canary_problem(
        canary: EngineCanary, member: Member, weights: PublishedWeights, named: str | None
    ) -> str | None:
        limit = asyncio.timeout(None)
        longest = member.capabilities.max_model_len if member.capabilities else None
        try:
            async with limit:
                with member.running(limit):
                    return await canary.check(
                        member.engine, weights, max_model_len=longest, named=named
                    )
        except WrongVersion as error:
            return str(error)
        except (EngineError, TimeoutError):
            # It did not answer: that is for the health checks, not for the canary.
            member.wake.set()
            return None


def _initial(version: int) -> str:
    """What the weights are called that a run begins with."""
    if version:
        return f"version {version}, which this run begins at (restart it on the initial model)"
    return "the initial weights of model.path (restart it on that folder)"


async def _sleep_or_woken(member: Member, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await member.wake.wait()
    except TimeoutError:
        return
    finally:
        member.wake.clear()
