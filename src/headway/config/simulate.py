"""Section `simulate`: the stated workload of a simulated run."""

from typing import Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Count, ImpossibleError, Section


class LatencyConfig(Section):
    """A distribution of seconds; only the fields of its `kind` have an effect."""

    kind: Literal["constant", "uniform", "lognormal"] = "lognormal"
    """Shape of the distribution."""
    value: float = Field(default=1.0, ge=0)
    """`constant`: always this."""
    low: float = Field(default=1.0, ge=0)
    """`uniform`: the least value."""
    high: float = Field(default=2.0, ge=0)
    """`uniform`: every value is below this."""
    median: float = Field(default=20.0, gt=0)
    """`lognormal`: half of the values are below this."""
    sigma: float = Field(default=1.0, ge=0)
    """`lognormal`: standard deviation of the logarithm."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kind == "uniform" and self.high < self.low:
            reason = f"{self.high:g} is below low ({self.low:g}); swap them"
            raise ImpossibleError([("high", reason)])
        return self


class SimulateConfig(Section):
    """The stated workload of `headway simulate`; seconds are virtual."""

    rollout_seconds: LatencyConfig = LatencyConfig()
    """How long one engine request takes."""
    tokens_per_second: float = Field(default=50.0, gt=0)
    """Per rollout: its length is its latency times this."""
    prompt_tokens: Count = 16
    """Length of every prompt."""
    reward_probability: float = Field(default=0.5, ge=0, le=1)
    """A rollout's reward is 1 this often, else 0."""
    train_seconds: float = Field(default=10.0, ge=0)
    """Per batch."""
    weight_sync_seconds: float = Field(default=0.2, ge=0)
    """From new weights to engines that serve them."""
