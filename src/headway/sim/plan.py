"""`headway plan`: which setting to use, found by trying them in virtual time through the real loop.

Three rounds, from coarse to fine. The *survey* simulates many settings of `S` and concurrency
briefly under the recommended policy. *Variants* of the best of them, and of the setting in force,
change the policy or the number of engines. The best of all are *confirmed* by longer simulations,
and then whatever would still beat the best of these, until nothing does: only confirmed settings
are recommended. All settings meet the same rollouts (`sim/workload.py`), so that small differences
between them mean something.

Each round has its part of the budget; what one could not do is made up for at the end. The result
depends on the workload, the seed and the objective alone, unless the budget cut a round short.
"""

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.config.file import load_config
from headway.errors import ConfigError, RunDirError
from headway.sim.fit import Fit, fit_run
from headway.sim.grid import presets_of, survey, variants
from headway.sim.predict import Prediction, Setting, predict
from headway.sim.ranking import (
    TOLERANCE,
    Objective,
    candidates,
    pareto_front,
    ranked,
    reasons,
    rivals,
)

SURVEY_ROLLOUTS, CONFIRM_ROLLOUTS = 1500, 12_000
"""About as many rollouts are measured in each simulation, but at least `MIN_STEPS` steps."""
MIN_STEPS, MAX_STEPS = 8, 200

NUM_VARIED, NUM_CONFIRMED = 2, 8
"""Settings whose variants are tried, and settings that are simulated at length at once."""

NUM_AT_ONCE = 4
"""Settings that are tried between two looks at the result; the same on any number of cores."""

ProgressCallback = Callable[["Progress"], None]


