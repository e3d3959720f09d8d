"""The weight watcher: a new checkpoint reaches the engines, then the version is bumped."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headway.errors import EngineError
from headway.loop.policy import PolicyHandle
from headway.loop.signal import WaitBoard
from headway.ports import Engine, PublishedWeights, WeightChannel


@dataclass(frozen=True, slots=True)
class VersionServed:
    """A new version is served by every engine; `sync_seconds` from seen to served."""

    weights: PublishedWeights
    sync_seconds: float


class WeightWatcher:
    """See a complete checkpoint, announce it, apply it to the engines within a deadline, bump, wake
    waiters.

    Nothing here awaits a queue, so no consumer that waits for a version can stop a version.
    """

    def __init__(
        self,
        *,
        channel: WeightChannel,
        engine: Engine,
        policy: PolicyHandle,
        waits: WaitBoard,
        update_seconds: float,
        on_announced: Callable[[PublishedWeights], None],
        on_served: Callable[[VersionServed], None],
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._policy = policy
        self._waits = waits
        self._update_seconds = update_seconds
        self._on_announced = on_announced
        self._on_served = on_served

    async def run(self) -> None:
        """For ever. The wait for a checkpoint has no deadline of its own: the trainer's process is
        watched, and the stall watchdog covers one that lives but never publishes."""
        loop = asyncio.get_running_loop()
        while True:
            with self._waits.waiting("watcher", f"version {self._policy.version + 1} to appear"):
                weights = await self._channel.wait_newer(self._policy.version)
            seen_at = loop.time()
            self._policy.announce(weights.version)
            self._on_announced(weights)
            what = f"the engines to load version {weights.version}"
            with self._waits.waiting("watcher", what):
                try:
                    async with asyncio.timeout(self._update_seconds):
                        await self._engine.update_weights(weights)
                except TimeoutError:
                    raise EngineError(
                        f"{self._engine.name} did not load version {weights.version} within "
                        f"{self._update_seconds:g} s (engine.update_seconds)"
                    ) from None
            self._policy.advance(weights.version)
            self._on_served(VersionServed(weights, loop.time() - seen_at))
