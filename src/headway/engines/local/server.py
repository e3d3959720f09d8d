"""HTTP of the embedded engine: what vLLM's RL endpoints take and answer, and nothing more.

`POST /inference/v1/generate` takes `token_ids` and `sampling_params` (`max_tokens`, `temperature`,
`logprobs`, `stop_token_ids`, `ignore_eos`); a parameter that is not implemented is refused, never
ignored. Log-probabilities are before temperature unless `--logprobs-mode` says otherwise.
"""

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from headway.engines.local.checkpoint import CheckpointError
from headway.engines.local.service import Answer, LocalService, PauseMode, Prompt, ServiceError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_MAX_BODY_BYTES = 64 * 1024**2
_STATUS_BAD_REQUEST = 400
_CLOSE_SECONDS = 1.0


class SamplingParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`sampling_params` of a request."""

    max_tokens: int = 16
    temperature: float = 1.0
    logprobs: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    """Do not stop at the model's own end-of-sequence tokens, only at `stop_token_ids`."""


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: SamplingParameters
    model: str | None = None
    request_id: str = ""
    cache_salt: str | None = None
    """Accepted without effect: there is no prefix cache to separate."""
    stream: bool = False


class RpcArguments(msgspec.Struct, forbid_unknown_fields=True):
    """`kwargs` of `reload_weights`."""

    weights_path: str


class RpcBody(msgspec.Struct):
    """Body of `POST /collective_rpc`."""

    method: str
    kwargs: RpcArguments


class VersionBody(msgspec.Struct):
    """Body of `POST /update_weight_version`."""

    new_version: str


class AbortBody(msgspec.Struct):
    """Body of `POST /abort_requests`."""

    request_ids: list[str] | None = None


