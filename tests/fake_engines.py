"""Protocol-exact fakes of vLLM and SGLang on real sockets, and a proxy that breaks what passes.

A fake samples tokens that say which weights sampled them (`truth_token`), whatever its labels say,
so that a wrong stamp shows. Its weights are a number, read off the name of the folder (`v000013`).
The proxy stands in front of any engine, real ones too, and does to the next calls of a path what a
script says.
"""

import asyncio
import contextlib
import json
import math
import re
import zlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from headway.weights.canary import CANARY, Canary, Probe, canary_sequences, prompt_lengths

FIRST_TOKEN = 10
VOCABULARY = 48
_FLAT = -math.log(VOCABULARY)
_HUGE_TEMPERATURE = 1e5

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def truth_token(weights: int) -> int:
    """The token that these weights sample, always."""
    return FIRST_TOKEN + weights


def truth_logprob(weights: int, prompt: list[int], position: int = 0) -> float:
    """Of the token at `position` after `prompt`."""
    seed = zlib.crc32(json.dumps([weights, prompt, position]).encode())
    return -0.1 - (seed % 1000) / 1000


def weights_folder(directory: Path, version: int, *, canary_of: int | None = None) -> Path:
    """A folder that a fake can load, with the canary of these weights, or of others."""
    folder = directory / f"v{version:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    weights = version if canary_of is None else canary_of
    probes = []
    for sequence in canary_sequences(VOCABULARY):
        for length in prompt_lengths(sequence):
            prompt = sequence[:length]
            top = {truth_token(weights): truth_logprob(weights, prompt)}
            probes.append(Probe(token_ids=tuple(prompt), top=top))
    (folder / CANARY).write_text(Canary(version=version, probes=tuple(probes)).to_json())
    return folder


