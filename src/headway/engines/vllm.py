"""Client of a vLLM server, and of the embedded engine, which speaks the same contract.

Needs vLLM started with `--enable-scale-out`, `--logprobs-mode processed_logprobs` and
`VLLM_SERVER_DEV_MODE=1`; `connect` says which of them is missing.

An update is four calls: pause, load, label, resume. The label is set between load and resume, or
the first new tokens would bear the old one. In mode keep the pause drops the prefix cache (unless
`clear_cache` is off: then new requests are kept apart from keys and values of older weights by a
salt per version); in the other modes it is reset before the resume.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.config import UpdateMode
from headway.core.rollout import Completion, FinishReason
from headway.core.versions import VersionRuns
from headway.engines.capabilities import Capabilities, Logprobs
from headway.engines.contract import Contract
from headway.engines.http import CONTROL_SECONDS
from headway.engines.server_engine import (
    PROBE_TEMPERATURE,
    PROBE_TOKENS,
    MetricNames,
    Sent,
    ServerEngine,
    logprobs_kind,
    needs,
)
from headway.engines.spans import Span, completion_of, version_runs
from headway.errors import EngineError, EngineRefusal, UnusableAnswer
from headway.ports import GenerateRequest

_PAUSE = {
    UpdateMode.KEEP: "keep",
    UpdateMode.INTERRUPT: "abort",
    UpdateMode.FINISH: "wait",
}
_GENERATE = "/inference/v1/generate"
_UNLABELLED = "default"
_EMBEDDED = "embedded"
_ONE_ALLOWED = {"allowed_token_ids": [0]}  # vLLM refuses temperatures above 2
_CERTAIN = 1e-3
"""Nats from a probability of 1."""
_DEV_MODE = "VLLM_SERVER_DEV_MODE=1 in its environment"


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float | None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: _Logprobs | None = None
    weight_versions: list[Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _WeightInfo(msgspec.Struct):
    weight_version: str = _UNLABELLED


class _Version(msgspec.Struct):
    version: str


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _ModelConfig(msgspec.Struct):
    dtype: str = ""


class _VllmConfig(msgspec.Struct):
    model_config: _ModelConfig = msgspec.field(default_factory=_ModelConfig)


class _ServerInfo(msgspec.Struct):
    vllm_config: _VllmConfig = msgspec.field(default_factory=_VllmConfig)


class _Cards(msgspec.Struct):
    data: list[_Card] = []


_ANSWER = msgspec.json.Decoder(_Answer)


class VllmEngine(ServerEngine):
    """One vLLM server, or one embedded engine; arguments as in `ServerEngine`."""

    metric_names = MetricNames(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        tokens="vllm:generation_tokens_total",
    )

    async def _ask(
        self, request: GenerateRequest, sampled: list[int], num_parts: int, sent: Sent
    ) -> Completion:
        body: dict[str, Any] = {
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
        if self._update_mode is UpdateMode.KEEP and not self._clear_cache:
            body["cache_salt"] = str(sent.version)
        answer = await self._http.call("POST", _GENERATE, body, deadline_seconds=None)
        try:
            choice = _ANSWER.decode(answer).choices[0]
            return _completion(choice, None if self._stamps_tokens else sent.version)
        except (msgspec.MsgspecError, IndexError, ValueError) as error:
            raise UnusableAnswer(
                f"engine {self._name} gave an unusable answer to request {request.request_id}: "
                f"{error}"
            ) from error

    async def _load(self, folder: Path, version: int) -> None:
        loop = asyncio.get_running_loop()
        paused_at = loop.time()
        try:
            await self._pause()
            await self._change(folder, version)
        except BaseException:  # re-raised
            # A vLLM server whose weights are half loaded dies of the first token: it stays paused
            # until an update went through. The first error is the one to report in any case.
            if self._broken is None or not self._is_vllm:
                with contextlib.suppress(EngineError):
                    await self._resume()
            raise
        with self._breaking(version):
            await self._resume()
        self._pause_seconds = loop.time() - paused_at

    @property
    def _is_vllm(self) -> bool:
        """Whether it is a vLLM server: an embedded engine keeps its weights when it refuses."""
        return self._capabilities is not None and self._capabilities.engine != _EMBEDDED

    async def _pause(self) -> None:
        path = f"/pause?mode={_PAUSE[self._update_mode]}"
        if self._update_mode is UpdateMode.KEEP:
            path += f"&clear_cache={str(self._clear_cache).lower()}"
        # Mode finish lasts as long as the longest request: the update's deadline is the only one.
        deadline = None if self._update_mode is UpdateMode.FINISH else CONTROL_SECONDS
        await self._http.call("POST", path, deadline_seconds=deadline)

    async def _change(self, folder: Path, version: int) -> None:
        """Load and label, with nothing sampled in between."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            await self._http.call("POST", "/collective_rpc", body, deadline_seconds=None)
        except EngineRefusal as error:
            if not self._is_vllm:
                raise  # the old weights stay, under their own label
            self._break(version, error)
            raise EngineError(self._broken) from error
        except BaseException as error:  # what is under way when it is cancelled may still happen
            self._break(version, error)
            raise
        with self._breaking(version):
            await self._set_label(version)
            if self._update_mode is not UpdateMode.KEEP:
                await self._http.call("POST", "/reset_prefix_cache")

    async def _resume(self) -> None:
        try:
            await self._http.call("POST", "/resume")
        except EngineRefusal as error:
            if error.status != 404:
                raise
            raise needs(error, self._name, "pausing", _DEV_MODE) from error

    async def _abort_all(self) -> None:
        await self._http.call("POST", "/abort_requests", {})

    async def _label(self) -> str:
        try:
            label = (await self._http.get("/weight_info", _WeightInfo)).weight_version
        except EngineRefusal as error:
            if error.status != 404:
                raise
            if not self._stamps_tokens:
                return ""
            raise needs(error, self._name, "labels of weights", _DEV_MODE) from error
        return "" if label == _UNLABELLED else label

    async def _set_label(self, version: int) -> None:
        try:
            await self._http.call("POST", "/update_weight_version", {"new_version": str(version)})
        except EngineRefusal as error:
            # An older server without labels does not stamp either: then the client does.
            if error.status != 404 or self._stamps_tokens:
                raise

    async def _check_ready(self) -> None:
        await self._http.call("GET", "/health", num_retries=0)

    async def _discover(self) -> Capabilities:
        try:  # the embedded engine has neither this nor the next
            version = f"vllm {(await self._http.get('/version', _Version)).version}"
        except EngineRefusal:
            version = _EMBEDDED
        cards: list[_Card] = []
        with contextlib.suppress(EngineRefusal):
            cards = (await self._http.get("/v1/models", _Cards)).data
        card = next((one for one in cards if one.id == self._model), None)
        if cards and card is None:
            raise EngineError(
                f"engine {self._name} serves {[one.id for one in cards]}, not {self._model!r}: "
                "set engine.model_name, or its --served-model-name"
            )
        is_vllm = version != _EMBEDDED
        choice = await self._probe(_ONE_ALLOWED if is_vllm else {"temperature": PROBE_TEMPERATURE})
        content = choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
        logprobs = [one.logprob for one in content if one.logprob is not None]
        return Capabilities(
            engine=version,
            stamps_tokens=bool(choice.weight_versions),
            logprobs=_kind_of_one_allowed(logprobs) if is_vllm else logprobs_kind(logprobs),
            logprobs_remedy="start it with --logprobs-mode processed_logprobs",
            max_model_len=card.max_model_len if card else None,
            contract=await asyncio.to_thread(
                _contract, card, version, await self._dtype() if is_vllm else ""
            ),
        )

    async def _dtype(self) -> str:
        """What the server computes in; empty where it does not say."""
        try:
            info = await self._http.get("/server_info?config_format=json", _ServerInfo)
        except (EngineRefusal, UnusableAnswer):  # an older server, or one with another layout
            return ""
        return info.vllm_config.model_config.dtype.removeprefix("torch.")

    async def _probe(self, shows: Mapping[str, Any]) -> _Choice:
        """A few tokens, sampled so that it shows which log-probabilities they come with."""
        sampling = {"max_tokens": PROBE_TOKENS, "logprobs": 0, "ignore_eos": True, **shows}
        body = {"model": self._model, "token_ids": [0], "sampling_params": sampling}
        try:
            answer = await self._http.call("POST", _GENERATE, body, deadline_seconds=None)
        except EngineRefusal as error:
            if error.status not in (403, 404):
                raise
            raise needs(error, self._name, _GENERATE, "--enable-scale-out") from error
        choices = self._http.decode(_GENERATE, answer, _Answer).choices
        if not choices:
            raise UnusableAnswer(f"engine {self._name} answered {_GENERATE} with no choice")
        return choices[0]


