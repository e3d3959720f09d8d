"""Client of any server with OpenAI's `/v1/completions`: evaluation and frozen roles, no training.

It sends token ids, which such servers take as a prompt, but text is what comes back. Text that is
tokenized again need not be what the model sampled, and its log-probabilities would belong to other
tokens, so nothing from here may be trained on; `Capabilities.against_training` says so. The
weights stay what they are: a request for others is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from headway.core.rollout import Completion, FinishReason
from headway.core.versions import VersionRuns
from headway.engines.capabilities import Capabilities, Logprobs
from headway.engines.http import HttpClient
from headway.errors import EngineError, UnusableAnswer
from headway.ports import EngineStatistics, GenerateRequest, PublishedWeights

_PATH = "/v1/completions"


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class OpenAiEngine:
    """One server.

    Args:
        name: used in messages.
        url: such as `http://127.0.0.1:8000`, without `/v1`.
        model: the name that it serves the model by.
        encode: text to token ids, in the model's own vocabulary.
        version: what its completions are stamped with, for as long as it is used.
    """

    def __init__(
        self,
        *,
        name: str,
        url: str,
        model: str,
        encode: Callable[[str], list[int]],
        version: int = 0,
    ) -> None:
        self._name = name
        self._http = HttpClient(name=name, url=url)
        self._model = model
        self._encode = encode
        self._version = version
        self._num_running = 0
        self._capabilities: Capabilities | None = None

    @property
    def name(self) -> str:
        """Used in messages."""
        return self._name

    @property
    def capabilities(self) -> Capabilities | None:
        """Found by `connect`; None before."""
        return self._capabilities

    @property
    def pause_seconds(self) -> float:
        """There are no updates."""
        return 0.0

    async def connect(self, version: int | None) -> Capabilities:
        """Check that it serves the model. Raises EngineError."""
        cards = (await self._http.get("/v1/models", _Cards)).data
        card = next((one for one in cards if one.id == self._model), None)
        if card is None:
            raise EngineError(
                f"engine {self._name} serves {[one.id for one in cards]}, not {self._model!r}"
            )
        self._capabilities = Capabilities(
            engine="an OpenAI-compatible server",
            token_ids=False,
            stamps_tokens=False,
            keeps_requests=False,
            aborts_with_partial=False,
            loads_weights=False,
            logprobs=Logprobs.NONE,
            max_model_len=card.max_model_len,
        )
        return self._capabilities

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; its token ids are its text, encoded again, its log-probabilities
        0. `stop_token_ids` are left to the server. Raises EngineError."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.token_ids,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
        }
        self._num_running += 1
        try:
            answer = await self._http.call("POST", _PATH, body, deadline_seconds=None)
        finally:
            self._num_running -= 1
        choices = self._http.decode(_PATH, answer, _Answer).choices
        if not choices:
            raise UnusableAnswer(f"engine {self._name} answered {request.request_id} with nothing")
        token_ids = np.array(self._encode(choices[0].text), np.int32)
        is_cut = choices[0].finish_reason == "length"
        return Completion(
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            version_runs=VersionRuns.of([(self._version, len(token_ids))]),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        )

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Always refused: raises EngineError."""
        raise EngineError(
            f"engine {self._name} cannot load version {weights.version}: an OpenAI-compatible "
            "server keeps its weights; use vLLM or SGLang for the policy"
        )

    async def is_healthy(self) -> bool:
        """Whether it still lists its models."""
        try:
            await self._http.call("GET", "/v1/models", num_retries=0)
        except EngineError:
            return False
        return True

    async def lag(self) -> str | None:
        """It has no versions."""
        return None

    async def statistics(self) -> Mapping[str, EngineStatistics]:
        """Requests in flight from here; it says nothing of itself."""
        running = EngineStatistics(num_running=self._num_running, version=self._version)
        return {self._name: running}

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()
