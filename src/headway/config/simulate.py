"""Section `simulate`: the stated workload of a simulated run (docs/simulate.md has examples)."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Count, ImpossibleError, Section

Probability = Annotated[float, Field(ge=0, le=1)]
Point = tuple[float, float]


def _rises(values: Any) -> bool:
    return all(low < high for low, high in pairwise(values))


def _tuples(value: Any) -> Any:
    """What a validator that runs before the fields hands on: strict fields refuse a list there."""
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


class DistributionConfig(Section):
    """A distribution of seconds, tokens or turns; only the fields of its `kind` have an effect. A
    plain number is a constant."""

    kind: Literal["constant", "uniform", "lognormal", "bimodal", "long_tail", "empirical"] = (
        "lognormal"
    )
    """Shape of the distribution."""
    value: float = Field(default=1.0, ge=0)
    """`constant`: always this."""
    low: float = Field(default=1.0, ge=0)
    """`uniform`: the least value."""
    high: float = Field(default=2.0, ge=0)
    """`uniform`: every value is below this."""
    median: float = Field(default=20.0, gt=0)
    """`lognormal`, `long_tail`: half of the values are below this. `bimodal`: of the first mode."""
    sigma: float = Field(default=1.0, ge=0)
    """`lognormal`: standard deviation of the logarithm. `bimodal`: of the first mode; 0 makes it a
    single value."""
    share: Probability = 0.1
    """`bimodal`: how often the second mode is drawn from."""
    second_median: float = Field(default=100.0, gt=0)
    """`bimodal`: half of the second mode is below this."""
    second_sigma: float = Field(default=0.0, ge=0)
    """`bimodal`: standard deviation of the second mode's logarithm."""
    alpha: float = Field(default=1.5, gt=0)
    """`long_tail`: the share of the values above `x` falls as `x ** -alpha` (Pareto); the mean is
    infinite up to 1, the variance up to 2."""
    values: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """`empirical`: measured values, one of which is drawn each time, with replacement."""
    file: str | None = None
    """`empirical`: a text file of such values, one a line, `#` starts a comment; a relative path is
    relative to the working directory."""
    quantiles: tuple[Point, ...] = ()
    """`empirical`: `[probability, value]` points of the distribution, linear in between; the ends
    are the least and the greatest value."""
    max: float | None = Field(default=None, gt=0)
    """Greater values are cut to this."""

    @model_validator(mode="before")
    @classmethod
    def _number(cls, given: Any) -> Any:
        if isinstance(given, int | float) and not isinstance(given, bool):
            return {"kind": "constant", "value": given}
        if not isinstance(given, Mapping | DistributionConfig):
            raise ValueError(  # noqa: TRY004 - pydantic collects only these
                f"a number or a distribution (kind: lognormal, median: 20, ...) is needed, not "
                f"{given!r:.60}"
            )
        if isinstance(given, Mapping):
            return {name: _tuples(value) for name, value in given.items()}
        return given

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if problems := list(self._problems()):
            raise ImpossibleError(problems)
        return self

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self.kind == "uniform" and self.high < self.low:
            yield "high", f"{self.high:g} is below low ({self.low:g}); swap them"
        if self.kind != "empirical":
            return
        given = [name for name in ("values", "file", "quantiles") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            yield "kind", f"empirical needs one of values, file and quantiles, not {found}"
        if not self.quantiles:
            return
        probabilities, values = zip(*self.quantiles, strict=True)
        if not 0 <= probabilities[0] <= probabilities[-1] <= 1 or values[0] < 0:
            yield "quantiles", "probabilities are between 0 and 1, values not below 0"
        if not _rises(probabilities) or list(values) != sorted(values):
            yield "quantiles", "probabilities must rise from point to point, values must not fall"


def _constant(value: float) -> DistributionConfig:
    return DistributionConfig(kind="constant", value=value)


class SpeedConfig(Section):
    """How fast one simulated engine samples, with `simulate.rollout_tokens`."""

    slots: Count = 64
    """Requests that run at the same time; further ones wait, first in first out."""
    throughput: tuple[Point, ...] = ((1, 60), (8, 400), (64, 2400))
    """`[running requests, tokens per second of all of them]` points, linear in between, in
    proportion below the first, constant beyond the last. The running requests share it equally."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        problems = []
        running = [point[0] for point in self.throughput]
        if not running or running[0] < 1 or not _rises(running):
            reason = "needs points [running, tokens per second] whose running counts rise from 1 up"
            problems.append(("throughput", reason))
        if any(rate <= 0 for _, rate in self.throughput):
            problems.append(("throughput", "an engine that samples nothing never ends; raise it"))
        if problems:
            raise ImpossibleError(problems)
        return self


class FaultsConfig(Section):
    """Faults of a simulated run; the real retries handle them."""

    request_failure_probability: Probability = 0.0
    """An engine request fails this often, after a random part of its time."""
    environment_failure_probability: Probability = 0.0
    """An attempt at a rollout fails this often by its environment's fault, after a random turn."""
    hang_probability: Probability = 0.0
    """An engine request is never answered this often: it holds its slot until
    `rollout.deadline_seconds`."""


class EnvWorkloadConfig(Section):
    """What differs in the rollouts of one environment; unset: as for all."""

    rollout_seconds: DistributionConfig | None = None
    """Instead of `simulate.rollout_seconds`."""
    rollout_tokens: DistributionConfig | None = None
    """Instead of `simulate.rollout_tokens`."""
    turns: DistributionConfig | None = None
    """Instead of `simulate.turns`."""
    tool_seconds: DistributionConfig | None = None
    """Instead of `simulate.tool_seconds`."""
    reward_probability: Probability | None = None
    """Instead of `simulate.reward_probability`."""


class SimulateConfig(Section):
    """The stated workload of `headway simulate`; seconds are virtual."""

    rollout_seconds: DistributionConfig | None = DistributionConfig()
    """How long the engine requests of one rollout take together, whatever the load: a distribution,
    or a number, which is a constant."""
    tokens_per_second: float = Field(default=50.0, gt=0)
    """With `rollout_seconds`: a rollout's length is its seconds times this."""
    rollout_tokens: DistributionConfig | None = None
    """Tokens sampled in one rollout, instead of `rollout_seconds`: how long they take depends on
    the load and on `engine`."""
    engine: SpeedConfig = SpeedConfig()
    """With `rollout_tokens`: how fast each of the `engine.count` engines is."""
    length_correlation: Probability = 0.0
    """How alike in length the rollouts of one prompt are: the correlation between two of them (of
    their normal scores). 0: drawn independently; 1: equally long."""
    turns: DistributionConfig = _constant(1)
    """Model turns of one rollout, rounded, at least 1; they share its tokens equally."""
    tool_seconds: DistributionConfig = _constant(0)
    """Between two turns the environment takes this long (a tool call)."""
    by_env: dict[str, EnvWorkloadConfig] = Field(default_factory=dict)
    """By the name of an environment of `envs`: what is different there."""
    prompt_tokens: Count = 16
    """Length of every prompt."""
    reward_probability: Probability = 0.5
    """A rollout's reward is 1 this often, else 0."""
    difficulty_spread: float = Field(default=0.0, ge=0, lt=1)
    """How much tasks differ: each task has its own probability of reward, Beta-distributed with
    mean `reward_probability` and this share of the largest possible variance. 0: all are alike;
    near 1: each is always or never solved."""
    train_seconds: DistributionConfig = _constant(10)
    """Per batch."""
    weight_sync_seconds: float = Field(default=0.2, ge=0)
    """From new weights to engines that serve them; meanwhile they sample nothing."""
    recompute_seconds: float = Field(default=0.0, ge=0)
    """`engine.update_mode: interrupt`: what it costs a running request to be read again, prompt and
    partial answer, after every update."""
    faults: FaultsConfig = FaultsConfig()
    """What goes wrong, and how often."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.rollout_tokens is not None and "rollout_seconds" not in self.model_fields_set:
            self.__dict__["rollout_seconds"] = None  # frozen for everybody else
        if problems := list(self._problems()):
            raise ImpossibleError(problems)
        return self

    def _problems(self) -> Iterator[tuple[str, str]]:
        either = "state one of rollout_seconds (whatever the load) and rollout_tokens (the engine's"
        either += " speed decides)"
        if self.rollout_tokens is not None and self.rollout_seconds is not None:
            yield "rollout_seconds", f"{either}, not both"
        if self.rollout_tokens is None and self.rollout_seconds is None:
            yield "rollout_seconds", f"{either}; both are empty"
        for name, env in self.by_env.items():
            if env.rollout_tokens is not None and self.rollout_tokens is None:
                reason = "needs simulate.rollout_tokens for all: all share the engines"
                yield f"by_env.{name}.rollout_tokens", reason
            if env.rollout_seconds is not None and self.rollout_seconds is None:
                reason = "has no place beside simulate.rollout_tokens: all share the engines"
                yield f"by_env.{name}.rollout_seconds", reason

    def unknown_envs(self, labels: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        """`(key, reason)` for every name in `by_env` that no environment has."""
        for name in self.by_env:
            if name not in labels:
                yield f"by_env.{name}", f"there is no such environment; there are {list(labels)}"
