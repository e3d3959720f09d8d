"""Client of a vLLM server, and of the embedded engine, which speaks the same contract.

Needs vLLM started with `--enable-scale-out` and `VLLM_SERVER_DEV_MODE=1`. Log-probabilities are
before temperature (vLLM's default, and the embedded engine's only way).

Nothing unchecked becomes data: an answer with missing or non-finite log-probabilities, with version
spans that do not cover its tokens, or with a label that is no version, is an `EngineError`. After
an update that failed half-way, nobody knows which weights the tokens come from, so every answer is
refused from then on.
"""

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import msgspec
import numpy as np

from headway.config import UpdateMode
from headway.core.rollout import Completion, FinishReason
from headway.core.versions import VersionRuns
from headway.errors import EngineError, TransportError
from headway.ports import EngineStatistics, GenerateRequest, PublishedWeights

_NUM_RETRIES = 2
_RETRY_SECONDS = 0.05
_CONNECT_SECONDS = 10.0
_RESUME_SECONDS = 10.0
_STATISTICS_SECONDS = 5.0
_READY_POLL_SECONDS = 0.05
_MAX_MESSAGE_CHARACTERS = 500
_HTTP_OK = 200
_PAUSE = {
    UpdateMode.KEEP: "keep",
    UpdateMode.INTERRUPT: "abort",
    UpdateMode.FINISH: "wait",
}


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float | None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Refused(EngineError):
    """The server answered, and said no: its state is what it was."""


