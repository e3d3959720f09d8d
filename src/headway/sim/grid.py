"""The settings that a plan tries."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from headway.config import PRESETS, Config, Preset
from headway.core.bound import OverBound
from headway.core.order import Order
from headway.core.pacing import Pacing
from headway.sim.predict import Setting

AGES = (4, 1, 8, 2, 6, 0, 3)
"""`S` in the survey, beside the one in force; those that tell most come first, in case that the
budget ends."""

FILLS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
"""Concurrency in the survey, in batches; at most `S + 1` of them have an effect."""


def survey(config: Config) -> Iterator[Setting]:
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


def presets_of(base: Setting) -> list[Setting]:
    """The named policies at the same `S` and concurrency, as `PRESETS` has them in order."""
    changes: list[dict[str, Any]] = [dict(preset) for preset in PRESETS.values()]
    return [dataclasses.replace(base, window=None, **change) for change in changes]


def variants(base: Setting) -> Iterator[Setting]:
    """The same `S` and concurrency under other policies, and with other numbers of engines."""
    yield from presets_of(base)
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
