"""The metrics loop: one row on a fixed interval, independent of the training path."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headway.ports import MetricsSink


class MetricsLoop:
    """Emits `snapshot()` every `interval_seconds` of loop time, whatever the other parts do."""

    def __init__(
        self,
        *,
        snapshot: Callable[[], Awaitable[Mapping[str, Any]]],
        sink: MetricsSink,
        interval_seconds: float,
    ) -> None:
        self._snapshot = snapshot
        self._sink = sink
        self._interval_seconds = interval_seconds

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            self._sink.emit(await self._snapshot())
