"""Client of an SGLang server.

Modes of update, all by one call that loads, labels and flushes the prefix cache:

- `keep`: pause `retract`, load, continue; running requests compute keys and values again.
- `keep` with `clear_cache` off: pause `in_place`, load without a flush, continue; running requests
  go on with the keys and values that they have.
- `interrupt`: load with `abort_all_requests` (a pause in mode abort would poll for a whole second);
  running requests end with what they have and are sent again.
- `finish`: load without a pause, which lets running requests end first.

Paused in place under the overlapping scheduler, the pass in flight is stamped with the new version
although the old weights sampled it: stamps are shifted by that token. Without a flush, requests
are kept apart from keys and values of older weights by an extra cache key per version.

A token id outside the vocabulary ends the server's process, so ids are checked here. Request ids
match by prefix when aborted, so they are of fixed form. `/health` is not asked: during a pause it
fails after 20 s and then `/ready` stays red; when `/ready` is red, one `/health` turns it green.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec

from headway.config import UpdateMode
from headway.core.rollout import Completion, FinishReason
from headway.core.versions import VersionRuns
from headway.engines.capabilities import Capabilities
from headway.engines.contract import Contract
from headway.engines.server_engine import (
    PROBE_TEMPERATURE,
    PROBE_TOKENS,
    MetricNames,
    Sent,
    ServerEngine,
    logprobs_kind,
)
from headway.engines.spans import Span, completion_of, shift_starts, version_runs
from headway.errors import EngineError, EngineRefusal, UnusableAnswer
from headway.ports import GenerateRequest

_UNLABELLED = "default"
_UPDATE = "/update_weights_from_disk"
_BAD_REQUEST = 400
_WERE_UPDATED = "weights were updated, but the cache was not flushed"
"""In the message of a refusal that is none: the weights were replaced."""
_FLUSH_SECONDS = 5
_HEALTH_SECONDS = 30.0


class _Reason(msgspec.Struct):
    type: FinishReason
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Reason
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    weight_versions: list[Span] | None = None


class _Answer(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


class _ModelInfo(msgspec.Struct):
    model_path: str = ""
    weight_version: str | None = None
    is_generation: bool = True


class _ServerInfo(msgspec.Struct):
    version: str = "of an unknown version"
    context_length: int | None = None
    dtype: str = ""
    disable_overlap_schedule: bool = False
    enable_metrics: bool = True


_ANSWER = msgspec.json.Decoder(_Answer)


class SglangEngine(ServerEngine):
    """One SGLang server; arguments as in `ServerEngine`. `contract` must say the vocabulary."""

    metric_names = MetricNames(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        tokens="sglang:generation_tokens_total",
    )
    _overlaps = True
    """Whether the scheduler runs a pass ahead; `connect` finds out."""
    _salts = False
    """Whether keys and values of older weights may still lie in the prefix cache."""

    async def is_healthy(self) -> bool:
        """Whether `/ready` is green, if need be after the one `/health` that turns it so."""
        if await self.is_ready():
            return True
        try:
            # Generates a token, and takes a second at least.
            await self._http.call("GET", "/health", deadline_seconds=_HEALTH_SECONDS, num_retries=0)
        except EngineError:
            return False
        return await self.is_ready()

    async def _ask(
        self, request: GenerateRequest, sampled: list[int], num_parts: int, sent: Sent
    ) -> Completion:
        rid = f"{request.request_id}-{num_parts:03d}"
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": [*request.token_ids, *sampled],
            "sampling_params": {
                "max_new_tokens": request.max_tokens - len(sampled),
                "temperature": request.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "stop_token_ids": [*request.stop_token_ids],
            },
            "return_logprob": True,
        }
        if self._salts:
            body["extra_key"] = str(sent.version)
        try:
            answer = await self._http.call("POST", "/generate", body, deadline_seconds=None)
        except asyncio.CancelledError:
            # The server takes seconds to notice that its sender is gone.
            self._soon(self._http.call("POST", "/abort_request", {"rid": rid}))
            raise
        try:
            return self._completion(_ANSWER.decode(answer), sent)
        except (msgspec.MsgspecError, ValueError) as error:
            raise UnusableAnswer(
                f"engine {self._name} gave an unusable answer to request {request.request_id}: "
                f"{error}"
            ) from error

    def _completion(self, answer: _Answer, sent: Sent) -> Completion:
        """Raises ValueError with what is wrong."""
        meta, num_tokens = answer.meta_info, len(answer.output_ids)
        reason = meta.finish_reason
        if reason.type is FinishReason.ABORT and reason.status_code is not None:
            raise ValueError(f"it was given up with {reason.status_code}: {reason.message}")
        content = meta.output_token_logprobs or []
        if [token_id for _, token_id, _ in content] != answer.output_ids:
            raise ValueError(
                f"{len(content)} log-probabilities do not belong to {num_tokens} tokens"
            )
        if not self._stamps_tokens and sent.version is not None:
            runs = VersionRuns.of([(sent.version, num_tokens)])
        else:
            runs = version_runs(meta.weight_versions or [], num_tokens)
        if self._keeps_in_place and self._overlaps:
            runs = shift_starts(runs)
        logprobs = [logprob for logprob, _, _ in content]
        return completion_of(answer.output_ids, logprobs, runs, reason.type)

    # --- weights ------------------------------------------------------------------------------

    @property
    def _keeps_in_place(self) -> bool:
        return self._update_mode is UpdateMode.KEEP and not self._clear_cache

    async def _load(self, folder: Path, version: int) -> None:
        loop = asyncio.get_running_loop()
        paused_at = loop.time()
        if self._update_mode is not UpdateMode.KEEP:
            await self._change(folder, version)
        else:
            try:
                mode = "in_place" if self._keeps_in_place else "retract"
                await self._http.call("POST", "/pause_generation", {"mode": mode})
                await self._change(folder, version)
            except BaseException:  # re-raised
                # The first error is the one to report, whatever comes of the resume.
                with contextlib.suppress(EngineError):
                    await self._resume()
                raise
            with self._breaking(version):
                await self._resume()
        self._pause_seconds = loop.time() - paused_at

    async def _change(self, folder: Path, version: int) -> None:
        body = {
            "model_path": str(folder),
            "weight_version": str(version),  # a number would be refused
            "flush_cache": not self._keeps_in_place,
            "abort_all_requests": self._update_mode is UpdateMode.INTERRUPT,
        }
        was_flushed = not self._keeps_in_place
        try:
            await self._http.call("POST", _UPDATE, body, deadline_seconds=None, num_retries=0)
        except EngineRefusal as error:
            if _WERE_UPDATED not in str(error).lower():
                # Refused before anything was changed, or was it? What died says nothing here.
                if error.status != _BAD_REQUEST:
                    self._break(version, error)
                raise
            was_flushed = False
            with self._breaking(version):  # the weights are new, the label that it tells is old
                await self._set_label(version)
        except BaseException as error:  # what is under way when it is cancelled may still happen
            self._break(version, error)
            raise
        self._salts = self._salts or not was_flushed
        with self._breaking(version):
            label = await self._label()
            if label != str(version):
                raise EngineError(
                    f"engine {self._name} labels its weights {label!r} after loading version "
                    f"{version}"
                )

    async def _resume(self) -> None:
        await self._http.call("POST", "/continue_generation", {})

    async def _abort_all(self) -> None:
        await self._http.call("POST", "/abort_request", {"abort_all": True})

    async def _label(self) -> str:
        label = (await self._http.get("/model_info", _ModelInfo)).weight_version
        return "" if label in (None, _UNLABELLED) else label

    async def _set_label(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._http.call("POST", "/update_weight_version", body)

    async def _check_ready(self) -> None:
        await self._http.call("GET", "/ready", num_retries=0)

    # --- discovery ----------------------------------------------------------------------------

    async def _discover(self) -> Capabilities:
        if not self._contract.vocabulary_size:
            raise EngineError(
                f"engine {self._name}: the size of the vocabulary is not known. A token id outside "
                "it would end an SGLang server, so give the folder of the initial model"
            )
        model = await self._http.get("/model_info", _ModelInfo)
        server = await self._http.get("/server_info", _ServerInfo)
        self._overlaps = not server.disable_overlap_schedule
        answer = await self._probe()
        content = answer.meta_info.output_token_logprobs or []
        engine = f"sglang {server.version}"
        return Capabilities(
            engine=engine,
            stamps_tokens=bool(answer.meta_info.weight_versions),
            logprobs=logprobs_kind([one for one, _, _ in content if one is not None]),
            logprobs_remedy="start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
            max_model_len=server.context_length,
            contract=await asyncio.to_thread(_contract, model, server, engine),
        )

    async def _probe(self) -> _Answer:
        """A few tokens at a temperature that shows which log-probabilities they come with."""
        sampling = {
            "max_new_tokens": PROBE_TOKENS,
            "temperature": PROBE_TEMPERATURE,
            "ignore_eos": True,
        }
        body = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True}
        answer = await self._http.call("POST", "/generate", body, deadline_seconds=None)
        return self._http.decode("/generate", answer, _Answer)


def _contract(model: _ModelInfo, server: _ServerInfo, engine: str) -> Contract:
    dtype = "" if server.dtype == "auto" else server.dtype
    folder = Path(model.model_path)
    if not model.model_path or not folder.is_dir():  # on another machine: only its name is known
        return Contract(engine=engine, dtype=dtype)
    return Contract.of_folder(folder, engine=engine, dtype=dtype)
