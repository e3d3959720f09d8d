"""Which of the simulated settings is best, and why."""

import dataclasses
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from headway.config import Preset
from headway.core.bound import OverBound
from headway.sim.binding import BINDING_TEXT, Binding
from headway.sim.predict import Prediction, Setting

if TYPE_CHECKING:
    from headway.sim.plan import Plan

TOLERANCE = 0.015
"""A setting this much slower than the fastest is as good as it."""
SLACK = 0.04
"""The same after a short simulation, for what is worth a longer one."""
NOTABLE = 0.02
"""The share of trimmed tokens from which on it is said."""
LONGEST_TRAINED = 0.95
"""The least share of the longest 5 % that a recommended setting trains."""


class Objective(StrEnum):
    """What the recommended setting is best at."""

    BALANCED = "balanced"
    """The youngest data among the settings within 1.5 % of the fastest."""
    FASTEST = "fastest"
    """The shortest step time."""
    YOUNGEST = "youngest"
    """The youngest data."""


def objection(row: Prediction) -> str | None:
    """Why a setting is not recommended, in words; None when it may be."""
    longest = row.longest_trained_share
    if row.guaranteed is None:
        return "guarantees no bound"
    if row.setting.over_bound is OverBound.DROP or row.dropped_share:
        return f"drops samples ({100 * row.dropped_share:.1f} %)"
    if longest is not None and longest < LONGEST_TRAINED:
        return f"trains {100 * longest:.0f} % of the longest 5 % of the rollouts"
    return None


def is_sound(row: Prediction) -> bool:
    """Whether a setting may be recommended: bounded, nothing discarded, the longest trained."""
    return objection(row) is None


def ranked(rows: Sequence[Prediction], objective: Objective, slack: float) -> list[Prediction]:
    """The best first. Only rows with the same number of engines can be compared like this.

    Ages are compared to a tenth of a version; then fewer trimmed tokens, then fewer in flight win.

    Args:
        slack: a step time this share above the shortest is as good.
    """
    limit = min((row.step_seconds for row in rows), default=0.0) * (1 + slack)

    def key(row: Prediction) -> tuple[Any, ...]:
        setting = row.setting
        is_odd = setting.policy != Preset.RECOMMENDED
        last = (row.trimmed_share, setting.max_concurrent, is_odd, setting)
        age, step = round(row.head_age_mean, 1), row.step_seconds
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


def candidates(rows: Sequence[Prediction], current: Setting, objective: Objective) -> list[Setting]:
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
    """Rows than which no other is both faster and younger, the fastest first; of those that come
    to the same, the simplest."""

    def key(row: Prediction) -> tuple[Any, ...]:
        setting = row.setting
        is_odd = setting.policy != Preset.RECOMMENDED
        same = float(f"{row.step_seconds:.4g}"), round(row.head_age_mean, 2)
        return (*same, not is_sound(row), setting.max_concurrent, is_odd, setting)

    front: list[Prediction] = []
    for row in sorted(rows, key=key):
        if not front or key(row)[1] < key(front[-1])[1]:
            front.append(row)
    return front


def reasons(
    plan: "Plan", confirmed: Sequence[Prediction], others: Sequence[Prediction]
) -> Iterator[str]:
    """Why this setting, in sentences."""
    best, current = plan.recommended, plan.current
    fastest = min(confirmed, key=lambda row: row.step_seconds)
    behind = best.step_seconds / fastest.step_seconds - 1
    yield (
        f"{best.step_seconds:.3g} s a step, {100 * behind:.1f} % behind the fastest simulated "
        f"({_named(fastest)}), at a mean head age of {best.head_age_mean:.2f}"
    )
    yield f"What limits it: {BINDING_TEXT[best.binding]} ({best.evidence})"
    refused = objection(fastest)
    if behind > TOLERANCE and refused is not None:
        yield f"That one is not recommended: it {refused}"
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
    if best.trimmed_share >= NOTABLE:
        yield f"Its price: {100 * best.trimmed_share:.0f} % of the tokens are trimmed"
    for row in sorted(others, key=lambda row: row.setting.engines):
        if _same_but_engines(row.setting, best.setting):
            change = row.step_seconds / best.step_seconds - 1
            yield f"With engine.count {row.setting.engines}: step time {100 * change:+.1f} %"
    if best.binding is Binding.ENGINES:
        yield "More S or concurrency cannot help: only faster or more engines can"
    if best.is_extrapolated:
        yield (
            "The recorded run never had this many, or this few, requests in flight: what the "
            "engines do then is extrapolated"
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