class Round(StrEnum):
    """Where a plan is."""

    SURVEY = "survey"
    VARIANTS = "variants"
    CONFIRM = "confirm"
    REST = "rest"
    """What the first two had no time for."""

    @property
    def ends_at(self) -> float:
        """The part of the budget at which it ends, whatever it has left."""
        return {Round.SURVEY: 0.4, Round.VARIANTS: 0.6}.get(self, 1.0)


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
    confirmed: frozenset[Setting]
    """Simulated at length; all others only briefly."""
    rivals: frozenset[Setting]
    """Simulated briefly, and would change the recommendation; empty unless the budget ended."""
    front: frozenset[Setting]
    """Of those simulated at length at the present number of engines: none is both faster and
    younger."""
    current: Prediction | None
    """The setting in force; None when the budget ended before it was simulated."""
    failure: str | None
    """What went wrong when the setting in force was simulated at length."""
    recommended: Prediction
    why: tuple[str, ...]
    """One sentence each."""
    num_simulations: int
    seconds: float
    is_complete: bool
    """Whether the budget sufficed."""
    is_interrupted: bool = False
    """Whether Ctrl-C ended the search."""

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
            "failure": self.failure,
            "why": list(self.why),
            "settings": [
                {
                    **row.as_row(),
                    "is_on_front": row.setting in self.front,
                    "is_confirmed": row.setting in self.confirmed,
                }
                for row in self.rows
            ],
            "fit": fit,
            "workload": self.config.simulate.model_dump(mode="json"),
            "num_simulations": self.num_simulations,
            "seconds": self.seconds,
            "is_complete": self.is_complete,
            "is_interrupted": self.is_interrupted,
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

    Ctrl-C ends the search, and the plan is made of what was found.

    Raises:
        RunDirError, ConfigError: as `read_source`; or nothing could be simulated in the budget.
        KeyboardInterrupt: nothing had been found yet.
    """
    config, fit = read_source(source)
    jobs = jobs or min(os.cpu_count() or 1, 8)
    with _Search(config, fit, objective, budget, jobs, effort, progress) as search:
        try:
            search.run_rounds()
        except KeyboardInterrupt:
            search.is_interrupted = True
            if not search.results:
                raise
        current = search.current
        if search.refused and (current not in search.results or not search.confirmed):
            reason = search.refused.get(current) or search.refused[min(search.refused)]
            raise ConfigError(f"{source}: {reason}")
        if not search.results:
            raise ConfigError(
                f"{source}: not one simulation ended within {budget:g} s; raise --budget, or plan "
                "on a smaller rollout.consumer_batch_size or group_size"
            )
        return _conclude(source, search)


# --- the search -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Search:
    """Simulates settings on all cores until the budget ends."""

    config: Config
    fit: Fit | None
    objective: Objective
    budget: float
    jobs: int
    effort: float
    progress: ProgressCallback | None
    results: dict[Setting, Prediction] = field(default_factory=dict)
    confirmed: set[Setting] = field(default_factory=set)
    refused: dict[Setting, str] = field(default_factory=dict)
    skipped: dict[Setting, None] = field(default_factory=dict)
    """What a round had no time for, in its order."""
    num_simulations: int = 0
    was_cut_off: bool = False
    """Whether a simulation was, by the end of the budget."""
    is_interrupted: bool = False
    _children: frozenset[BaseProcess] = field(default_factory=lambda: frozenset(active_children()))
    """Processes of somebody else."""
    _started_at: float = field(default_factory=time.monotonic)
    _pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "_Search":
        if self.jobs > 1:
            # A fresh process: a fork would copy whatever threads the caller has, half of them.
            # Ctrl-C goes to all processes of a terminal, and one of them has to answer it.
            self._pool = ProcessPoolExecutor(
                self.jobs,
                mp_context=get_context("spawn"),
                initializer=signal.signal,
                initargs=(signal.SIGINT, signal.SIG_IGN),
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is None:
            return
        if self.is_interrupted or error[0] is not None:  # nobody waits for what still runs
            for process in {*active_children()} - self._children:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return time.monotonic() - self._started_at

    @property
    def current(self) -> Setting:
        """The setting in force."""
        return Setting.of(self.config)

    @property
    def is_complete(self) -> bool:
        """Whether nothing was left out for want of time."""
        return not (self.is_interrupted or self.was_cut_off or self.skipped or self.rivals())

    def run_rounds(self) -> None:
        """Survey, variants, confirmation; then what was left out, and what could still win."""
        current = self.current
        self.run(Round.SURVEY, [current, *survey(self.config)])
        self.run(Round.VARIANTS, self._variants())
        best = candidates(self.found(), current, self.objective)[:NUM_CONFIRMED]
        self.run(Round.CONFIRM, [current, *best, *presets_of(current)])
        before = -1
        while self.seconds < self.budget and self.num_simulations > before:
            before = self.num_simulations
            if rivals := self.rivals():
                self.run(Round.CONFIRM, rivals[:NUM_AT_ONCE])
            elif self.skipped:
                self.run(Round.REST, [*self.skipped][:NUM_AT_ONCE])
            elif twins := self._twins():
                self.run(Round.CONFIRM, twins)
            else:
                return

    def _twins(self) -> list[Setting]:
        """The best setting with other numbers of engines, where not simulated at length yet."""
        engines = self.current.engines
        sure = [row for row in self.found() if row.setting in self.confirmed]
        best = ranked(
            [one for one in sure if one.setting.engines == engines], self.objective, TOLERANCE
        )
        return [
            setting
            for setting in sorted(self.results.keys() - self.confirmed - self.refused.keys())
            if best and dataclasses.replace(setting, engines=engines) == best[0].setting
        ]

    def _variants(self) -> list[Setting]:
        varied = candidates(self.found(), self.current, self.objective)[:NUM_VARIED]
        bases = {self.current: 0, **dict.fromkeys(varied)}
        return [one for base in bases for one in variants(base)]

    def rivals(self) -> list[Setting]:
        """What to confirm before anything can be recommended, the most promising first."""
        same = [row for row in self.found() if row.setting.engines == self.current.engines]
        found = rivals(same, self.confirmed, self.objective)
        return [setting for setting in found if setting not in self.refused]

    def found(self) -> list[Prediction]:
        """What every setting came to, in a fixed order."""
        return [self.results[setting] for setting in sorted(self.results)]

    def run(self, what: Round, settings: Sequence[Setting]) -> None:
        """Simulate them, or what the budget allows, the first ones first."""
        is_long = what is Round.CONFIRM
        known = self.confirmed if is_long else self.results.keys()
        known = known | self.refused.keys()
        waiting = [one for one in dict.fromkeys(settings) if one not in known][::-1]
        total, done = len(waiting), 0
        limit = what.ends_at * self.budget
        running: dict[Future[Prediction | None], Setting] = {}
        while waiting or running:
            while waiting and len(running) < self.jobs and self.seconds < limit:
                setting = waiting.pop()
                self.skipped.pop(setting, None)
                running[self._submit(setting, is_long)] = setting
            if not running:
                self.skipped.update(dict.fromkeys([] if is_long else waiting[::-1]))
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
        if found is None or found.num_steps < self._num_steps(is_long):
            self.was_cut_off = True
        if found is None:
            return
        before = self.results.get(setting)
        if before is None or found.num_steps >= before.num_steps:
            self.results[setting] = found
        if is_long:
            self.confirmed.add(setting)


# --- the result ---------------------------------------------------------------------------------


def _conclude(source: Path, search: _Search) -> Plan:
    objective, engines = search.objective, search.current.engines
    same = [row for row in search.found() if row.setting.engines == engines]
    others = [row for row in search.found() if row.setting.engines != engines]
    confirmed = [row for row in same if row.setting in search.confirmed] or same
    brief = [row for row in same if row not in confirmed]
    sure = ranked(confirmed, objective, TOLERANCE)
    result = Plan(
        source=str(source),
        config=search.config,
        fit=search.fit,
        objective=objective,
        rows=tuple(row for rows in (sure, *_ranked(objective, brief, others)) for row in rows),
        confirmed=frozenset(search.confirmed),
        rivals=frozenset(search.rivals()) if search.confirmed else frozenset(),
        front=frozenset(
            row.setting for row in pareto_front(confirmed) if row.setting in search.confirmed
        ),
        current=search.results.get(search.current),
        failure=search.refused.get(search.current),
        recommended=sure[0],
        why=(),
        num_simulations=search.num_simulations,
        seconds=search.seconds,
        is_complete=search.is_complete,
        is_interrupted=search.is_interrupted,
    )
    return dataclasses.replace(result, why=tuple(reasons(result, confirmed, others)))


def _ranked(objective: Objective, *parts: Sequence[Prediction]) -> Iterator[list[Prediction]]:
    return (ranked(rows, objective, TOLERANCE) for rows in parts)