class CheckBody(msgspec.Struct):
    """Body of `POST /weight_checker`."""

    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request may ask for."""

    model_name: str
    vocabulary_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class Server:
    """The handlers. Control operations run to their end even when their sender goes away, so that
    a lost connection never leaves half of one."""

    def __init__(self, service: LocalService, limits: Limits) -> None:
        self._service = service
        self._limits = limits
        self._control: set[asyncio.Task[Any]] = set()

    def application(self) -> web.Application:
        """Routes and error handling."""
        application = web.Application(middlewares=[_errors], client_max_size=_MAX_BODY_BYTES)
        application.add_routes(
            [
                web.post("/inference/v1/generate", self.generate),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.get("/is_paused", self.is_paused),
                web.post("/collective_rpc", self.collective_rpc),
                web.post("/update_weight_version", self.update_weight_version),
                web.get("/weight_info", self.weight_info),
                web.post("/weight_checker", self.weight_checker),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                web.post("/abort_requests", self.abort_requests),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
            ]
        )
        return application

    async def generate(self, request: web.Request) -> web.Response:
        """Sample one completion."""
        body = await _decode(request, GenerateBody)
        answer = await self._service.generate(self._check(body))
        with_logprobs = body.sampling_params.logprobs is not None
        return _json({"request_id": body.request_id, "choices": [_choice(answer, with_logprobs)]})

    async def pause(self, request: web.Request) -> web.Response:
        """`?mode=keep|abort|wait`, `&clear_cache=true|false` with keep."""
        name = request.query.get("mode", PauseMode.ABORT)
        try:
            mode = PauseMode(name)
        except ValueError:
            raise ServiceError(f"mode {name!r} is none of {[*map(str, PauseMode)]}", 400) from None
        clear_cache = request.query.get("clear_cache", "true").lower()
        if clear_cache not in ("true", "false"):
            raise ServiceError(f"clear_cache must be true or false, not {clear_cache!r}", 400)
        await self._uninterrupted(self._service.pause(mode, clear_cache=clear_cache == "true"))
        return _json({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        """End a pause."""
        await self._uninterrupted(self._service.resume())
        return _json({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        """Whether requests wait for a resume."""
        return _json({"is_paused": self._service.is_paused})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        """`reload_weights` from `weights_path`; 500 when it fails, and the old weights stay."""
        body = await _decode(request, RpcBody)
        if body.method != "reload_weights":
            raise ServiceError(f"method {body.method!r} is not known, only reload_weights", 400)
        await self._uninterrupted(self._service.reload(Path(body.kwargs.weights_path)))
        return _json({"results": [None]})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """Label the tokens sampled from now on."""
        body = await _decode(request, VersionBody)
        await self._uninterrupted(self._service.set_version(body.new_version))
        return _json({"success": True, "new_version": body.new_version})

    async def weight_info(self, request: web.Request) -> web.Response:
        """The label in force."""
        return _json({"weight_version": self._service.version})

    async def weight_checker(self, request: web.Request) -> web.Response:
        """`{"action": "checksum"}`: SHA-256 per parameter."""
        body = await _decode(request, CheckBody)
        if body.action != "checksum":
            raise ServiceError(f"action {body.action!r} is not known, only checksum", 400)
        return _json({"checksums": await self._uninterrupted(self._service.checksums())})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Nothing to do: requests never share keys and values."""
        return _json({"success": True})

    async def abort_requests(self, request: web.Request) -> web.Response:
        """End requests by their `request_ids`, or all, with what they have."""
        body = await _decode(request, AbortBody) if request.can_read_body else AbortBody()
        num_aborted = await self._uninterrupted(self._service.abort(body.request_ids))
        return _json({"num_aborted": num_aborted})

    async def health(self, request: web.Request) -> web.Response:
        """200 while the generation thread lives."""
        if not self._service.is_alive:
            raise ServiceError("the generation thread is not running", 503)
        return _json({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        load = self._service.load()
        model = self._limits.model_name.replace("\\", r"\\").replace('"', r"\"")
        values = {
            "vllm:num_requests_running": ("gauge", load.num_running),
            "vllm:num_requests_waiting": ("gauge", load.num_waiting),
            "vllm:kv_cache_usage_perc": ("gauge", load.cache_usage),
            "vllm:generation_tokens_total": ("counter", load.num_tokens),
            "headway:tokens_per_second": ("gauge", load.tokens_per_second),
        }
        lines = []
        for name, (kind, value) in values.items():
            lines += [f"# TYPE {name} {kind}", f'{name}{{model_name="{model}"}} {value}']
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    async def _uninterrupted(self, operation: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.create_task(operation)
        self._control.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._control.discard(task)
        if not task.cancelled():
            task.exception()  # when the sender is gone, nobody else takes note of it

    def _check(self, body: GenerateBody) -> Prompt:
        limits, sampling = self._limits, body.sampling_params
        if body.model not in (None, limits.model_name):
            raise ServiceError(f"model {body.model!r} is not served, {limits.model_name!r} is", 404)
        if body.stream:
            raise ServiceError("stream is not implemented", 400)
        if not body.token_ids:
            raise ServiceError("token_ids is empty", 400)
        low, high = min(body.token_ids), max(body.token_ids)
        if low < 0 or high >= limits.vocabulary_size:
            raise ServiceError(
                f"token id {low if low < 0 else high} is outside the vocabulary of "
                f"{limits.vocabulary_size}",
                400,
            )
        if sampling.max_tokens < 1:
            raise ServiceError(f"max_tokens {sampling.max_tokens} must be at least 1", 400)
        if len(body.token_ids) + sampling.max_tokens > limits.max_model_len:
            raise ServiceError(
                f"prompt ({len(body.token_ids)} tokens) plus max_tokens ({sampling.max_tokens}) "
                f"is longer than the longest sequence ({limits.max_model_len})",
                400,
            )
        if not math.isfinite(sampling.temperature) or sampling.temperature < 0:
            raise ServiceError(f"temperature {sampling.temperature} must be 0 or more", 400)
        if sampling.logprobs not in (None, 0):
            raise ServiceError("logprobs must be 0: only the sampled token's is implemented", 400)
        stop = frozenset(sampling.stop_token_ids)
        return Prompt(
            client_id=body.request_id,
            token_ids=body.token_ids,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=stop if sampling.ignore_eos else stop | limits.eos_token_ids,
        )


async def serve(
    server: Server, listener: socket.socket, stop: "asyncio.Future[int]", *, name: str
) -> int:
    """Answer until `stop` has a result, which is the exit code; then close within seconds."""
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handler_cancellation=True,  # a sender that goes away frees its request
        shutdown_timeout=_CLOSE_SECONDS,
    )
    await runner.setup()
    await web.SockSite(runner, listener, backlog=1024).start()
    logger.info("serving %s on http://%s:%d", name, *listener.getsockname()[:2])
    try:
        return await stop  # no deadline: it serves until it is told to end
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * _CLOSE_SECONDS):
                await runner.cleanup()


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ServiceError as error:
        return _error(str(error), error.status)
    except CheckpointError as error:
        logger.error("the old weights stay: %s", error)
        return _error(f"{error}; the old weights stay", 500)
    except web.HTTPException as error:
        return _error(error.reason, error.status)
    except Exception as error:  # whatever else broke belongs into the answer and the log
        logger.exception("%s failed", request.path)
        return _error(f"{type(error).__name__}: {error}", 500)


async def _decode(request: web.Request, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.MsgspecError as error:
        raise ServiceError(f"body of {request.path}: {error}", _STATUS_BAD_REQUEST) from error


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), content_type="application/json", status=status
    )


def _error(message: str, status: int) -> web.Response:
    return _json({"error": {"message": message, "code": status}}, status)


def _choice(answer: Answer, with_logprobs: bool) -> dict[str, Any]:
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    content = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in pairs]
    return {
        "index": 0,
        "token_ids": answer.token_ids,
        "finish_reason": str(answer.finish_reason),
        "logprobs": {"content": content} if with_logprobs else None,
        "weight_versions": [
            {"version": version, "start": start, "end": end} for version, start, end in answer.spans
        ],
    }
