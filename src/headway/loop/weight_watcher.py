"""The weight watcher: a new checkpoint reaches the engines, then the version is bumped."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headway.errors import EngineError
from headway.loop.policy import PolicyHandle
from headway.loop.signal import Signal, WaitBoard
from headway.ports import Engine, PublishedWeights, WeightChannel

UPDATE_GRACE_SECONDS = 15.0
"""The pool's own deadline for each engine comes first, because its message names the engine."""


@dataclass(frozen=True, slots=True)
class VersionServed:
    """A new version is served by every engine; `sync_seconds` from seen to served."""

    weights: PublishedWeights
    sync_seconds: float


class WeightWatcher:
    """See a complete checkpoint and announce it; apply the newest to the engines within a deadline,
    bump, wake waiters.

    The two run side by side: the trainer may have its next batch as soon as it has published, also
    while engines take long to load. Nothing here awaits a queue, so no consumer that waits for a
    version can stop a version.

    Args:
        update_seconds: deadline for one engine to load one version.
        max_unserved: versions that may be announced and not served. The trainer gets no batch for a
            version that is not announced, so it cannot publish so many more that it deletes the one
            that engines are loading.
    """

    def __init__(
        self,
        *,
        channel: WeightChannel,
        engine: Engine,
        policy: PolicyHandle,
        waits: WaitBoard,
        update_seconds: float,
        max_unserved: int,
        on_announced: Callable[[PublishedWeights], None],
        on_served: Callable[[VersionServed], None],
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._policy = policy
        self._waits = waits
        self._update_seconds = update_seconds + UPDATE_GRACE_SECONDS
        self._max_unserved = max_unserved
        self._on_announced = on_announced
        self._on_served = on_served
        self._newest: PublishedWeights | None = None
        self._seen_at = 0.0
        self._seen = Signal()

    async def run(self) -> None:
        """For ever. The wait for a checkpoint has no deadline of its own: the trainer's process is
        watched, and the stall watchdog covers one that lives but never publishes."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._announce(), name="watcher: announce")
            tasks.create_task(self._apply(), name="watcher: apply")

    async def _announce(self) -> None:
        while True:
            await self._policy.reached(self._policy.announced + 1 - self._max_unserved)
            weights = await self._channel.wait_newer(self._policy.announced)
            self._policy.announce(weights.version)
            self._newest = weights
            self._seen_at = asyncio.get_running_loop().time()
            self._on_announced(weights)
            self._seen.notify()

    async def _apply(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._waits.until(
                "watcher",
                f"version {self._policy.version + 1} to appear",
                self._seen,
                lambda: self._policy.announced > self._policy.version,
            )
            weights, seen_at = self._newest, self._seen_at
            assert weights is not None
            what = f"the engines to load version {weights.version}"
            with self._waits.waiting("watcher", what):
                try:
                    async with asyncio.timeout(self._update_seconds):
                        await self._engine.update_weights(weights)
                except TimeoutError:
                    raise EngineError(
                        f"{self._engine.name} did not load version {weights.version} within "
                        f"{self._update_seconds:g} s (engine.update_seconds, and some grace for a "
                        "pool to name its engine)"
                    ) from None
            self._policy.advance(weights.version)
            self._on_served(VersionServed(weights, loop.time() - seen_at))
