"""`headway plan`: which setting to use, found by trying them in virtual time through the real loop.

Three rounds, from coarse to fine. The *survey* simulates many settings of `S` and concurrency
briefly under the recommended policy. *Variants* of the best of them, and of the setting in force,
change the policy or the number of engines. The best of all are *confirmed* by longer simulations,
and only these can be recommended. All settings meet the same rollouts (`sim/workload.py`), so that
small differences between them mean something.

The result depends on the workload, the seed and the objective alone, unless the time budget cuts
the search off, which the plan then says.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from headway.config import PRESETS, Config, Preset
from headway.config.file import load_config
from headway.core.bound import OverBound
from headway.core.order import Order
from headway.core.pacing import Pacing
from headway.errors import ConfigError, RunDirError
from headway.sim.fit import Fit, fit_run
from headway.sim.predict import BINDING_TEXT, Binding, Prediction, Setting, predict

AGES = (0, 1, 2, 3, 4, 6, 8)
"""`S` in the survey, beside the one in force."""

FILLS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
"""Concurrency in the survey, in batches; at most `S + 1` of them have an effect."""

SURVEY_ROLLOUTS, CONFIRM_ROLLOUTS = 1500, 12_000
"""About as many rollouts are measured in each simulation, but at least `MIN_STEPS` steps."""
MIN_STEPS, MAX_STEPS = 12, 200

NUM_VARIED, NUM_CONFIRMED = 2, 8
"""Settings whose variants are tried, and settings that are simulated at length."""

TOLERANCE = 0.015
"""A setting this much slower than the fastest is as good as it."""
SLACK = 0.04
"""The same after a short simulation, for what is worth a longer one."""
LONGEST_TRAINED = 0.95
"""The least share of the longest 5 % that a recommended setting trains."""

ProgressCallback = Callable[["Progress"], None]


class Objective(StrEnum):
    """What the recommended setting is best at."""

    BALANCED = "balanced"
    """The youngest data among the settings within 1.5 % of the fastest."""
    FASTEST = "fastest"
    """The shortest step time."""
    YOUNGEST = "youngest"
    """The youngest data."""


class Round(StrEnum):
    """Where a plan is."""

    SURVEY = "survey"
    VARIANTS = "variants"
    CONFIRM = "confirm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a plan is: `done` of `total` simulations of this round."""

    round: Round
    done: int
    total: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings, the best first, and what to choose."""

    source: str
    config: Config
    """The workload: a recorded run's with what was fitted to it, or as stated."""
    fit: Fit | None
    """None for a stated workload."""
    objective: Objective
    rows: tuple[Prediction, ...]
    front: frozenset[Setting]
    """Settings than which none is both faster and younger, at the present number of engines."""
    current: Prediction | None
    """The setting in force; None when the budget ended before it was simulated."""
    recommended: Prediction
    why: tuple[str, ...]
    """One sentence each."""
    num_simulations: int
    seconds: float
    is_complete: bool
    """Whether the budget sufficed."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        fit = None
        if self.fit is not None:
            fit = dataclasses.asdict(self.fit)
            del fit["config"]
        return {
            "source": self.source,
            "objective": self.objective,
            "recommended": self.recommended.as_row(),
            "block": self.recommended.setting.block(),
            "current": self.current and self.current.as_row(),
            "why": list(self.why),
            "settings": [
                {**row.as_row(), "is_on_front": row.setting in self.front} for row in self.rows
            ],
            "fit": fit,
            "workload": self.config.simulate.model_dump(mode="json"),
            "num_simulations": self.num_simulations,
            "seconds": self.seconds,
            "is_complete": self.is_complete,
        }


def read_source(path: Path) -> tuple[Config, Fit | None]:
    """The workload of a run directory, or of a YAML file.

    Raises:
        RunDirError: there is no such folder, or what it holds is too little.
        ConfigError: the file cannot be used.
    """
    if path.is_dir():
        fit = fit_run(path)
        return fit.config, fit
    if not path.exists():
        raise RunDirError(f"{path} is neither a run directory nor a YAML file with a workload")
    return load_config(path), None


def plan(
    source: Path,
    *,
    objective: Objective = Objective.BALANCED,
    budget: float = 60.0,
    jobs: int = 0,
    progress: ProgressCallback | None = None,
) -> Plan:
    """Find the setting to use for a run directory or a workload file.

    Args:
        budget: seconds of wall time for the simulations.
        jobs: processes; 0: one per CPU core, at most 8.

    Raises:
        RunDirError, ConfigError: as `read_source`; or nothing could be simulated in the budget.
    """
    config, fit = read_source(source)
    jobs = jobs or min(os.cpu_count() or 1, 8)
    with _Search(config, fit, budget=budget, jobs=jobs, progress=progress) as search:
        current = Setting.of(config)
        search.run(Round.SURVEY, [current, *_survey(config)])
        varied = _candidates(search.found(), current, objective)[:NUM_VARIED]
        variants = [
            one for base in {current: 0, **dict.fromkeys(varied)} for one in _variants(base)
        ]
        search.run(Round.VARIANTS, variants)
        best = _candidates(search.found(), current, objective)[:NUM_CONFIRMED]
        search.run(Round.CONFIRM, [*dict.fromkeys([current, *best])])
        if not search.results:
            raise ConfigError(
                f"{source}: not one simulation ended within {budget:g} s; raise --budget, or plan "
                "on a smaller rollout.group_size or consumer_batch_size"
            )
        return _conclude(source, search, objective)


# --- settings to try ------------------------------------------------------------------------------


def _survey(config: Config) -> Iterator[Setting]:
    """`S` and concurrency under the recommended policy, what matters most first."""
    current = Setting.of(config)
    preset = PRESETS[Preset.RECOMMENDED]
    policy: dict[str, Any] = {**preset, "window": None}
    if not config.engine.stamps_tokens:
        policy["over_bound"] = OverBound.DROP
    batch_size = config.rollout.consumer_batch_size
    sizes = {max(round(fill * batch_size), 1) for fill in FILLS} | {current.max_concurrent}
    ages = sorted({*AGES, current.max_head_offpolicyness})
    for size in sorted(sizes, key=lambda one: (one % batch_size != 0, one)):
        for age in ages:
            if size <= (age + 1) * batch_size:
                yield dataclasses.replace(
                    current, max_head_offpolicyness=age, max_concurrent=size, **policy
                )


def _variants(base: Setting) -> Iterator[Setting]:
    """The same `S` and concurrency under other policies, and with other numbers of engines."""
    for preset in PRESETS.values():
        yield dataclasses.replace(base, window=None, **dict(preset))  # type: ignore[arg-type]
    for name, value in (
        ("pacing", Pacing.FILL),
        ("pacing", Pacing.JUST_IN_TIME),
        ("order", Order.COMPLETION),
        ("order", Order.OLDEST_FIRST),
        ("over_bound", OverBound.WAIT),
        ("over_bound", OverBound.TRIM),
    ):
        changed: dict[str, Any] = {name: value}
        if name == "order":
            changed["window"] = None
        yield dataclasses.replace(base, **changed)
    yield dataclasses.replace(base, engines=2 * base.engines)
    if base.engines > 1:
        yield dataclasses.replace(base, engines=base.engines // 2)


# --- the search -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Search:
    """Simulates settings on all cores until the budget ends."""

    config: Config
    fit: Fit | None
    budget: float
    jobs: int
    progress: ProgressCallback | None
    results: dict[Setting, Prediction] = field(default_factory=dict)
    confirmed: set[Setting] = field(default_factory=set)
    refused: dict[Setting, str] = field(default_factory=dict)
    num_simulations: int = 0
    is_complete: bool = True
    _started_at: float = field(default_factory=time.monotonic)
    _pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "_Search":
        if self.jobs > 1:
            # A fresh process: a fork would copy whatever threads the caller has, half of them.
            self._pool = ProcessPoolExecutor(self.jobs, mp_context=get_context("spawn"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return time.monotonic() - self._started_at

    def found(self) -> list[Prediction]:
        """What every setting came to, in a fixed order."""
        return [self.results[setting] for setting in sorted(self.results)]

    def run(self, what: Round, settings: Sequence[Setting]) -> None:
        """Simulate them, or what the budget allows, the first ones first."""
        is_long = what is Round.CONFIRM
        known = self.confirmed if is_long else self.results.keys()
        waiting = [one for one in dict.fromkeys(settings) if one not in known][::-1]
        total, done = len(waiting), 0
        running: dict[Future[Prediction | None], Setting] = {}
        while waiting or running:
            while waiting and len(running) < self.jobs and self.seconds < self.budget:
                setting = waiting.pop()
                running[self._submit(setting, self._num_steps(is_long))] = setting
            if not running:
                self.is_complete = False
                return
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                self._take(running.pop(future), future, is_long)
                done += 1
            if self.progress is not None:
                self.progress(Progress(round=what, done=done, total=total, seconds=self.seconds))

    def _num_steps(self, is_long: bool) -> int:
        rollout = self.config.rollout
        per_step = rollout.consumer_batch_size * rollout.group_size
        wanted = (CONFIRM_ROLLOUTS if is_long else SURVEY_ROLLOUTS) // per_step
        return min(max(wanted, (3 if is_long else 1) * MIN_STEPS), MAX_STEPS)

    def _submit(self, setting: Setting, num_steps: int) -> Future[Prediction | None]:
        max_load = self.fit.max_load if self.fit else None
        options = {"num_steps": num_steps, "max_load": max_load}
        options["seconds"] = max(self.budget - self.seconds, 0.1)
        if self._pool is not None:
            return self._pool.submit(predict, self.config, setting, **options)  # type: ignore[arg-type]
        future: Future[Prediction | None] = Future()
        try:
            future.set_result(predict(self.config, setting, **options))  # type: ignore[arg-type]
        except ConfigError as error:
            future.set_exception(error)
        return future

    def _take(self, setting: Setting, future: Future[Prediction | None], is_long: bool) -> None:
        self.num_simulations += 1
        try:
            found = future.result()
        except ConfigError as error:
            self.refused[setting] = str(error)
            return
        if found is None:
            self.is_complete = False
            return
        before = self.results.get(setting)
        if before is None or found.num_steps >= before.num_steps:
            self.results[setting] = found
        if is_long:
            self.confirmed.add(setting)


# --- choosing -------------------------------------------------------------------------------------


def is_sound(row: Prediction) -> bool:
    """Whether a setting may be recommended: bounded, nothing discarded, the longest trained."""
    longest = row.longest_trained_share
    return (
        row.guaranteed is not None
        and row.setting.over_bound is not OverBound.DROP
        and row.dropped_share == 0
        and (longest is None or longest >= LONGEST_TRAINED)
    )


def ranked(rows: Sequence[Prediction], objective: Objective, slack: float) -> list[Prediction]:
    """The best first. Only rows with the same number of engines can be compared like this.

    Args:
        slack: a step time this share above the shortest is as good.
    """
    limit = min((row.step_seconds for row in rows), default=0.0) * (1 + slack)

    def key(row: Prediction) -> tuple[Any, ...]:
        last = (row.trimmed_share, row.setting.max_concurrent, row.setting)
        age, step = round(row.head_age_mean, 2), row.step_seconds
        match objective:
            case Objective.BALANCED:
                good = row.step_seconds <= limit
                first: tuple[Any, ...] = (not good, age if good else step)
            case Objective.FASTEST:
                first = (round(step / max(limit, 1e-9) * 200), age)  # half a per cent is noise
            case Objective.YOUNGEST:
                first = (age, step)
        return (not is_sound(row), *first, *last)

    return sorted(rows, key=key)


def _candidates(
    rows: Sequence[Prediction], current: Setting, objective: Objective
) -> list[Setting]:
    """Settings worth a closer look at the present number of engines; the fastest comes second, for
    it is what the others are measured by."""
    rows = [row for row in rows if row.setting.engines == current.engines]
    if not rows:
        return []
    best = ranked(rows, objective, SLACK)
    fastest = min(rows, key=lambda row: (row.step_seconds, row.setting))
    order = [best[0], fastest, *best[1:]]
    return [*dict.fromkeys(row.setting for row in order)]


def pareto_front(rows: Sequence[Prediction]) -> list[Prediction]:
    """Rows than which no other is both faster and younger, the fastest first."""
    front: list[Prediction] = []
    for row in sorted(rows, key=lambda row: (row.step_seconds, row.head_age_mean, row.setting)):
        if not front or row.head_age_mean < front[-1].head_age_mean:
            front.append(row)
    return front


def _conclude(source: Path, search: _Search, objective: Objective) -> Plan:
    current_setting = Setting.of(search.config)
    same = [row for row in search.found() if row.setting.engines == current_setting.engines]
    others = [row for row in search.found() if row.setting.engines != current_setting.engines]
    confirmed = [row for row in same if row.setting in search.confirmed] or same
    recommended = ranked(confirmed, objective, TOLERANCE)[0]
    rest = [row for row in ranked(same, objective, TOLERANCE) if row is not recommended]
    result = Plan(
        source=str(source),
        config=search.config,
        fit=search.fit,
        objective=objective,
        rows=(recommended, *rest, *ranked(others, objective, TOLERANCE)),
        front=frozenset(row.setting for row in pareto_front(same)),
        current=search.results.get(current_setting),
        recommended=recommended,
        why=(),
        num_simulations=search.num_simulations,
        seconds=search.seconds,
        is_complete=search.is_complete,
    )
    return dataclasses.replace(result, why=tuple(_why(result, confirmed, others)))


def _why(
    plan: Plan, confirmed: Sequence[Prediction], others: Sequence[Prediction]
) -> Iterator[str]:
    best, current = plan.recommended, plan.current
    fastest = min(confirmed, key=lambda row: row.step_seconds)
    behind = best.step_seconds / fastest.step_seconds - 1
    yield (
        f"{best.step_seconds:.3g} s a step, {100 * behind:.1f} % behind the fastest simulated "
        f"({_named(fastest)}), at a mean head age of {best.head_age_mean:.2f}"
    )
    yield f"What limits it: {BINDING_TEXT[best.binding]} ({best.evidence})"
    if not is_sound(best):
        yield (
            "No setting tried is bounded, discards nothing and trains the longest rollouts: this "
            "is only the best of the others"
        )
    if current is not None and current.setting == best.setting:
        yield "This is the setting in force: nothing to change"
    elif current is not None:
        step = best.step_seconds / current.step_seconds - 1
        yield (
            f"Against the setting in force ({_named(current)}): step time {100 * step:+.1f} %, "
            f"mean head age {current.head_age_mean:.2f} -> {best.head_age_mean:.2f}, "
            f"guaranteed {_bound(current)} -> {_bound(best)}"
        )
    for row in sorted(others, key=lambda row: row.setting.engines):
        if _same_but_engines(row.setting, best.setting):
            change = row.step_seconds / best.step_seconds - 1
            yield f"With engine.count {row.setting.engines}: step time {100 * change:+.1f} %"
    if best.binding is Binding.ENGINES:
        yield "More S or concurrency cannot help: only faster or more engines can"
    if best.is_extrapolated:
        yield (
            "The recorded run never had as many requests in flight: the engines' speed there is "
            "assumed to stay what it was at the most"
        )
    if not plan.is_complete:
        yield "The budget ended before the search did: a larger --budget may find better"
    if plan.fit is not None:
        for note in plan.fit.notes:
            yield f"Fitted to the run: {note}"


def _same_but_engines(one: Setting, other: Setting) -> bool:
    return dataclasses.replace(one, engines=other.engines) == other


def _named(row: Prediction) -> str:
    setting = row.setting
    return f"S = {setting.max_head_offpolicyness}, {setting.max_concurrent} in flight, " + (
        setting.policy
    )


def _bound(row: Prediction) -> str:
    return "none" if row.guaranteed is None else str(row.guaranteed)