@dataclass(eq=False)
class Running:
    """A request as a fake holds it."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    salt: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    is_aborted: bool = False


@dataclass
class FakeEngine:
    """What both fakes are inside: one pass samples a token for every request, unless paused.

    `token_seconds`: of one pass. `stale_cache`: resets of the prefix cache do nothing.
    `keeps_weights`: loading does nothing, but answers as if it had. `raw_logprobs`: before
    temperature. `stamps`: version spans are in the answers. `dtype`: what it says it computes in.
    """

    token_seconds: float = 0.002
    weights: int = 0
    label: str = "default"
    stale_cache: bool = False
    keeps_weights: bool = False
    raw_logprobs: bool = False
    stamps: bool = True
    dtype: str | None = "float32"
    calls: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: set[Running] = field(default_factory=set)
    num_held: int = 0
    num_sampled: int = 0
    unpaused: asyncio.Event = field(default_factory=asyncio.Event)
    cache: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unpaused.set()

    async def sample(self, running: Running) -> Running:
        """Run a request to its end or to its abort."""
        self.num_held += 1
        await self.unpaused.wait()
        self.num_held -= 1
        self.running.add(running)
        try:
            key = (running.salt, tuple(running.prompt))
            first = self.cache.setdefault(key, self.weights)
            while len(running.tokens) < running.max_tokens and not running.is_aborted:
                await asyncio.sleep(self.token_seconds)
                if running.is_aborted or not self.unpaused.is_set():
                    await self.until_going_on(running)
                    continue
                weights = self.weights if running.tokens else first
                self.sample_token(running, weights)
        finally:
            self.running.discard(running)
        return running

    def sample_token(self, running: Running, weights: int) -> None:
        self.num_sampled += 1
        is_flat = running.temperature > _HUGE_TEMPERATURE and not self.raw_logprobs
        position = len(running.tokens)
        logprob = _FLAT if is_flat else truth_logprob(weights, running.prompt, position)
        running.tokens.append(truth_token(weights))
        running.logprobs.append(logprob)
        running.labels.append(self.label)

    async def until_going_on(self, running: Running) -> None:
        while not self.unpaused.is_set() and not running.is_aborted:  # noqa: ASYNC110
            await asyncio.sleep(self.token_seconds)

    async def drain(self) -> None:
        while self.running:  # noqa: ASYNC110
            await asyncio.sleep(self.token_seconds)

    def abort(self, is_wanted: Callable[[str], bool] = lambda _: True) -> None:
        for running in self.running:
            if is_wanted(running.request_id):
                running.is_aborted = True

    def load(self, folder: str) -> bool:
        """Returns whether there was something to load."""
        match = re.fullmatch(r"v(\d+)", Path(folder).name)
        if match is None or not Path(folder).is_dir():
            return False
        if not self.keeps_weights:
            self.weights = int(match[1])
        return True

    def flush(self) -> None:
        if not self.stale_cache:
            self.cache.clear()

    def restart(self) -> None:
        """As a process that died and was started on the initial model."""
        self.weights, self.label = 0, "default"
        self.cache.clear()
        self.running.clear()
        self.unpaused.set()

    def application(self) -> web.Application:
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{path:.*}", self.handle)
        return application

    async def handle(self, message: web.Request) -> web.StreamResponse:
        self.calls.append(message.path_qs)
        body = await message.json() if message.can_read_body and message.content_length else {}
        return await self.answer(message, body)

    async def answer(self, message: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        raise NotImplementedError

    def spans(self, running: Running) -> list[dict[str, Any]] | None:
        if not self.stamps:
            return None
        spans: list[dict[str, Any]] = []
        for position, label in enumerate(running.labels):
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = position + 1
            else:
                spans.append({"version": label, "start": position, "end": position + 1})
        return spans


class FakeVllm(FakeEngine):
    """As vLLM 0.32 with dev mode and scale-out answers."""

    disabled: tuple[str, ...] = ()
    model: str = "policy"
    is_half_loaded: bool = False
    """After a load that failed: the next token would end it."""

    async def answer(self, message: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if message.path in self.disabled:
            status = 403 if message.path == "/inference/v1/generate" else 404
            return web.json_response({"detail": "Not Found"}, status=status)
        match message.path:
            case "/inference/v1/generate":
                return await self.generate(body)
            case "/pause":
                return await self.pause(message.query)
            case "/resume":
                self.unpaused.set()
            case "/collective_rpc":
                folder = body["kwargs"]["weights_path"]
                self.is_half_loaded = not self.load(folder)
                if self.is_half_loaded:
                    return web.json_response({"error": {"message": "no such dir"}}, status=500)
            case "/update_weight_version":
                assert isinstance(body["new_version"], str)
                self.label = body["new_version"]
            case "/weight_info":
                return web.json_response({"weight_version": self.label})
            case "/reset_prefix_cache":
                self.flush()
            case "/abort_requests":
                self.abort()
            case "/version":
                return web.json_response({"version": "0.32.0"})
            case "/server_info":
                dtype = self.dtype and f"torch.{self.dtype}"
                return web.json_response({"vllm_config": {"model_config": {"dtype": dtype}}})
            case "/v1/models":
                card = {"id": self.model, "root": "/nowhere", "max_model_len": 1024}
                return web.json_response({"object": "list", "data": [card]})
            case "/metrics":
                return web.Response(text=self.metrics())
            case "/health":
                pass
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({})

    async def generate(self, body: dict[str, Any]) -> web.StreamResponse:
        self.bodies.append(body)
        sampling = body["sampling_params"]
        if sampling.get("temperature", 1.0) > 2:
            message = "temperature must be in [0, 2]"
            return web.json_response({"error": {"message": message}}, status=400)
        if allowed := sampling.get("allowed_token_ids"):
            return self.sample_allowed(allowed[0], sampling["max_tokens"])
        running = await self.sample(
            Running(
                request_id=body.get("request_id", ""),
                prompt=body["token_ids"],
                max_tokens=sampling["max_tokens"],
                temperature=sampling.get("temperature", 1.0),
                salt=body.get("cache_salt", ""),
            )
        )
        pairs = zip(running.tokens, running.logprobs, strict=True)
        content = [{"token_id": t, "logprob": logprob, "rank": 1} for t, logprob in pairs]
        choice = {
            "index": 0,
            "token_ids": running.tokens,
            "finish_reason": "abort" if running.is_aborted else "length",
            "logprobs": {"content": content},
            "weight_versions": self.spans(running),
        }
        return web.json_response({"request_id": running.request_id, "choices": [choice]})

    def sample_token(self, running: Running, weights: int) -> None:
        assert not self.is_half_loaded, "sampled from weights that are half loaded"
        super().sample_token(running, weights)

    def sample_allowed(self, token: int, count: int) -> web.StreamResponse:
        """The only token that is allowed is certain, after processing."""
        logprob = truth_logprob(self.weights, [token]) if self.raw_logprobs else 0.0
        spans = [{"version": self.label, "start": 0, "end": count}] if self.stamps else None
        choice = {
            "token_ids": [token] * count,
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": token, "logprob": logprob}] * count},
            "weight_versions": spans,
        }
        return web.json_response({"choices": [choice]})

    async def pause(self, query: Any) -> web.StreamResponse:
        self.unpaused.clear()
        match query["mode"]:
            case "abort":
                self.abort()
                await self.drain()
            case "wait":
                # Held requests stay held; those that run go on to their end.
                self.unpaused.set()
                await self.drain()
                self.unpaused.clear()
            case "keep":
                if query["clear_cache"] == "true":
                    self.flush()
        return web.json_response({"status": "paused"})

    def metrics(self) -> str:
        return (
            f'vllm:num_requests_running{{engine="0"}} {len(self.running)}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {self.num_held}\n'
            f'vllm:generation_tokens_total{{engine="0"}} {self.num_sampled}\n'
        )


class FakeSglang(FakeEngine):
    """As SGLang 0.5.23 answers. A pass runs ahead of the host: paused in place, its token is
    stamped with the next label (`overlaps`). A token id outside the vocabulary ends it."""

    overlaps: bool = True
    told_label: str = "default"
    is_dead: bool = False
    is_unhealthy: bool = False
    pause_mode: str = ""

    def restart(self) -> None:
        super().restart()
        self.told_label = "default"

    async def answer(self, message: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.is_dead:
            assert message.transport is not None
            message.transport.abort()
            raise web.HTTPInternalServerError
        match message.path:
            case "/generate":
                return await self.generate(message, body)
            case "/pause_generation":
                return await self.pause(body)
            case "/continue_generation":
                self.unpaused.set()
            case "/update_weights_from_disk":
                return await self.update(body)
            case "/update_weight_version":
                if body.get("abort_all_requests", True):
                    self.abort()
                self.label = self.told_label = body["new_version"]
            case "/model_info":
                return web.json_response(
                    {"model_path": "/nowhere", "weight_version": self.told_label}
                )
            case "/server_info":
                return web.json_response(
                    {
                        "version": "0.5.23",
                        "context_length": 1024,
                        "dtype": self.dtype or "auto",
                        "disable_overlap_schedule": not self.overlaps,
                    }
                )
            case "/abort_request":
                if body.get("abort_all"):
                    self.abort()
                elif any(one.request_id == body["rid"] for one in self.running):
                    self.abort(lambda rid: rid.startswith(body["rid"]))
                return web.Response()
            case "/ready":
                is_ready = self.unpaused.is_set() and not self.is_unhealthy
                return web.Response(status=200 if is_ready else 503)
            case "/health":
                if not self.unpaused.is_set():
                    self.is_unhealthy = True
                    return web.Response(status=503)
                self.is_unhealthy = False
                return web.Response()
            case "/metrics":
                return web.Response(text=self.metrics())
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"success": True, "status": "ok"})

    async def generate(self, message: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.bodies.append(body)
        sampling = body["sampling_params"]
        if not all(0 <= token < VOCABULARY for token in body["input_ids"]):
            self.is_dead = True
            return await self.answer(message, body)
        running = await self.sample(
            Running(
                request_id=body.get("rid", ""),
                prompt=body["input_ids"],
                max_tokens=sampling["max_new_tokens"],
                temperature=sampling["temperature"],
                salt=body.get("extra_key") or "",
            )
        )
        kind = "abort" if running.is_aborted else "length"
        pairs = zip(running.logprobs, running.tokens, strict=True)
        meta = {
            "id": running.request_id,
            "finish_reason": {"type": kind, "status_code": None},
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            "weight_version": self.label,
            "weight_versions": self.spans(running),
        }
        return web.json_response({"text": "", "output_ids": running.tokens, "meta_info": meta})

    async def pause(self, body: dict[str, Any]) -> web.StreamResponse:
        self.pause_mode = body.get("mode", "abort")
        self.unpaused.clear()
        if self.pause_mode == "abort":
            self.abort()
            await self.drain()
        return web.json_response({"status": "ok"})

    async def update(self, body: dict[str, Any]) -> web.StreamResponse:
        is_paused = not self.unpaused.is_set()
        if body.get("abort_all_requests"):
            self.abort()
        if not is_paused:
            await self.drain()
        old = self.weights
        if not self.load(body["model_path"]):
            message = "Failed to get weights iterator: Cannot find any model weights"
            return web.json_response({"success": False, "message": message}, status=400)
        version = body.get("weight_version")
        assert version is None or isinstance(version, str)
        if version is not None:
            self.label = version
        if self.pause_mode == "in_place" and self.overlaps:
            # The pass that was in flight at the pause ends only now.
            for running in self.running:
                if running.tokens and len(running.tokens) < running.max_tokens:
                    self.sample_token(running, old)
        if body.get("flush_cache", True):
            if self.running and self.pause_mode == "in_place":
                message = (
                    "Weights were updated, but the cache was not flushed because requests are "
                    "still running or queued."
                )
                return web.json_response({"success": False, "message": message}, status=400)
            self.flush()
        if version is not None:
            self.told_label = version
        return web.json_response({"success": True, "message": "Succeeded"})

    def metrics(self) -> str:
        return (
            f'sglang:num_running_reqs{{tp_rank="0"}} {len(self.running)}\n'
            f'sglang:num_queue_reqs{{tp_rank="0"}} {self.num_held}\n'
            f'sglang:generation_tokens_total{{tp_rank="0"}} {self.num_sampled}\n'
        )


Change = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one call.

    `delay`: seconds before anything. `kind`: `reset` before the answer, `cut` in the middle of its
    body, `status` instead of it, `hang`, `garbage` (half the JSON, whole as HTTP), `change` (of the
    parsed answer).
    """

    kind: str = ""
    delay: float = 0.0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    change: Change | None = None


