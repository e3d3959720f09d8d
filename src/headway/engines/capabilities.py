"""What an engine turned out to be able to do, and what is lost where it cannot."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from headway.config import UpdateMode
from headway.engines.contract import Contract
from headway.ports import Engine


class Logprobs(StrEnum):
    """Which log-probabilities an engine reports."""

    PROCESSED = "processed"
    """Of the distribution that was sampled from: after temperature."""
    RAW = "raw"
    """Of the model itself: before temperature."""
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Found out at connect, by asking and by trying.

    `engine`: name and version. `token_ids`: it takes and gives token ids. `stamps_tokens`: it
    reports the version of every token. `keeps_requests`: running requests survive an update.
    `aborts_with_partial`: an aborted request gives what it had. `logprobs_remedy`: what to start
    it with for processed log-probabilities. `max_model_len`: longest prompt plus completion.
    `replaced`: the weights of somebody else's run that it served when `connect` came.
    """

    engine: str
    token_ids: bool = True
    stamps_tokens: bool = True
    keeps_requests: bool = True
    aborts_with_partial: bool = True
    loads_weights: bool = True
    logprobs: Logprobs = Logprobs.PROCESSED
    logprobs_remedy: str = ""
    max_model_len: int | None = None
    contract: Contract = Contract()  # noqa: RUF009 - frozen
    replaced: str = ""

    def statement(self) -> str:
        """One plain sentence or more: what it is, and what is lost."""
        lost = []
        if not self.token_ids:
            lost.append("text instead of token ids: evaluation only")
        if not self.loads_weights:
            lost.append("its weights stay what they are: frozen roles only")
        if not self.stamps_tokens and self.token_ids:
            lost.append(
                "no version stamps: the client drains or aborts all its requests at every update "
                "and stamps what it ordered, so mode keep is out"
            )
        if not self.keeps_requests:
            lost.append("running requests end at every update: mode keep is out")
        if not self.aborts_with_partial:
            lost.append("an aborted request loses what it had sampled: mode interrupt is out")
        if self.logprobs is not Logprobs.PROCESSED:
            lost.append(f"log-probabilities are {self.logprobs}")
        length = f", {self.max_model_len} tokens" if self.max_model_len else ""
        rest = "; ".join(lost) if lost else "it has all that is needed"
        loaded = (
            f"; it served {self.replaced}, and was told to load those that this run begins with"
        )
        return f"{self.engine}{length}: {rest}{loaded if self.replaced else ''}"

    def against_training(self, mode: UpdateMode, *, temperature: float = 1.0) -> list[str]:
        """Reasons why rollouts from this engine cannot be trained on; none: they can."""
        reasons = []
        if not self.token_ids:
            reasons.append(
                "it answers in text, and text that is tokenized again need not be what the model "
                "sampled; use a vLLM or SGLang server, or this one for evaluation only"
            )
        if not self.loads_weights:
            reasons.append("it cannot load new weights while it runs")
        if self.logprobs is Logprobs.NONE:
            reasons.append("it reports no log-probabilities of what it sampled")
        elif self.logprobs is Logprobs.RAW and temperature != 1.0:
            reasons.append(
                "its log-probabilities are before temperature, but training needs those of what "
                f"was sampled from (temperature {temperature:g}): {self.logprobs_remedy}"
            )
        if mode is UpdateMode.KEEP and not (self.keeps_requests and self.stamps_tokens):
            reasons.append(
                "update_mode keep needs an engine that keeps requests and stamps every token: set "
                "engine.update_mode to interrupt or finish"
            )
        if mode is UpdateMode.INTERRUPT and not self.aborts_with_partial:
            reasons.append("update_mode interrupt needs partial output: set it to finish")
        return reasons


@runtime_checkable
class EngineClient(Engine, Protocol):
    """What a pool asks of an engine on a server, beyond the port that the loop sees.

    `update_weights` of such an engine leaves it knowing what it serves: after a success that
    version; after a failure whatever `is_usable` says.
    """

    @property
    def capabilities(self) -> Capabilities | None:
        """None before the first `connect`."""
        ...

    @property
    def pause_seconds(self) -> float:
        """How long running requests stood still in the last update."""
        ...

    async def connect(self, version: int | None) -> Capabilities:
        """Find out what it can do, end a pause that somebody left behind, and check its label.

        `version`: what it serves already; it is labelled so if it has no label. One that serves
        something else loads what the run begins with where it knows the folder, and is refused
        where it does not. None: whatever it serves, `update_weights` comes before the first
        request. Called by the pool, one call at a time, under its deadline. Raises EngineError.
        """
        ...

    async def is_healthy(self) -> bool:
        """Whether it would take requests now. Never called during an update. Raises nothing but
        cancellation; its deadline is the caller's."""
        ...

    async def lag(self) -> str | None:
        """What is wrong with the version that it says it serves; None: nothing, or it cannot say.

        A process that was restarted so quickly that nobody saw it gone serves its first weights
        again. Called as `is_healthy` is; raises EngineError.
        """
        ...
