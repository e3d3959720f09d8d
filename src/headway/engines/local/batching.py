"""The generation thread: transformers' continuous batching, and what is done to it between passes.

Everything here that is marked *frozen* may be called only between `freeze` and `thaw`: then the
generation thread stands between two forward passes, and its state can be read and changed from
outside. That is what makes version stamps exact: a frozen request has sampled exactly the tokens
that the old weights gave.

Block sharing (prefix caching) is off, so keys and values computed under old weights can never
serve a new request. The price is that a second turn computes its whole prompt again.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import scheduler as cb_scheduler
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.model_runner import (
    infer_max_single_request_tokens,
)

from headway.engines.local.sampling import Sampler

_CPU_REQUESTS_PER_PASS = 48
"""Without a kernel for paged attention, the requests of a pass attend to each other's (masked) keys
and values, so a pass costs the square of their number. Measured with 0.7 M parameters on one
thread, 128 requests of 5 to 60 tokens: 2,070 tokens/s all at once, 3,500 in passes of 48."""
_SCHEDULER = "headway"
_STOP_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingSettings:
    """Sizes of the engine.

    `num_blocks` blocks of `page_size` tokens hold keys and values; `max_batch_tokens` go through
    one forward pass. `seed` of the sampling; None: a random one.
    """

    num_blocks: int
    page_size: int
    max_batch_tokens: int
    seed: int | None = None
    processed_logprobs: bool = False
    """Report log-probabilities after temperature (see `sampling`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a request sampled until it ended or was taken out.

    `error` says why the generation thread gave it up; None: it did not.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    error: str | None = None


class Batcher:
    """Owns the manager of transformers' continuous batching and its thread.

    Args:
        model: a causal LM in eval mode, on its device.
        settings: sizes.
        on_outputs: called **in the generation thread** with the requests that a pass ended.
        on_death: called in a thread of its own when the generation thread ended unbidden.
    """

    def __init__(
        self,
        model: Any,
        settings: BatchingSettings,
        *,
        on_outputs: Callable[[list[Output]], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._model = model
        self._settings = settings
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._pause: Any = None
        self._sampler = Sampler(processed=settings.processed_logprobs)
        self._manager: Any = None
        self._is_stopping = False

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since the start, discarded ones included."""
        return self._sampler.num_sampled

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt plus completion that the key/value cache can hold."""
        return int(infer_max_single_request_tokens(self._manager.batch_processor.cache))

    @property
    def is_alive(self) -> bool:
        """Whether the generation thread runs (a frozen one does)."""
        return self._manager is not None and bool(self._manager.is_running())

    def queue_depths(self) -> tuple[int, int]:
        """Requests `(in passes, waiting for their first)`; a glance, exact only when frozen."""
        manager = self._manager
        scheduler = manager.batch_processor.scheduler
        waiting = len(scheduler.waiting_requests) + manager.input_queue.qsize()
        return len(scheduler.active_requests), waiting

    def cache_usage(self) -> float:
        """Share of the key/value cache in use, 0 to 1; a glance, exact only when frozen."""
        return 1.0 - float(self._manager.batch_processor.cache.compute_free_capacity())

    def start(self) -> None:
        """Start the generation thread, or a new one after the last died. What the model cannot
        do raises ValueError (attention), what does not fit MemoryError."""
        self._manager = self._make_manager()
        self._manager.start()
        watcher = threading.Thread(
            target=self._watch, args=(self._manager,), name="generation watcher", daemon=True
        )
        watcher.start()

    def stop(self) -> None:
        """End the generation thread within a short time; its requests get no output."""
        self._is_stopping = True
        if self._pause is not None:
            self.thaw()
        if self.is_alive:
            self._manager.stop(block=True, timeout=_STOP_SECONDS, hard_stop=True)

    def add(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_token_ids: frozenset[int],
    ) -> None:
        """Queue a request; `request_id` must never come twice."""
        added = self._manager.add_request(
            token_ids,
            request_id=request_id,
            max_new_tokens=max_tokens,
            eos_token_id=sorted(stop_token_ids),
            temperature=temperature,
        )
        if added is None:
            raise RuntimeError("the generation thread does not take requests")

    def cancel(self, request_id: str) -> None:
        """Free what a request holds, after the running pass at the latest; no output follows,
        unless it ended in that pass."""
        self._manager.cancel_request(request_id)

    def freeze(self) -> None:
        """Return once the generation thread stands between two passes. Blocks for one pass.

        `freeze` and `thaw` must be called from the same thread. Raises RuntimeError when the
        generation thread is dead.
        """
        pause = self._manager.pause()
        pause.__enter__()
        self._pause = pause

    def thaw(self) -> None:
        """Let generation go on. *Frozen.*"""
        pause, self._pause = self._pause, None
        pause.__exit__(None, None, None)

    def num_tokens_sampled(self) -> dict[str, int]:
        """Tokens that each request has so far; those not named have none. *Frozen.*"""
        return {state.request_id: len(_sampled(state)) for state in self._states()}

    def take(self, request_ids: Iterable[str]) -> list[Output]:
        """Take requests out and return what they have sampled so far, in this order. *Frozen.*"""
        scheduler = self._manager.batch_processor.scheduler
        states = {state.request_id: state for state in self._states()}
        outputs = []
        for request_id in request_ids:
            state = states.get(request_id)
            if state is None:  # still on its way to the scheduler: it has sampled nothing
                self.cancel(request_id)
                outputs.append(Output(request_id=request_id, token_ids=[], logprobs=[]))
                continue
            outputs.append(
                Output(request_id=request_id, token_ids=_sampled(state), logprobs=[*state.logprobs])
            )
            scheduler.set_request_cancellation(request_id)
        scheduler.clear_cancelled_requests()
        return outputs

    def recompute(self) -> None:
        """Drop the keys and values of all requests; they compute them again, from prompt and
        sampled tokens, before they sample their next one. *Frozen.*"""
        scheduler = self._manager.batch_processor.scheduler
        active = list(scheduler.active_requests.values())
        for state in active:
            scheduler.finish_request(state.request_id)
            scheduler.add_waiting_request(state.create_equivalent_initial_request())
        # They were running, so they go before those that were not.
        scheduler.waiting_requests_order.rotate(len(active))

    def _states(self) -> list[Any]:
        scheduler = self._manager.batch_processor.scheduler
        return [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]

    def _make_manager(self) -> Any:
        settings = self._settings
        on_cpu = self._model.device.type == "cpu"
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=True, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                return_logprobs=True,
                num_blocks=settings.num_blocks,
                page_size=settings.page_size,
                max_batch_tokens=settings.max_batch_tokens,
                max_requests_per_batch=_CPU_REQUESTS_PER_PASS if on_cpu else None,
                allow_block_sharing=False,
                auto_switch_to_flash=not on_cpu,
                # One pass ahead of the host, a request's tokens would not be exact at a freeze.
                use_async_batching=False,
                scheduler_type=_SCHEDULER,
                seed=settings.seed,
            ),
        )
        processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([self._sampler]))
        processors.tensors_required = 1
        manager.logit_processor = processors
        manager.output_router = _Router(self._on_outputs)
        with torch.no_grad():
            manager.warmup()  # makes the batch processor
        manager.batch_processor.model_runner._sample = self._sampler.sample
        return manager

    def _watch(self, manager: Any) -> None:
        # No deadline: the generation thread lives as long as the engine. The manager's own `join`
        # forgets the thread, and must not be called twice.
        manager._generation_thread.join()
        if not self._is_stopping:
            self._on_death(repr(manager.background_thread_status.fatal_error))