class VllmEngine:
    """One server.

    Args:
        name: unique in the pool.
        url: such as `http://127.0.0.1:8000`.
        model: the name that the server serves it by.
        update_mode: what happens to running requests when the weights change.
        clear_cache: in mode keep, whether running requests compute their keys and values again
            under the new weights.

    Connections are made at the first use, inside the running loop. No call but `statistics` and
    `wait_ready` has a deadline of its own: rollout and weight watcher cancel.
    """

    def __init__(
        self,
        *,
        name: str,
        url: str,
        model: str = "policy",
        update_mode: UpdateMode = UpdateMode.KEEP,
        clear_cache: bool = True,
    ) -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._model = model
        self._update_mode = update_mode
        self._clear_cache = clear_cache
        self._session: aiohttp.ClientSession | None = None
        self._serving = asyncio.Event()
        self._serving.set()
        self._num_updates = 0
        self._broken: str | None = None
        self._last_count: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """Unique in the pool; used in messages and metrics."""
        return self._name

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; cancelling closes the connection, which frees the request.

        In mode interrupt, a request that an update aborts is sent again with what it had sampled,
        and its parts are joined, so callers never see an abort. Raises EngineError.
        """
        parts: list[Completion] = []
        sampled: list[int] = []
        while True:
            await self._serving.wait()  # no deadline: the end of the update under way sets it
            num_updates = self._num_updates
            completion = await self._generate_once(request, sampled, len(parts))
            parts.append(completion)
            sampled = [*sampled, *completion.token_ids.tolist()]
            if completion.finish_reason is not FinishReason.ABORT:
                return _join(parts, completion.finish_reason)
            if num_updates == self._num_updates:
                raise EngineError(
                    f"engine {self._name} aborted request {request.request_id} although no weight "
                    "update was under way: somebody else aborts its requests"
                )
            if len(sampled) >= request.max_tokens:
                return _join(parts, FinishReason.LENGTH)

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Pause as the update mode says, load, label, resume. One call at a time.

        Whatever happens in between, the server is told to resume. Raises EngineError; unless the
        server itself refused to load, no later answer is accepted.
        """
        if weights.path is None:
            raise EngineError(f"engine {self._name}: version {weights.version} has no folder")
        self._num_updates += 1
        if self._update_mode is UpdateMode.INTERRUPT:
            self._serving.clear()
        try:
            try:
                await self._pause()
                await self._change(weights.path, weights.version)
            except BaseException:
                # The first error is the one to report, whatever comes of the resume.
                with contextlib.suppress(EngineError, TimeoutError):
                    await self._resume()
                raise
            await self._resume()
        except TimeoutError:
            raise EngineError(
                f"engine {self._name} did not resume within {_RESUME_SECONDS:g} s"
            ) from None
        finally:
            self._serving.set()

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """Queue depths and tokens per second since the last call, from `/metrics`."""
        try:
            async with asyncio.timeout(_STATISTICS_SECONDS):
                text = (await self._call("GET", "/metrics")).decode(errors="replace")
        except TimeoutError:
            raise EngineError(
                f"engine {self._name} gave no /metrics within {_STATISTICS_SECONDS:g} s"
            ) from None
        return {
            self._name: EngineStatistics(
                num_running=int(_sum_metric(text, "vllm:num_requests_running")),
                num_waiting=int(_sum_metric(text, "vllm:num_requests_waiting")),
                tokens_per_second=self._rate(_sum_metric(text, "vllm:generation_tokens_total")),
            )
        }

    async def wait_ready(self, deadline_seconds: float) -> None:
        """Return once the server answers `/health` with 200. Raises EngineError at the deadline."""
        reason: EngineError | None = None
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    try:
                        await self._call("GET", "/health", num_retries=0)
                        return
                    except EngineError as error:
                        reason = error
                    await asyncio.sleep(_READY_POLL_SECONDS)
        except TimeoutError:
            raise EngineError(
                f"engine {self._name} at {self._url} was not ready within {deadline_seconds:g} s: "
                f"{reason}"
            ) from None

    async def is_ready(self) -> bool:
        """Whether the server answers `/health` with 200 now."""
        try:
            await self._call("GET", "/health", num_retries=0)
        except EngineError:
            return False
        return True

    async def aclose(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _generate_once(
        self, request: GenerateRequest, sampled: list[int], num_parts: int
    ) -> Completion:
        body = {
            "model": self._model,
            "request_id": f"{request.request_id}-{num_parts}",
            "token_ids": [*request.token_ids, *sampled],
            "sampling_params": {
                "max_tokens": request.max_tokens - len(sampled),
                "temperature": request.temperature,
                "logprobs": 0,
                "stop_token_ids": [*request.stop_token_ids],
            },
        }
        self._refuse_if_broken()
        answer = await self._call("POST", "/inference/v1/generate", body)
        self._refuse_if_broken()
        try:
            choice = msgspec.json.decode(answer, type=_Answer).choices[0]
            return _completion(choice)
        except (msgspec.MsgspecError, IndexError, ValueError) as error:
            raise EngineError(
                f"engine {self._name} gave an unusable answer to request {request.request_id}: "
                f"{error}"
            ) from error

    async def _pause(self) -> None:
        path = f"/pause?mode={_PAUSE[self._update_mode]}"
        if self._update_mode is UpdateMode.KEEP:
            path += f"&clear_cache={str(self._clear_cache).lower()}"
        await self._call("POST", path)

    async def _change(self, folder: Path, version: int) -> None:
        """Load and label, with nothing sampled in between."""
        try:
            await self._call("POST", "/collective_rpc", _reload_body(folder))
        except _Refused:
            raise  # the old weights stay, under their own label
        except BaseException as error:
            self._break(version, error)
            raise
        try:
            # Between loading and resuming: later, the first new tokens would bear the old label.
            await self._call("POST", "/update_weight_version", {"new_version": str(version)})
            if self._update_mode is not UpdateMode.KEEP:
                await self._call("POST", "/reset_prefix_cache")
        except BaseException as error:
            self._break(version, error)
            raise

    async def _resume(self) -> None:
        async with asyncio.timeout(_RESUME_SECONDS):
            await self._call("POST", "/resume")

    def _break(self, version: int, error: BaseException) -> None:
        self._broken = (
            f"engine {self._name} is out of use: loading version {version} was cut off, so nobody "
            f"knows which weights it serves ({error or type(error).__name__})"
        )

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise EngineError(self._broken)

    async def _call(
        self, method: str, path: str, body: Any = None, *, num_retries: int = _NUM_RETRIES
    ) -> bytes:
        """Send and read the whole answer. Tries again only while nothing was answered."""
        data = b"" if body is None else msgspec.json.encode(body)
        for attempt in range(num_retries + 1):
            try:
                response = await self._client().request(
                    method,
                    self._url + path,
                    data=data,
                    headers={"Content-Type": "application/json"},
                )
            except (aiohttp.ClientError, OSError) as error:
                if attempt == num_retries:
                    self._lost(path, error)
                await asyncio.sleep(_RETRY_SECONDS * 2**attempt)
                continue
            async with response:
                try:
                    answer = await response.read()
                except (aiohttp.ClientError, OSError) as error:
                    self._lost(path, error)
            if response.status != _HTTP_OK:
                raise _Refused(
                    f"engine {self._name} answered {path} with {response.status}: "
                    f"{_message(answer)}"
                )
            return answer
        raise AssertionError("unreachable")

    def _lost(self, path: str, error: Exception) -> NoReturn:
        raise TransportError(
            f"engine {self._name} at {self._url} broke off {path}: {type(error).__name__}: {error}"
        ) from error

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # One connection per request in flight; the capacity gate is what bounds them.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            )
        return self._session

    def _rate(self, count: float) -> float:
        now = asyncio.get_running_loop().time()
        last, self._last_count = self._last_count, (now, count)
        if last is None or now <= last[0] or count < last[1]:
            return 0.0
        return (count - last[1]) / (now - last[0])


def _reload_body(folder: Path) -> dict[str, Any]:
    return {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}


def _completion(choice: _Choice) -> Completion:
    """Check one answer. Raises ValueError with what is wrong."""
    num_tokens = len(choice.token_ids)
    content = choice.logprobs.content if choice.logprobs is not None else []
    if [entry.token_id for entry in content] != choice.token_ids:
        raise ValueError(f"{len(content)} log-probabilities do not belong to {num_tokens} tokens")
    logprobs = [entry.logprob for entry in content]
    finite = [value for value in logprobs if value is not None and math.isfinite(value)]
    if len(finite) != num_tokens:
        raise ValueError(f"{num_tokens - len(finite)} of {num_tokens} log-probabilities not finite")
    return Completion(
        token_ids=np.array(choice.token_ids, np.int32),
        logprobs=np.array(finite, np.float32),
        version_runs=_version_runs(choice.weight_versions or [], num_tokens),
        finish_reason=choice.finish_reason,
    )


def _version_runs(spans: Sequence[_Span], num_tokens: int) -> VersionRuns:
    position = 0
    runs = []
    for span in spans:
        if not span.version.isdecimal():
            raise ValueError(f"weight version {span.version!r} is not a number: label the weights")
        if span.start != position or span.end < span.start:
            raise ValueError(f"version span {span.start}:{span.end} does not follow {position}")
        runs.append((int(span.version), span.end - span.start))
        position = span.end
    if position != num_tokens:
        raise ValueError(f"version spans cover {position} of {num_tokens} tokens")
    return VersionRuns.of(runs)


def _join(parts: Sequence[Completion], finish_reason: FinishReason) -> Completion:
    if len(parts) == 1 and parts[0].finish_reason is finish_reason:
        return parts[0]
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        version_runs=sum((part.version_runs for part in parts), VersionRuns()),
        finish_reason=finish_reason,
    )


def _sum_metric(text: str, name: str) -> float:
    """Sum of a metric over its labels in Prometheus text; 0 when it is not there."""
    total = 0.0
    for line in text.splitlines():
        label, _, value = line.rpartition(" ")
        if label.partition("{")[0] == name:
            total += float(value)
    return total


def _message(answer: bytes) -> str:
    """The server's own words, out of one of the shapes in which it wraps them."""
    try:
        content = msgspec.json.decode(answer)
    except msgspec.MsgspecError:
        content = answer.decode(errors="replace")
    for key in ("error", "detail", "message"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return str(content)[:_MAX_MESSAGE_CHARACTERS]
