"""One setting on a workload, in virtual time through the real loop: what it comes to, what binds.

The steady state is what is measured: the first steps, in which the pipeline fills, are left out,
and the run is ended before admission closes near its step target.
"""

import asyncio
import dataclasses
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.config import PRESETS, Config, DistributionConfig
from headway.core.bound import Enforcement, OverBound
from headway.core.order import Order
from headway.core.pacing import Pacing, PacingState
from headway.errors import ConfigError
from headway.loop.orchestrator import Orchestrator
from headway.sim.binding import Binding, Window, binding_of
from headway.sim.clock import run_virtual
from headway.sim.run import build_simulation
from headway.sim.scale import lighter, mean_of

MIN_MEASURED = 4
"""Steps below which a simulation that was cut off says nothing."""

LONG_WARM_UP = 52
"""Steps until the pacing controller has forgotten how it began (core/pacing.py). The same for all
settings, so that they are measured over the same updates."""

BEYOND = 1.05
"""Loads outside the recorded ones by more than this factor are extrapolated."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """What a plan chooses."""

    max_head_offpolicyness: int
    max_concurrent: int
    enforcement: Enforcement
    order: Order
    over_bound: OverBound
    pacing: Pacing
    window: int | None = None
    engines: int = 1

    @classmethod
    def of(cls, config: Config) -> "Setting":
        """The setting that a configuration has."""
        rollout = config.rollout
        return cls(
            max_head_offpolicyness=rollout.max_head_offpolicyness,
            max_concurrent=rollout.max_concurrent,
            enforcement=rollout.enforcement,
            order=rollout.order,
            over_bound=rollout.over_bound,
            pacing=rollout.pacing,
            window=rollout.window if rollout.order is Order.WINDOW else None,
            engines=config.engine.count,
        )

    def block(self) -> dict[str, dict[str, Any]]:
        """As the configuration has it, section by section."""
        rollout: dict[str, Any] = {
            "max_head_offpolicyness": self.max_head_offpolicyness,
            "max_concurrent_rollouts": self.max_concurrent,
            "enforcement": self.enforcement.value,
            "order": self.order.value,
            "over_bound": self.over_bound.value,
            "pacing": self.pacing.value,
        }
        if self.window is not None:
            rollout["window"] = self.window
        return {"rollout": rollout, "engine": {"count": self.engines}}

    def apply(self, config: Config) -> Config:
        """The configuration with this setting. Raises ConfigError when the two contradict."""
        content = config.model_dump(mode="json")
        for section, values in self.block().items():
            content[section].update(values)
        rollout = content["rollout"]
        if self.over_bound is OverBound.WAIT:
            needed = (self.max_head_offpolicyness + 1) * rollout["consumer_batch_size"]
            rollout["queue_size"] = max(rollout["queue_size"], needed)
        try:
            return Config.model_validate(content)
        except ValueError as error:
            raise ConfigError(f"{self.policy}: {error}") from error

    @property
    def policy(self) -> str:
        """The name of the preset that these are, else the four names."""
        chosen = {
            "enforcement": self.enforcement,
            "order": self.order,
            "over_bound": self.over_bound,
            "pacing": self.pacing,
        }
        for preset, values in PRESETS.items():
            if values == chosen:
                return preset.value
        where = "" if self.enforcement is Enforcement.ADMISSION else f"{self.enforcement.value}, "
        order = self.order.value if self.window is None else f"{self.order.value} {self.window}"
        return f"{where}{order}, {self.over_bound.value}, {self.pacing.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A setting in the steady state; times are virtual seconds, ages versions."""

    setting: Setting
    num_steps: int
    """Steps that were measured."""
    step_seconds: float
    head_age_mean: float
    """Of the oldest trained token of a rollout."""
    age_mean: float
    age_p99: int
    age_max: int
    """Over trained tokens."""
    guaranteed: int | None
    dropped_share: float
    """Of the samples that reached a batch or were too old for it."""
    trimmed_share: float
    """Of the tokens in batches."""
    held_seconds: float
    """Per step: a full batch waited for samples that must be in it."""
    trainer_idle: float
    engine_idle: float
    """Shares of the time; engines are idle when no request is in flight."""
    longest_trained_share: float | None
    """Of the longest 5 % of the rollouts, the share trained, trimmed or not."""
    longest_5pct_trained_token_share: float | None
    """Of the tokens of the longest 5 % of the rollouts, the share trained: what trimming leaves."""
    updating_share: float
    """Of the time, from a version announced to all engines serving it."""
    load: float
    """Mean running requests per engine."""
    binding: Binding
    evidence: str
    is_extrapolated: bool
    """Whether the engines had loads that the recorded run does not show the speed of."""

    def as_row(self) -> dict[str, Any]:
        """For JSON; the setting's fields come first."""
        row = {**dataclasses.asdict(self.setting), "policy": self.setting.policy}
        rest = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "setting"
        }
        return {**row, **rest}