class _Router(OutputRouter):  # type: ignore[misc]  # untyped base
    """Hands all outputs of a pass over in one call, instead of one queue per request.

    Outputs of requests that nobody waits for any more end here too, so they must not pile up.
    """

    def __init__(self, on_outputs: Callable[[list[Output]], None]) -> None:
        super().__init__()
        self._on_outputs = on_outputs

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        self._on_outputs(
            [
                Output(
                    request_id=output.request_id,
                    token_ids=output.generated_tokens,
                    logprobs=output.logprobs,
                    error=output.error,
                )
                for output in outputs
            ]
        )


class _Scheduler(cb_scheduler.FIFOScheduler):  # type: ignore[misc]  # untyped base
    """First in, first out, without a stall.

    When the cache runs full, the base admits nothing until a request ends by itself; when all
    running ones are cancelled or taken out instead, it would wait for ever.
    """

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        if not self.active_requests:
            self.block_new_requests = False
        return super().schedule_batch(token_budget, cache_budget)


cb_scheduler.SCHEDULER_MAPPING[_SCHEDULER] = _Scheduler


def _sampled(state: Any) -> list[int]:
    """Tokens that a request has sampled; after a recomputation the first of them are in its
    prompt."""
    moved = state.initial_tokens[state._true_initial_tokens :] if state._true_initial_tokens else []
    return [*moved, *state.generated_tokens]
