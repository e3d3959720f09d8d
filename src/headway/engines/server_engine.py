"""What the clients of all inference servers have in common; each adds its server's own words.

Every answer is held against what this client ordered. A request is tied to the version served when
it was sent; its stamps must begin there or later, never fall, and never exceed the newest version
that the server was told to load. Where a server does not stamp, the client makes sure that none of
its requests is in flight while the weights change, so that the version at sending is the version
of every token: it never guesses from the time of arrival.

After an update that broke off half-way nobody knows which weights the tokens come from: every
answer is refused until an update went through, also those of requests sent before.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from headway.config import UpdateMode
from headway.core.rollout import Completion, FinishReason
from headway.core.versions import VersionRuns
from headway.engines.capabilities import Capabilities, Logprobs
from headway.engines.contract import Contract
from headway.engines.http import HttpClient, sum_metric
from headway.engines.spans import join
from headway.errors import EngineError, EngineRefusal, TransportError, WrongVersion
from headway.ports import EngineStatistics, GenerateRequest, PublishedWeights

_READY_POLL_SECONDS = 0.05
_DRAIN_POLL_SECONDS = 0.05
_STATISTICS_SECONDS = 5.0
PROBE_TOKENS = 8
PROBE_TEMPERATURE = 1e6
_PROBE_SPREAD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """What a server calls these in `/metrics`."""

    running: str
    waiting: str
    tokens: str


@dataclass(frozen=True, slots=True)
class Sent:
    """What held when a request was sent: the version served, None where unknown."""

    version: int | None
    num_breaks: int
    num_updates: int


class ServerEngine(ABC):
    """One server.

    Args:
        name: unique in the pool.
        url: such as `http://127.0.0.1:8000`.
        model: the name that the server serves it by.
        update_mode: what happens to running requests when the weights change.
        clear_cache: in mode keep, whether running requests compute their keys and values again
            under the new weights.
        version: what the server serves; None: unknown until `connect` or the first update, and
            until then stamps are taken as they come.
        contract: of the initial model; its vocabulary is what token ids are checked against.
        start: folder of the weights of `version`, for a server that somebody else started: at
            `connect` it may serve those of another run, or of another life of this one, and then
            loads these.

    No call but control calls has a deadline of its own: rollout, weight watcher and pool cancel.
    """

    metric_names: ClassVar[MetricNames]

    def __init__(
        self,
        *,
        name: str,
        url: str,
        model: str = "policy",
        update_mode: UpdateMode = UpdateMode.KEEP,
        clear_cache: bool = True,
        version: int | None = None,
        contract: Contract | None = None,
        start: Path | None = None,
    ) -> None:
        self._name = name
        self._http = HttpClient(name=name, url=url)
        self._model = model
        self._update_mode = update_mode
        self._clear_cache = clear_cache
        self._contract = contract or Contract()
        self._start = start
        self._version = version
        self._newest_ordered = version or 0
        self._capabilities: Capabilities | None = None
        self._stamps_tokens = True
        self._serving = asyncio.Event()
        self._serving.set()
        self._num_updates = 0
        self._num_asked = 0
        self._broken: str | None = None
        self._num_breaks = 0
        self._pause_seconds = 0.0
        self._last_count: tuple[float, float] | None = None
        self._background: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """Unique in the pool; used in messages and metrics."""
        return self._name

    @property
    def version(self) -> int | None:
        """What it serves; None: unknown."""
        return self._version

    @property
    def capabilities(self) -> Capabilities | None:
        """Found by `connect`; None before."""
        return self._capabilities

    @property
    def pause_seconds(self) -> float:
        """How long running requests stood still in the last update, as seen from here."""
        return self._pause_seconds

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; cancelling closes the connection, which frees the request.

        A request that an update aborts is sent again with what it had sampled, and its parts are
        joined, so callers never see an abort. Raises EngineError.
        """
        self._check_token_ids(request)
        parts: list[Completion] = []
        sampled: list[int] = []
        while True:
            await self._serving.wait()  # no deadline: the end of the update under way sets it
            sent = Sent(self._version, self._num_breaks, self._num_updates)
            if self._broken is not None:
                raise TransportError(self._broken)  # nothing was sent: another engine may have it
            self._num_asked += 1
            try:
                completion = await self._ask(request, sampled, len(parts), sent)
            finally:
                self._num_asked -= 1
            self._refuse_if_broken(sent)
            self._check_stamps(request, completion.version_runs, sent)
            parts.append(completion)
            if completion.finish_reason is not FinishReason.ABORT:
                return join(parts, completion.finish_reason)
            if sent.num_updates == self._num_updates:
                raise EngineError(
                    f"engine {self._name} aborted request {request.request_id} although no weight "
                    "update was under way: somebody else aborts its requests"
                )
            sampled = [*sampled, *completion.token_ids.tolist()]
            if len(sampled) >= request.max_tokens:
                return join(parts, FinishReason.LENGTH)

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Change the weights as the update mode says. One call at a time.

        Whatever happens in between, the server is told to go on. Raises EngineError; unless the
        server itself refused to load, no answer is accepted before an update went through.
        """
        if weights.path is None:
            raise EngineError(f"engine {self._name}: version {weights.version} has no folder")
        self._num_updates += 1
        self._newest_ordered = max(self._newest_ordered, weights.version)
        self._serving.clear()
        try:
            if not self._stamps_tokens:
                await self._drain()
            await self._load(weights.path.resolve(), weights.version)
            self._version = weights.version
            self._broken = None
        finally:
            self._serving.set()

    async def connect(self, version: int | None) -> Capabilities:
        """Find out what it can do, end a pause that was left behind, check or set its label.

        `version` is what it serves already, or what it loads here from `start`; None: an update
        follows before the first request. Raises EngineError that says what to change.
        """
        if self._broken is not None and self._capabilities is not None:
            # Half loaded: it must not sample, not even to show what it can do. An update is next.
            if version is not None:
                await self._begin(version, self._broken)
            return self._capabilities
        await self._resume()
        capabilities = await self._discover()
        self._stamps_tokens = capabilities.stamps_tokens
        if differences := self._contract.differences(capabilities.contract):
            raise EngineError(
                f"engine {self._name} at {self._http.url} does not fit this run. This run has "
                f"contract {self._contract.id}, the engine {capabilities.contract.id}: "
                + "; ".join(differences)
            )
        if version is None:
            self._version = None
        self._capabilities = capabilities
        if version is not None and (replaced := await self._agree_on(version)):
            return replace(capabilities, replaced=replaced)
        return capabilities

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """Queue depths and tokens per second since the last call, from `/metrics`."""
        answer = await self._http.call("GET", "/metrics", deadline_seconds=_STATISTICS_SECONDS)
        text = answer.decode(errors="replace")
        names = self.metric_names
        return {
            self._name: EngineStatistics(
                num_running=int(sum_metric(text, names.running)),
                num_waiting=int(sum_metric(text, names.waiting)),
                tokens_per_second=self._rate(sum_metric(text, names.tokens)),
                version=self._version,
                pause_seconds=self._pause_seconds,
            )
        }

    async def wait_ready(self, deadline_seconds: float) -> None:
        """Return once the server says that it is ready. Raises EngineError at the deadline."""
        reason: EngineError | None = None
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    try:
                        await self._check_ready()
                        return
                    except EngineError as error:
                        reason = error
                    await asyncio.sleep(_READY_POLL_SECONDS)
        except TimeoutError:
            raise EngineError(
                f"engine {self._name} at {self._http.url} was not ready within "
                f"{deadline_seconds:g} s: {reason}"
            ) from None

    async def is_ready(self) -> bool:
        """Whether the server says now that it is ready to take requests."""
        try:
            await self._check_ready()
        except EngineError:
            return False
        return True

    async def is_healthy(self) -> bool:
        """Whether it would take requests now; never ask during an update."""
        return await self.is_ready()

    async def lag(self) -> str | None:
        """Whether its label is another than that of what it was told to load."""
        expected = self._version
        label = await self._label()
        if expected is None or expected != self._version or not self._stamps_tokens:
            return None
        if label == str(expected):
            return None
        return f"it serves version {label or None} instead of {expected}: it was restarted"

    async def aclose(self) -> None:
        """Close all connections."""
        for task in self._background:
            task.cancel()
        await self._http.aclose()

    # --- what a server's own client adds ------------------------------------------------------

    @abstractmethod
    async def _ask(
        self, request: GenerateRequest, sampled: list[int], num_parts: int, sent: Sent
    ) -> Completion:
        """One engine call, its answer checked: prompt plus what was sampled so far."""

    @abstractmethod
    async def _load(self, folder: Path, version: int) -> None:
        """Pause, load, label, go on; sets `_pause_seconds`. What must not stay half done is done
        in `_breaking`."""

    @abstractmethod
    async def _resume(self) -> None:
        """End a pause; harmless when there is none."""

    @abstractmethod
    async def _abort_all(self) -> None:
        """Make running requests end at once with what they have."""

    @abstractmethod
    async def _discover(self) -> Capabilities:
        """Ask and try. Raises EngineError when it cannot be used at all."""

    @abstractmethod
    async def _label(self) -> str:
        """The label in force; empty: it has none."""

    @abstractmethod
    async def _set_label(self, version: int) -> None:
        """Stamp what is sampled from now on with this version."""

    @abstractmethod
    async def _check_ready(self) -> None:
        """Raises EngineError when it is not ready."""

    # --- shared steps -------------------------------------------------------------------------

    async def _agree_on(self, version: int) -> str:
        """Make sure of its label; returns what was replaced for it, empty when nothing was."""
        label, replaced = await self._label(), ""
        # Without a label somebody else's server has what it was started on: the initial model.
        if not label and (version == 0 or self._start is None):
            await self._set_label(version)
        elif label != str(version):
            replaced = f"version {label!r}" if label else "weights without a label"
            await self._begin(version, f"engine {self._name} at {self._http.url} serves {replaced}")
        self._version = version
        self._newest_ordered = max(self._newest_ordered, version)
        return replaced

    async def _begin(self, version: int, found: str) -> None:
        """Load what the run begins with instead of what was `found`.

        Keys and values go in any case: `clear_cache: false` tells those of different weights apart
        by version, and another run had other weights under the same one.
        """
        remedy = f"but this run begins at version {version}: start it again on the initial model"
        if self._start is None:
            raise EngineError(f"{found}, {remedy}")
        clear_cache, self._clear_cache = self._clear_cache, True
        try:
            await self.update_weights(PublishedWeights(version=version, path=self._start))
        except EngineError as error:
            raise EngineError(
                f"{found}, {remedy}. It was told to load {self._start}: {error}"
            ) from error
        finally:
            self._clear_cache = clear_cache

    async def _drain(self) -> None:
        """Until none of this client's requests is in flight; the update's deadline bounds it."""
        while self._num_asked:
            if self._update_mode is UpdateMode.INTERRUPT:
                # Again and again: a request that was still on its way is not aborted.
                await self._abort_all()
            await asyncio.sleep(_DRAIN_POLL_SECONDS)

    @contextlib.contextmanager
    def _breaking(self, version: int) -> Iterator[None]:
        """Around what leaves nobody knowing which weights are served unless it succeeds, however it
        ends: a cancellation, too."""
        try:
            yield
        except BaseException as error:
            self._break(version, error)
            raise

    def _break(self, version: int, error: BaseException) -> None:
        self._num_breaks += 1
        self._version = None
        self._broken = (
            f"engine {self._name} is out of use: loading version {version} was cut off, so nobody "
            f"knows which weights it serves ({error or type(error).__name__})"
        )

    def _refuse_if_broken(self, sent: Sent) -> None:
        if sent.num_breaks != self._num_breaks:
            raise EngineError(
                f"engine {self._name} broke off a weight update while the request was running, so "
                f"nobody knows what sampled it ({self._broken or 'it is in use again'})"
            )

    def _check_token_ids(self, request: GenerateRequest) -> None:
        """Some servers die of an id that the model does not have."""
        size = self._contract.vocabulary_size
        if not request.token_ids:
            raise EngineError(f"request {request.request_id} has no token")
        low, high = min(request.token_ids), max(request.token_ids)
        if low < 0 or (size and high >= size):
            raise EngineError(
                f"request {request.request_id} has token id {low if low < 0 else high}, outside "
                f"the vocabulary of {size}: it was not sent to engine {self._name}"
            )

    def _check_stamps(self, request: GenerateRequest, runs: VersionRuns, sent: Sent) -> None:
        versions = [version for version, _ in runs]
        if sent.version is None or not versions:
            return
        if (
            versions != sorted(versions)
            or versions[0] < sent.version
            or versions[-1] > self._newest_ordered
        ):
            raise WrongVersion(
                f"engine {self._name} stamped request {request.request_id} with versions "
                f"{versions}, but it served version {sent.version} when it was sent and was told "
                f"of none above {self._newest_ordered}: it was restarted, or somebody else loads "
                "weights"
            )

    def _soon(self, call: Coroutine[Any, Any, bytes]) -> None:
        """Tell the server something that nobody waits for; what goes wrong is nobody's loss."""

        async def tell() -> None:
            with contextlib.suppress(EngineError):
                await call

        task = asyncio.create_task(tell(), name=f"aside to {self._name}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _rate(self, count: float) -> float:
        now = asyncio.get_running_loop().time()
        last, self._last_count = self._last_count, (now, count)
        if last is None or now <= last[0] or count < last[1]:
            return 0.0
        return (count - last[1]) / (now - last[0])


def logprobs_kind(logprobs: list[float]) -> Logprobs:
    """Before or after temperature, told from a few tokens sampled at a huge one.

    After it, the distribution is flat and all tokens have the same log-probability, that of one in
    the vocabulary; before it, they differ as tokens do.
    """
    if not logprobs:
        return Logprobs.NONE
    is_flat = max(logprobs) - min(logprobs) < _PROBE_SPREAD
    return Logprobs.PROCESSED if is_flat else Logprobs.RAW


def needs(error: EngineRefusal, name: str, what: str, remedy: str) -> EngineError:
    """A refusal of something that a run cannot do without, with what to change."""
    return EngineError(f"engine {name} does not offer {what}: start it with {remedy} ({error})")