class FaultProxy:
    """In front of an engine: `script[path]` are the faults of the next calls there, in order, and
    `always[path]` those of all after them."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.script: dict[str, deque[Fault]] = defaultdict(deque)
        self.always: dict[str, Fault] = {}
        self.calls: list[str] = []
        self._session: aiohttp.ClientSession | None = None

    def clear(self) -> None:
        self.script.clear()
        self.always.clear()
        self.calls.clear()

    def application(self) -> web.Application:
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{path:.*}", self.handle)
        application.cleanup_ctx.append(self._open)
        return application

    async def _open(self, application: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            yield

    async def handle(self, message: web.Request) -> web.StreamResponse:
        self.calls.append(message.path_qs)
        scripted = self.script[message.path]
        fault = scripted.popleft() if scripted else self.always.get(message.path, Fault())
        assert message.transport is not None
        await asyncio.sleep(fault.delay)
        if fault.kind == "hang":
            await asyncio.sleep(600)
        if fault.kind == "reset":
            message.transport.abort()
            raise web.HTTPInternalServerError
        if fault.kind == "status":
            return web.json_response(
                {"error": {"message": "injected"}}, status=fault.status, headers=fault.headers
            )
        status, body = await self.forward(message)
        if fault.kind == "cut":
            response = web.StreamResponse(status=status, headers={"Content-Length": str(len(body))})
            await response.prepare(message)
            await response.write(body[: len(body) // 2])
            message.transport.abort()
            return response
        if fault.kind == "garbage":
            body = body[: len(body) // 2]
        if fault.kind == "change" and status == 200:
            assert fault.change is not None
            content = json.loads(body)
            fault.change(content)
            body = json.dumps(content).encode()
        return web.Response(status=status, body=body)

    async def forward(self, message: web.Request) -> tuple[int, bytes]:
        assert self._session is not None
        async with self._session.request(
            message.method,
            self.target + message.path_qs,
            data=await message.read(),
            headers={"Content-Type": "application/json"},
        ) as response:
            return response.status, await response.read()


@contextlib.asynccontextmanager
async def serving(application: web.Application, port: int = 0) -> AsyncIterator[str]:
    """Serve on a free port of this machine, or on this one; yields the URL."""
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        host, bound = runner.addresses[0][:2]
        yield f"http://{host}:{bound}"
    finally:
        await runner.cleanup()