def _kind_of_one_allowed(logprobs: list[float]) -> Logprobs:
    """Before or after what shapes the distribution: the only token allowed has probability 1."""
    if not logprobs:
        return Logprobs.NONE
    return Logprobs.PROCESSED if min(logprobs) > -_CERTAIN else Logprobs.RAW


def _contract(card: _Card | None, engine: str, dtype: str) -> Contract:
    folder = Path(card.root) if card is not None and card.root else None
    if folder is None or not folder.is_dir():  # on another machine: only its name is known
        return Contract(engine=engine, dtype=dtype)
    return Contract.of_folder(folder, engine=engine, dtype=dtype)


def _completion(choice: _Choice, version: int | None) -> Completion:
    """Check one answer; `version` is the stamp where the server gives none. Raises ValueError."""
    num_tokens = len(choice.token_ids)
    content = (choice.logprobs.content if choice.logprobs is not None else None) or []
    if [entry.token_id for entry in content] != choice.token_ids:
        raise ValueError(f"{len(content)} log-probabilities do not belong to {num_tokens} tokens")
    if version is None:
        runs = version_runs(choice.weight_versions or [], num_tokens)
    else:
        runs = VersionRuns.of([(version, num_tokens)])
    logprobs = [entry.logprob for entry in content]
    return completion_of(choice.token_ids, logprobs, runs, choice.finish_reason)
