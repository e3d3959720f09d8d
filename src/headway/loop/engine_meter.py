"""Counts what passes through the engines: tokens, requests in flight, idle time."""

import asyncio
from collections.abc import Mapping

from headway.core.rollout import Completion
from headway.core.totals import StepTotals
from headway.ports import Engine, EngineStatistics, GenerateRequest, PublishedWeights


class EngineMeter:
    """An Engine that counts and passes on. Engines are idle while no request is in flight."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_tokens = 0
        """Tokens sampled, whatever became of them."""
        self._num_in_flight = 0
        self._idle_seconds = 0.0
        self._loop = asyncio.get_running_loop()
        self._created_at = self._idle_since = self._loop.time()
        self._seconds_before = 0.0

    def restore(self, steps: Mapping[int, StepTotals]) -> None:
        """Go on counting after a resume, from the last step that was recorded."""
        if steps:
            last = steps[max(steps)]
            self.num_tokens = last.tokens_generated
            self._idle_seconds = last.engine_idle_seconds
            self._seconds_before = last.engine_seconds

    @property
    def name(self) -> str:
        """The engine's own."""
        return self._engine.name

    async def generate(self, request: GenerateRequest) -> Completion:
        """Pass on and count."""
        if self._num_in_flight == 0:
            self._idle_seconds += self._loop.time() - self._idle_since
        self._num_in_flight += 1
        try:
            completion = await self._engine.generate(request)
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle_since = self._loop.time()
        self.num_tokens += len(completion.token_ids)
        return completion

    @property
    def seconds(self) -> float:
        """In which engines could have been busy, so far."""
        return self._seconds_before + self._loop.time() - self._created_at

    @property
    def idle_seconds(self) -> float:
        """Of these, without any request in flight."""
        if self._num_in_flight:
            return self._idle_seconds
        return self._idle_seconds + self._loop.time() - self._idle_since

    @property
    def idle_share(self) -> float | None:
        """Share of the time without any request in flight."""
        return self.idle_seconds / self.seconds if self.seconds > 0 else None

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Pass on."""
        await self._engine.update_weights(weights)

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """Pass on."""
        return await self._engine.statistics()

    async def aclose(self) -> None:
        """Pass on."""
        await self._engine.aclose()