def predict(
    config: Config,
    setting: Setting,
    *,
    num_steps: int,
    is_long: bool = False,
    loads: tuple[float, float] | None = None,
    seconds: float = float("inf"),
) -> Prediction | None:
    """Simulate a setting for `num_steps` steps after the warm-up.

    Args:
        is_long: warm up until the pacing controller has forgotten how it began. Either way it
            begins low, from where it finds the steady state sooner than a real run does. If not
            long, all updates take the mean time.
        loads: running requests between which the engine's speed is known; None: it is stated.
        seconds: wall time after which the simulation is cut off; None comes back when that was too
            early to say anything.

    Raises:
        ConfigError: the setting contradicts the configuration.
    """
    warm_up = 2 * (setting.max_head_offpolicyness + 1) + 3
    if is_long:
        warm_up = max(warm_up, LONG_WARM_UP)
    target = warm_up + num_steps + setting.max_head_offpolicyness + 3
    planned = lighter(setting.apply(config)).without_limits()
    if not is_long:
        planned = _evenly_trained(planned)
    run = planned.run.model_copy(update={"steps": target, "metrics_interval_seconds": 1e9})
    quiet = planned.eval.model_copy(update={"every": 0})
    planned = planned.model_copy(update={"run": run, "eval": quiet})
    deadline = time.monotonic() + seconds

    async def main() -> Prediction | None:
        window = Window(first=warm_up, last=warm_up + num_steps - 1, deadline=deadline)
        low = PacingState(needs=(2 * planned.rollout.consumer_batch_size,))
        orchestrator = build_simulation(planned, metrics=window, pacing=low)
        running = asyncio.create_task(orchestrator.run())
        looking = asyncio.create_task(window.watch(orchestrator))
        ended = asyncio.create_task(window.end.wait())
        await asyncio.wait({running, looking, ended}, return_when=asyncio.FIRST_COMPLETED)
        idle = orchestrator.engine.idle_share or 0.0
        for task in (looking, ended, running):
            task.cancel()
        results = await asyncio.gather(looking, ended, running, return_exceptions=True)
        if len(window.rows) < MIN_MEASURED:
            if not window.end.is_set():  # it ended by itself, and early
                raise ConfigError(f"the workload cannot be simulated: {_reason(results[2])}")
            return None
        return _prediction(planned, setting, window, orchestrator, idle, loads)

    return run_virtual(main())


def _evenly_trained(config: Config) -> Config:
    """With updates that all take the mean time: a dozen draws differ more than settings do."""
    mean = {"kind": "constant", "value": mean_of(config.simulate.train_seconds)}
    constant = DistributionConfig.model_validate(mean)
    return config.model_copy(
        update={"simulate": config.simulate.model_copy(update={"train_seconds": constant})}
    )


def _reason(outcome: object) -> str:
    if isinstance(outcome, BaseException):
        return f"{type(outcome).__name__}: {outcome}"
    return str(getattr(outcome, "message", None) or getattr(outcome, "exit_reason", outcome))


def _prediction(
    config: Config,
    setting: Setting,
    window: Window,
    run: Orchestrator,
    engine_idle: float,
    loads: tuple[float, float] | None,
) -> Prediction:
    rows = window.rows
    total = {key: sum(row[key] or 0.0 for row in rows) for key in _SUMMED}
    tokens: Counter[int] = Counter()
    for row in rows:
        tokens.update({int(age): count for age, count in row["age_counts"].items()})
    ages = np.repeat(list(tokens), list(tokens.values())) if tokens else np.zeros(1, int)
    heads = [row["age"]["head_mean"] for row in rows if row["age"]["head_mean"] is not None]
    busy = total["train_seconds"] + total["publish_seconds"] + total["trainer_idle_seconds"]
    trainer_idle = total["trainer_idle_seconds"] / busy if busy else 0.0
    dropped = sum(sum(row["dropped"].values()) for row in rows)
    held = total["held_seconds"] / len(rows)
    step_seconds = (rows[-1]["time"] - window.started_at) / len(rows)
    load = window.load
    updating = total["sync_seconds"] / len(rows) / step_seconds if step_seconds else 0.0
    updating = min(updating, 1.0)
    binding, evidence = binding_of(config, window, trainer_idle, held, step_seconds, updating)
    bias = run.train_sink.bias
    return Prediction(
        setting=setting,
        num_steps=len(rows),
        step_seconds=step_seconds,
        head_age_mean=float(np.mean(heads)) if heads else 0.0,
        age_mean=float(ages.mean()),
        age_p99=int(np.quantile(ages, 0.99, method="inverted_cdf")),
        age_max=int(ages.max()),
        guaranteed=config.bound.guaranteed_age,
        dropped_share=dropped / max(dropped + total["num_samples"], 1),
        trimmed_share=total["tokens_trimmed"]
        / max(total["tokens_trimmed"] + total["num_tokens"], 1),
        held_seconds=held,
        trainer_idle=trainer_idle,
        engine_idle=engine_idle,
        longest_trained_share=bias.longest_trained_share,
        longest_5pct_trained_token_share=bias.summary().get("longest_5pct_trained_token_share"),
        updating_share=updating,
        load=load,
        binding=binding,
        evidence=evidence,
        is_extrapolated=loads is not None
        and not loads[0] / BEYOND <= load <= window.max_load <= loads[1] * BEYOND,
    )


_SUMMED = (
    "train_seconds",
    "publish_seconds",
    "trainer_idle_seconds",
    "held_seconds",
    "sync_seconds",
    "num_samples",
    "num_tokens",
    "tokens_trimmed",
)
