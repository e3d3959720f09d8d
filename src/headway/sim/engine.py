"""A simulated engine: it sleeps for a drawn latency and stamps tokens as a real one would."""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping

import numpy as np

from headway.config import LatencyConfig
from headway.core.rollout import Completion, FinishReason
from headway.core.versions import VersionRuns
from headway.errors import ConfigError
from headway.ports import EngineStatistics, GenerateRequest, PublishedWeights


def latency_sampler(config: LatencyConfig, rng: np.random.Generator) -> Callable[[], float]:
    """A function that draws seconds from the configured distribution."""
    match config.kind:
        case "constant":
            return lambda: config.value
        case "uniform":
            return lambda: float(rng.uniform(config.low, config.high))
        case "lognormal":
            return lambda: float(config.median * np.exp(config.sigma * rng.standard_normal()))
        case _:
            raise ConfigError(f"unknown latency distribution {config.kind!r}")


class SimulatedEngine:
    """Every request takes a drawn time and samples tokens evenly over it.

    A weight update freezes running requests for `sync_seconds`; they go on under the new version,
    so a completion may span several version runs (mode keep).

    Args:
        latency: draws the seconds of one request.
        tokens_per_second: of one request; at least one token is sampled.
    """

    def __init__(
        self,
        *,
        latency: Callable[[], float],
        tokens_per_second: float,
        sync_seconds: float = 0.0,
        version: int = 0,
    ) -> None:
        self._latency = latency
        self._tokens_per_second = tokens_per_second
        self._sync_seconds = sync_seconds
        self._frozen_seconds = 0.0
        self._frozen_since: float | None = None
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._versions = [version]
        self._served_from = [-1.0]
        """Running time (loop time less all freezes) from which each version was served."""
        self._num_running = 0

    @property
    def name(self) -> str:
        """Used in messages."""
        return "simulated engine"

    def _running_time(self) -> float:
        now = (
            asyncio.get_running_loop().time() if self._frozen_since is None else self._frozen_since
        )
        return now - self._frozen_seconds

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sleep for the drawn latency, not counting freezes."""
        seconds = self._latency()
        started_at = self._running_time()
        ends_at = started_at + seconds
        self._num_running += 1
        try:
            while (left := ends_at - self._running_time()) > 1e-9:
                await asyncio.sleep(left)
                await self._thawed.wait()
        finally:
            self._num_running -= 1
        num_tokens = max(round(seconds * self._tokens_per_second), 1)
        return Completion(
            token_ids=np.zeros(num_tokens, np.int32),
            logprobs=np.zeros(num_tokens, np.float32),
            version_runs=self._stamps(started_at, seconds, num_tokens),
            finish_reason=FinishReason.STOP,
        )

    def _stamps(self, started_at: float, seconds: float, num_tokens: int) -> VersionRuns:
        first = bisect_right(self._served_from, started_at) - 1
        if first == len(self._versions) - 1:
            return VersionRuns(((self._versions[first], num_tokens),))
        runs = []
        done = 0
        for index in range(first, len(self._versions)):
            until = num_tokens
            if index + 1 < len(self._versions):
                share = (self._served_from[index + 1] - started_at) / seconds if seconds else 1.0
                until = min(round(num_tokens * share), num_tokens)
            runs.append((self._versions[index], until - done))
            done = until
        return VersionRuns.of(runs)

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Freeze, take the sync time, go on under the new version."""
        self._frozen_since = asyncio.get_running_loop().time()
        self._thawed.clear()
        try:
            if self._sync_seconds:
                await asyncio.sleep(self._sync_seconds)
            self._versions.append(weights.version)
            self._served_from.append(self._running_time())
        finally:
            now = asyncio.get_running_loop().time()
            self._frozen_seconds += now - self._frozen_since
            self._frozen_since = None
            self._thawed.set()

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """Requests in flight."""
        return {self.name: EngineStatistics(num_running=self._num_running)}

    async def aclose(self) -> None:
        """Nothing to release."""
