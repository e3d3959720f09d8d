"""Many engines as one: requests go to the least busy, new weights to all."""

import asyncio
from collections.abc import Mapping, Sequence

from headway.core.rollout import Completion
from headway.errors import EngineError
from headway.ports import Engine, EngineStatistics, GenerateRequest, PublishedWeights


class EnginePool:
    """An Engine made of engines.

    Args:
        engines: at least one, names unique.
        update_seconds: deadline for each engine to load one version.
        version: what the engines serve at the start.

    An engine that fails to load fails the update, with its name in the message.
    """

    def __init__(
        self, engines: Sequence[Engine], *, update_seconds: float, version: int = 0
    ) -> None:
        names = [engine.name for engine in engines]
        if not engines or len(set(names)) < len(names):
            raise ValueError(f"a pool needs engines with unique names, not {names}")
        self._engines = tuple(engines)
        self._update_seconds = update_seconds
        self._in_flight = dict.fromkeys(names, 0)
        self._version = version

    @property
    def name(self) -> str:
        """`pool`."""
        return "pool"

    @property
    def version(self) -> int:
        """The version that every engine serves."""
        return self._version

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Requests sent and not yet answered, by engine."""
        return dict(self._in_flight)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample on the engine with the fewest requests in flight. Raises EngineError."""
        engine = min(self._engines, key=lambda candidate: self._in_flight[candidate.name])
        self._in_flight[engine.name] += 1
        try:
            return await engine.generate(request)
        finally:
            self._in_flight[engine.name] -= 1

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Update all engines at the same time, each within its deadline.

        All of them are brought to an end before the first failure is raised as EngineError, so
        that none is left half-way. One call at a time.
        """
        results = await asyncio.gather(
            *(self._update(engine, weights) for engine in self._engines), return_exceptions=True
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise failures[0]
        self._version = weights.version

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """By engine name. Raises EngineError."""
        found: dict[str, EngineStatistics] = {}
        for result in await asyncio.gather(*(engine.statistics() for engine in self._engines)):
            found.update(result)
        return found

    async def aclose(self) -> None:
        """Close all engines."""
        for engine in self._engines:
            await engine.aclose()

    async def _update(self, engine: Engine, weights: PublishedWeights) -> None:
        try:
            async with asyncio.timeout(self._update_seconds):
                await engine.update_weights(weights)
        except TimeoutError:
            raise EngineError(
                f"engine {engine.name} did not load version {weights.version} within "
                f"{self._update_seconds:g} s (engine.update_seconds)"
            ) from None
