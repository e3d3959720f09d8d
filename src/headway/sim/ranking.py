"""Which of the simulated settings is best, and why."""

import dataclasses
from collections.abc import Iterator, Sequence, Set
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
MUCH_TRIMMED = 0.2
"""The share of trimmed tokens from which on the recommendation warns of it."""
FASTER = 0.002
"""A step time less this share shorter is no other step time."""
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

    Ages are compared to a tenth of a version; then fewer trimmed tokens (to a per cent), then fewer
    in flight win. But a setting never comes before a sound one that beats it (`beats`) and trims no
    more.

    Args:
        slack: a step time this share above the shortest is as good.
    """
    limit = min((row.step_seconds for row in rows), default=0.0) * (1 + slack)

    def key(row: Prediction) -> tuple[Any, ...]:
        setting = row.setting
        is_odd = setting.policy != Preset.RECOMMENDED
        trimmed = round(row.trimmed_share, 2)
        last = (trimmed, setting.max_concurrent, is_odd, row.trimmed_share, setting)
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

    result: list[Prediction] = []
    for row in sorted(rows, key=key):
        # Beating is transitive, so whoever must come later is found by looking from the end.
        at = len(result)
        for index in range(len(result) - 1, -1, -1):
            if is_sound(row) and beats(row, result[index]) and _trims_no_more(row, result[index]):
                at = index
        result.insert(at, row)
    return result


def beats(one: Prediction, other: Prediction) -> bool:
    """Whether it is no slower and no older, and one of the two is better, as far as tables show:
    three digits of the step time, hundredths of a version."""
    first, second = _shown(one), _shown(other)
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))


def _shown(row: Prediction) -> tuple[float, float]:
    return float(f"{row.step_seconds:.3g}"), round(row.head_age_mean, 2)


def _trims_no_more(one: Prediction, other: Prediction) -> bool:
    return round(one.trimmed_share, 2) <= round(other.trimmed_share, 2)


def rivals(
    rows: Sequence[Prediction], confirmed: Set[Setting], objective: Objective
) -> list[Setting]:
    """Settings that were simulated only briefly, and would change the recommendation if a long
    simulation came to the same: they would be recommended, beat what is, or be the fastest.

    Args:
        rows: with the same number of engines.
        confirmed: what was simulated at length.
    """
    sure = [row for row in rows if row.setting in confirmed]
    unsure = [row for row in rows if row.setting not in confirmed]
    if not sure:
        return [row.setting for row in ranked(unsure, objective, TOLERANCE)]
    best, everything = ranked(sure, objective, TOLERANCE)[0], ranked(rows, objective, TOLERANCE)
    least = min(row.step_seconds for row in sure) * (1 - FASTER)
    before = everything[: everything.index(best)]
    return [
        row.setting
        for row in everything
        if row.setting not in confirmed
        and (row in before or beats(row, best) or row.step_seconds < least)
    ]


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
    """Why this setting, in sentences.

    Args:
        confirmed: what was compared: settings at the present number of engines.
        others: settings with another number of engines.
    """
    best = plan.recommended
    fastest = min(confirmed, key=lambda row: (row.step_seconds, row is not best))
    behind = _change(best.step_seconds, fastest.step_seconds)
    how = "at length" if plan.confirmed else "briefly (none was at length)"
    if fastest is best:
        yield (
            f"{best.step_seconds:.3g} s a step, the fastest of the settings simulated {how}, at a "
            f"mean head age of {best.head_age_mean:.2f}"
        )
    else:
        yield (
            f"{best.step_seconds:.3g} s a step, {100 * behind:.1f} % behind the fastest simulated "
            f"{how} ({_named(fastest)}), at a mean head age of {best.head_age_mean:.2f}"
        )
    yield f"What limits it: {BINDING_TEXT[best.binding]} ({best.evidence})"
    refused = objection(fastest)
    if behind > TOLERANCE and refused is not None:
        yield f"That one is not recommended: it {refused}"
    yield from _better_ones(best, confirmed)
    if not is_sound(best):
        yield (
            "No setting tried is bounded, discards nothing and trains the longest rollouts: this "
            f"is only the best of the others. It {objection(best)}"
        )
    yield from _against_current(best, plan.current)
    if plan.failure is not None:
        yield f"WARNING: the setting in force failed in a longer simulation: {plan.failure}"
    yield from _trimming(best)
    for row in sorted(others, key=lambda row: row.setting.engines):
        if _same_but_engines(row.setting, best.setting):
            change = _change(row.step_seconds, best.step_seconds)
            doubt = "" if row.setting in plan.confirmed else " (simulated only briefly)"
            yield f"With engine.count {row.setting.engines}: step time {100 * change:+.1f} %{doubt}"
    if best.binding is Binding.ENGINES:
        yield "More S or concurrency cannot help: only faster or more engines can"
    if best.is_extrapolated:
        yield (
            "The recorded run never had this many, or this few, requests in flight: what the "
            "engines do then is extrapolated"
        )
    yield from _doubts(plan)


def _better_ones(best: Prediction, confirmed: Sequence[Prediction]) -> Iterator[str]:
    """What stands in the table as faster and younger, and why it is not recommended."""
    found = [row for row in confirmed if beats(row, best)]
    if not found:
        return
    row = min(found, key=lambda row: (not is_sound(row), row.head_age_mean, row.step_seconds))
    why = objection(row) or (
        f"trims more ({_percent(row.trimmed_share)} of the tokens instead of "
        f"{_percent(best.trimmed_share)})"
    )
    more = f", nor are {len(found) - 1} others like it" if len(found) > 1 else ""
    yield (
        f"No slower and no older, but not recommended{more}: {_named(row)} "
        f"({row.step_seconds:.3g} s, age {row.head_age_mean:.2f}): it {why}"
    )


def _against_current(best: Prediction, current: Prediction | None) -> Iterator[str]:
    if current is None:
        return
    if current.setting == best.setting:
        yield "This is the setting in force: nothing to change"
        return
    step = _change(best.step_seconds, current.step_seconds)
    yield (
        f"Against the setting in force ({_named(current)}): step time {100 * step:+.1f} %, "
        f"mean head age {current.head_age_mean:.2f} -> {best.head_age_mean:.2f}, "
        f"guaranteed {_bound(current)} -> {_bound(best)}"
    )


def _trimming(best: Prediction) -> Iterator[str]:
    """The price in tokens, and a warning when it is high: ages cannot show it."""
    if best.trimmed_share < NOTABLE:
        return
    text = f"{_percent(best.trimmed_share)} of the tokens are trimmed"
    kept = best.longest_5pct_trained_token_share
    if kept is not None:
        text += f"; of those of the longest 5 % of the rollouts, {_percent(kept)} are trained"
    if best.trimmed_share < MUCH_TRIMMED:
        yield f"Its price: {text}"
    else:
        yield (
            f"WARNING: {text}. They are generated for nothing, most of them the beginnings of long "
            "rollouts; the age looks low for that reason, too. A higher S trims fewer"
        )


def _doubts(plan: "Plan") -> Iterator[str]:
    if plan.is_interrupted:
        yield "The search was interrupted: this is the best of what had been found by then"
    elif not plan.is_complete:
        yield (
            f"The search used its budget up ({plan.seconds:.0f} s) and was not done: a larger "
            "--budget may find better"
        )
    if plan.rivals:
        several = len(plan.rivals) > 1
        yield (
            f"{len(plan.rivals)} setting{'s' * several} looked better in a short simulation (~) "
            f"and {'were' if several else 'was'} not simulated at length"
        )
    if plan.fit is not None:
        for note in plan.fit.notes:
            yield f"Fitted to the run: {note}"


def _change(new: float, old: float) -> float:
    """As a share of the old; 0 when there is nothing to compare with."""
    return new / old - 1 if old else 0.0


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _same_but_engines(one: Setting, other: Setting) -> bool:
    return dataclasses.replace(one, engines=other.engines) == other


def _named(row: Prediction) -> str:
    setting = row.setting
    return f"S = {setting.max_head_offpolicyness}, {setting.max_concurrent} in flight, " + (
        setting.policy
    )


def _bound(row: Prediction) -> str:
    return "none" if row.guaranteed is None else str(row.guaranteed)
