"""A simulated engine: requests take their time, and tokens are stamped as a real one would."""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from headway.config import UpdateMode
from headway.core.rollout import Completion, FinishReason
from headway.core.versions import VersionRuns
from headway.errors import EngineError
from headway.ports import EngineStatistics, GenerateRequest, PublishedWeights
from headway.sim.work_clock import Job, Speed, WorkClock
from headway.sim.workload import Turn


class SimulatedEngine:
    """Samples tokens evenly over the work of a request, as fast as the load allows.

    Args:
        turn: what a request comes to: its work and its tokens.
        speed: work per second of each running request, by how many run. The default takes work for
            seconds, whatever the load.
        tokens_per_work: for the statistics.
        slots: requests that run at the same time; None: all.
        update_mode: what happens to running requests when the weights change. All of them freeze
            for `sync_seconds`; `keep` lets them go on under the new version, `interrupt` too after
            another `recompute_seconds` each, `finish` waits for their end before it begins.
        stamps_tokens: off: all tokens of a completion bear the version at which it was asked for.
    """

    def __init__(
        self,
        *,
        turn: Callable[[GenerateRequest], Turn],
        speed: Speed = lambda _: 1.0,
        tokens_per_work: float = 1.0,
        slots: int | None = None,
        sync_seconds: float = 0.0,
        recompute_seconds: float = 0.0,
        update_mode: UpdateMode = UpdateMode.KEEP,
        stamps_tokens: bool = True,
        version: int = 0,
        name: str = "simulated engine",
    ) -> None:
        self._turn = turn
        self._clock = WorkClock(speed=speed, slots=slots)
        self._sync_seconds = sync_seconds
        self._recompute_seconds = recompute_seconds
        self._mode = update_mode
        self._stamps_tokens = stamps_tokens
        self._name = name
        self._tokens_per_work = tokens_per_work
        self._logprobs = np.zeros(0, np.float32)
        self._versions = [version]
        self._served_from = [-1.0]
        """The work clock from which each version was served."""
        self._recomputed = [0.0]
        """Work without tokens that requests running at each of these instants had to do again."""

    @property
    def name(self) -> str:
        """Used in messages."""
        return self._name

    async def generate(self, request: GenerateRequest) -> Completion:
        """Wait for a slot and for the work to be done. Raises EngineError as the faults state."""
        turn = self._turn(request)
        job = Job(turn, self._versions[-1])
        await self._clock.run(job)
        if turn.fails:
            raise EngineError(f"{self._name} broke off {request.request_id} (simulate.faults)")
        token_ids = np.zeros(turn.num_tokens, np.int32)
        token_ids[0] = turn.key
        return Completion(
            token_ids=token_ids,
            logprobs=self._zeros(turn.num_tokens),
            version_runs=self._stamps(job),
            finish_reason=FinishReason.STOP,
        )

    def _zeros(self, count: int) -> NDArray[np.float32]:
        """Log-probabilities that nobody reads: one array for all requests, not to be written to."""
        if len(self._logprobs) < count:
            self._logprobs = np.zeros(2 * count, np.float32)
            self._logprobs.flags.writeable = False
        return self._logprobs[:count]

    def _stamps(self, job: Job) -> VersionRuns:
        work, num_tokens, *_ = job.turn
        assert job.begun_at is not None
        if not self._stamps_tokens:
            return VersionRuns(((job.asked_at_version, num_tokens),))
        first = bisect_right(self._served_from, job.begun_at) - 1
        if first == len(self._versions) - 1:
            return VersionRuns(((self._versions[first], num_tokens),))
        runs = []
        done = 0
        lost = 0.0
        for index in range(first, len(self._versions)):
            until = num_tokens
            if index + 1 < len(self._versions):
                worked = self._served_from[index + 1] - job.begun_at - lost
                share = worked / work if work else 1.0
                until = max(done, min(round(num_tokens * share), num_tokens))
                lost += self._recomputed[index + 1]
            runs.append((self._versions[index], until - done))
            done = until
        return VersionRuns.of(runs)

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Freeze, take the sync time, go on under the new version. May be cancelled."""
        clock = self._clock
        try:
            if self._mode is UpdateMode.FINISH:
                clock.hold()
                await clock.idle()
            clock.freeze()
            if self._sync_seconds:
                await asyncio.sleep(self._sync_seconds)
            self._serve(weights.version)
        finally:
            clock.thaw()
            clock.release()

    def _serve(self, version: int) -> None:
        recomputed = 0.0
        if self._mode is UpdateMode.INTERRUPT:
            recomputed = self._recompute_seconds * self._clock.rate
            self._clock.delay(recomputed)
        self._versions.append(version)
        self._served_from.append(self._clock.work)
        self._recomputed.append(recomputed)

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """Requests in flight, and how fast they are sampled."""
        clock = self._clock
        return {
            self.name: EngineStatistics(
                num_running=clock.num_running,
                num_waiting=clock.num_waiting,
                tokens_per_second=clock.rate * clock.num_running * self._tokens_per_work,
            )
        }

    async def aclose(self) -> None:
        """Nothing to release."""
