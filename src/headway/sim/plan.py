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
from headway.sim.predict import Prediction, Setting, predict
from headway.sim.ranking import TOLERANCE, Objective, candidates, pareto_front, ranked, reasons

AGES = (4, 1, 8, 2, 6, 0, 3)
"""`S` in the survey, beside the one in force; those that tell most come first, in case that the
budget ends."""

FILLS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
"""Concurrency in the survey, in batches; at most `S + 1` of them have an effect."""

SURVEY_ROLLOUTS, CONFIRM_ROLLOUTS = 1500, 12_000
"""About as many rollouts are measured in each simulation, but at least `MIN_STEPS` steps."""
MIN_STEPS, MAX_STEPS = 8, 200

NUM_VARIED, NUM_CONFIRMED = 2, 8
"""Settings whose variants are tried, and settings that are simulated at length."""

ProgressCallback = Callable[["Progress"], None]


class Round(StrEnum):
    """Where a plan is."""

    SURVEY = "survey"
    VARIANTS = "variants"
    CONFIRM = "confirm"

    @property
    def ends_at(self) -> float:
        """The part of the budget at which it ends, whatever it has left."""
        return {Round.SURVEY: 0.4, Round.VARIANTS: 0.6, Round.CONFIRM: 1.0}[self]


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
    effort: float = 1.0,
    progress: ProgressCallback | None = None,
) -> Plan:
    """Find the setting to use for a run directory or a workload file.

    Args:
        budget: seconds of wall time for the simulations.
        jobs: processes; 0: one per CPU core, at most 8.
        effort: makes all simulations this much longer.

    Raises:
        RunDirError, ConfigError: as `read_source`; or nothing could be simulated in the budget.
    """
    config, fit = read_source(source)
    jobs = jobs or min(os.cpu_count() or 1, 8)
    with _Search(config, fit, budget, jobs, effort, progress) as search:
        current = Setting.of(config)
        search.run(Round.SURVEY, [current, *_survey(config)])
        varied = candidates(search.found(), current, objective)[:NUM_VARIED]
        variants = [
            one for base in {current: 0, **dict.fromkeys(varied)} for one in _variants(base)
        ]
        search.run(Round.VARIANTS, variants)
        best = candidates(search.found(), current, objective)[:NUM_CONFIRMED]
        search.run(Round.CONFIRM, [*dict.fromkeys([current, *best])])
        if current not in search.results and search.refused:
            raise ConfigError(f"{source}: {search.refused[min(search.refused)]}")
        if not search.results:
            raise ConfigError(
                f"{source}: not one simulation ended within {budget:g} s; raise --budget, or plan "
                "on a smaller rollout.consumer_batch_size or group_size"
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
    sizes = sorted({max(round(fill * batch_size), 1) for fill in FILLS} | {current.max_concurrent})
    ages = [*dict.fromkeys([*AGES, current.max_head_offpolicyness])]
    # First each S with as much in flight as it can use, then with less.
    grid = [(age, (age + 1) * batch_size) for age in ages]
    grid += [(age, size) for size in sizes for age in ages if size < (age + 1) * batch_size]
    for age, size in grid:
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
    effort: float
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
        limit = what.ends_at * self.budget
        running: dict[Future[Prediction | None], Setting] = {}
        while waiting or running:
            while waiting and len(running) < self.jobs and self.seconds < limit:
                setting = waiting.pop()
                running[self._submit(setting, is_long)] = setting
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
        wanted = self.effort * (CONFIRM_ROLLOUTS if is_long else SURVEY_ROLLOUTS) / per_step
        return min(max(round(wanted), (4 if is_long else 1) * MIN_STEPS), MAX_STEPS)

    def _submit(self, setting: Setting, is_long: bool) -> Future[Prediction | None]:
        loads, num_steps = self.fit and self.fit.loads, self._num_steps(is_long)
        options: dict[str, Any] = {"num_steps": num_steps, "is_long": is_long, "loads": loads}
        options["seconds"] = max(self.budget - self.seconds, 0.1)
        if self._pool is not None:
            return self._pool.submit(predict, self.config, setting, **options)
        future: Future[Prediction | None] = Future()
        try:
            future.set_result(predict(self.config, setting, **options))
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


# --- the result ---------------------------------------------------------------------------------


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
    return dataclasses.replace(result, why=tuple(reasons(result, confirmed, others)))
