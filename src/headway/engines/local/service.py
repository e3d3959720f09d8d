"""Requests, pauses and version stamps of the embedded engine; everything runs on the event loop.

The protocol of a weight change, driven from outside: `pause` freezes generation between two forward
passes, `reload` changes the weights, `set_version` stamps, `resume` goes on. The stamp of a token
is the label that was in force when it was sampled; a label that is set while generation is frozen
starts a new span exactly at the next token of every running request.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from headway.core.rollout import FinishReason
from headway.engines.local.batching import Batcher, BatchingSettings, Output
from headway.engines.local.checkpoint import apply_checkpoint, checksums, read_checkpoint

logger = logging.getLogger(__name__)

MAX_REQUESTS = 16_384
"""Requests held at once, running and waiting; more are refused."""
_MAX_DEATHS = 3
_DEATH_WINDOW_SECONDS = 60.0
_RATE_SECONDS = 0.5


class PauseMode(StrEnum):
    """What a pause does to running requests."""

    KEEP = "keep"
    """They freeze, and go on at the resume."""
    ABORT = "abort"
    """They end at once with what they have."""
    WAIT = "wait"
    """They run to their end first."""


class ServiceError(Exception):
    """A request that cannot be served; `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A checked request. `client_id` is the sender's name for it, used to abort it."""

    client_id: str
    token_ids: list[int]
    max_tokens: int
    temperature: float
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request sampled. `spans` `(version, start, end)` cover the tokens in order;
    `logprobs` as `sampling` says."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]
    finish_reason: FinishReason


@dataclass(slots=True, kw_only=True)
class _Running:
    prompt: Prompt
    answer: "asyncio.Future[Answer]"
    starts: list[tuple[int, str]]
    """`(first token, version)` of every span so far."""


@dataclass(slots=True)
class _Rate:
    """Tokens per second between two looks that are at least `_RATE_SECONDS` apart."""

    at: float
    count: int = 0
    value: float = 0.0

    def update(self, now: float, count: int) -> float:
        if now - self.at >= _RATE_SECONDS:
            self.value = (count - self.count) / (now - self.at)
            self.at, self.count = now, count
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the engine is."""

    num_running: int
    num_waiting: int
    num_tokens: int
    tokens_per_second: float
    cache_usage: float


@dataclass(slots=True)
class _Deaths:
    """When the generation thread died lately."""

    at: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_DEATHS))

    def too_many(self, now: float) -> bool:
        self.at.append(now)
        return len(self.at) == _MAX_DEATHS and now - self.at[0] < _DEATH_WINDOW_SECONDS


class LocalService:
    """One model behind one generation thread.

    Args:
        model: a causal LM in eval mode, on its device.
        settings: sizes of the batching.
        version: label of the weights that the model has.
        on_fatal: called when the generation thread keeps dying; the process should end.
    """

    def __init__(
        self,
        model: Any,
        settings: BatchingSettings,
        *,
        version: str,
        on_fatal: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._model = model
        self._version = version
        self._on_fatal = on_fatal
        self._requests: dict[str, _Running] = {}
        self._num_admitted = 0
        self._num_held = 0
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_frozen = False
        # One control operation at a time, in one thread: a pause must be released by its maker.
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="control")
        self._deaths = _Deaths()
        self._rate = _Rate(self._loop.time())
        self._batcher = Batcher(
            model,
            settings,
            on_outputs=lambda outputs: self._soon(self._finish, outputs),
            on_death=lambda reason: self._soon(self._restart, reason),
        )
        self._batcher.start()

    @property
    def version(self) -> str:
        """The label in force."""
        return self._version

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for a resume."""
        return not self._admitting.is_set()

    @property
    def is_alive(self) -> bool:
        """Whether the generation thread runs or stands in a pause."""
        return self._batcher.is_alive

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt plus completion that fits the key/value cache."""
        return self._batcher.max_request_tokens

    def load(self) -> Load:
        """Queue depths and rates, at a glance."""
        running, waiting = self._batcher.queue_depths()
        num_tokens = self._batcher.num_sampled
        return Load(
            num_running=running,
            num_waiting=waiting + self._num_held,
            num_tokens=num_tokens,
            tokens_per_second=self._rate.update(self._loop.time(), num_tokens),
            cache_usage=self._batcher.cache_usage(),
        )

    async def generate(self, prompt: Prompt) -> Answer:
        """Sample one completion; when cancelled, the request is freed.

        During a pause it waits for the resume, without a deadline: the sender has one, and its
        disconnect ends the wait. Raises ServiceError.
        """
        if len(self._requests) + self._num_held >= MAX_REQUESTS:
            raise ServiceError(f"{MAX_REQUESTS} requests are held already", 503)
        self._num_held += 1
        try:
            await self._admitting.wait()
        finally:
            self._num_held -= 1
        # No await from here to the entry: the label read is the one that the first token gets.
        request_id = str(self._num_admitted)
        self._num_admitted += 1
        running = _Running(
            prompt=prompt, answer=self._loop.create_future(), starts=[(0, self._version)]
        )
        try:
            self._batcher.add(
                request_id,
                prompt.token_ids,
                max_tokens=prompt.max_tokens,
                temperature=prompt.temperature,
                stop_token_ids=prompt.stop_token_ids,
            )
        except RuntimeError as error:
            raise ServiceError(f"{error}; it is being restarted", 503) from error
        self._requests[request_id] = running
        self._idle.clear()
        try:
            return await running.answer
        except asyncio.CancelledError:
            if self._drop(request_id) is not None:
                self._batcher.cancel(request_id)
            raise

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        """Stop generation between two forward passes and hold new requests until `resume`.

        `clear_cache` (mode keep): running requests compute their keys and values again under
        whatever weights they resume with; otherwise they keep those of the old weights. Mode wait
        returns when the running requests have ended, which they do by their own token limits.
        Pausing twice is pausing once. Raises ServiceError.
        """
        self._admitting.clear()
        while mode is PauseMode.WAIT and self._requests:
            await self._idle.wait()
            if not self.is_paused:
                raise ServiceError("resumed while the pause waited for running requests", 409)
        async with self._lock:
            if not self._is_frozen:
                await self._in_thread(self._batcher.freeze)
                self._is_frozen = True
            if mode is PauseMode.ABORT:
                self._abort([*self._requests])
            elif mode is PauseMode.KEEP and clear_cache:
                self._batcher.recompute()

    async def resume(self) -> None:
        """Go on; harmless when nothing is paused."""
        async with self._lock:
            if self._is_frozen:
                self._is_frozen = False
                await self._in_thread(self._batcher.thaw)
            self._admitting.set()
            self._idle.set()
            if self._requests:
                self._idle.clear()

    async def reload(self, folder: Path) -> None:
        """Replace the weights between two forward passes. Raises CheckpointError; then the old
        weights stay."""
        async with self._frozen():
            # Read inside the pause too: transformers sets process-wide defaults while it loads.
            tensors = await self._in_thread(read_checkpoint, self._model, folder)
            await self._in_thread(apply_checkpoint, self._model, tensors)
        logger.info("loaded %s", folder)

    async def set_version(self, version: str) -> None:
        """Stamp every token sampled from now on with this label."""
        async with self._frozen():
            self._version = version
            sampled = self._batcher.num_tokens_sampled()
            for request_id, running in self._requests.items():
                start = sampled.get(request_id, 0)
                if running.starts[-1][0] == start:
                    running.starts.pop()  # no token bears the last label
                running.starts.append((start, version))
        logger.info("serving version %s", version)

    async def abort(self, client_ids: Iterable[str] | None) -> int:
        """End these requests (None: all) at once with what they have; returns how many."""
        wanted = None if client_ids is None else set(client_ids)
        async with self._frozen():
            return self._abort(
                [
                    request_id
                    for request_id, running in self._requests.items()
                    if wanted is None or running.prompt.client_id in wanted
                ]
            )

    async def checksums(self) -> dict[str, str]:
        """SHA-256 per parameter."""
        async with self._frozen():
            found: dict[str, str] = await self._in_thread(checksums, self._model)
            return found

    async def aclose(self) -> None:
        """Stop the generation thread; requests that wait are cancelled by their handlers."""
        await self._in_thread(self._batcher.stop)
        self._thread.shutdown(wait=False)

    @asynccontextmanager
    async def _frozen(self) -> AsyncIterator[None]:
        """One control operation on frozen generation, paused or not."""
        async with self._lock:
            if self._is_frozen:
                yield
                return
            await self._in_thread(self._batcher.freeze)
            try:
                yield
            finally:
                await self._in_thread(self._batcher.thaw)

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await self._loop.run_in_executor(self._thread, work, *arguments)
        except RuntimeError as error:  # from the manager: its thread died
            raise ServiceError(f"the generation thread is not running: {error}") from error

    def _soon(self, work: Callable[[Any], None], argument: Any) -> None:
        """From any thread. A pass's outputs arrive before the freeze that follows the pass."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work, argument)

    def _drop(self, request_id: str) -> _Running | None:
        running = self._requests.pop(request_id, None)
        if not self._requests:
            self._idle.set()
        return running

    def _finish(self, outputs: list[Output]) -> None:
        for output in outputs:
            running = self._drop(output.request_id)
            if running is None or running.answer.done():
                continue
            if output.error is not None:
                running.answer.set_exception(ServiceError(f"generation failed: {output.error}"))
                continue
            stopped = output.token_ids[-1] in running.prompt.stop_token_ids
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            running.answer.set_result(_answer(running, output, reason))

    def _abort(self, request_ids: list[str]) -> int:
        for output in self._batcher.take(request_ids):
            running = self._drop(output.request_id)
            if running is not None and not running.answer.done():
                running.answer.set_result(_answer(running, output, FinishReason.ABORT))
        return len(request_ids)

    def _restart(self, reason: str) -> None:
        """The generation thread died: fail what it ran, and start another, a few times."""
        logger.error("the generation thread died: %s", reason)
        for request_id in [*self._requests]:
            running = self._drop(request_id)
            if running is not None and not running.answer.done():
                error = ServiceError(f"the generation thread died: {reason}")
                running.answer.set_exception(error)
        if self._deaths.too_many(self._loop.time()):
            self._on_fatal(f"the generation thread died {_MAX_DEATHS} times; last: {reason}")
            return
        self._batcher.start()
        logger.warning("restarted the generation thread")


def _answer(running: _Running, output: Output, reason: FinishReason) -> Answer:
    num_tokens = len(output.token_ids)
    ends = [*(start for start, _ in running.starts[1:]), num_tokens]
    return Answer(
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        spans=[
            (version, start, end)
            for (start, version), end in zip(running.starts, ends, strict=True)
            if end > start
        ],
        finish_reason=reason,
    )
