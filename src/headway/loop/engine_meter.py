"""Counts what passes through the engines: tokens, requests in flight, idle time."""

import asyncio
from collections.abc import Mapping

from headway.core.rollout import Completion
from headway.ports import Engine, EngineStatistics, GenerateRequest, PublishedWeights


class EngineMeter:
    """An Engine that counts and passes on. Engines are idle while no request is in flight."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_tokens = 0
        """Tokens sampled, whatever became of them."""
        self._num_in_flight = 0
        self._idle_seconds = 0.0
        self._created_at = self._idle_since = asyncio.get_running_loop().time()

    @property
    def name(self) -> str:
        """The engine's own."""
        return self._engine.name

    async def generate(self, request: GenerateRequest) -> Completion:
        """Pass on and count."""
        if self._num_in_flight == 0:
            self._idle_seconds += asyncio.get_running_loop().time() - self._idle_since
        self._num_in_flight += 1
        try:
            completion = await self._engine.generate(request)
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle_since = asyncio.get_running_loop().time()
        self.num_tokens += len(completion.token_ids)
        return completion

    @property
    def idle_share(self) -> float | None:
        """Share of the time since creation without any request in flight."""
        now = asyncio.get_running_loop().time()
        total = now - self._created_at
        idle = self._idle_seconds + (0.0 if self._num_in_flight else now - self._idle_since)
        return idle / total if total > 0 else None

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Pass on."""
        await self._engine.update_weights(weights)

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """Pass on."""
        return await self._engine.statistics()

    async def aclose(self) -> None:
        """Pass on."""
        await self._engine.aclose()
