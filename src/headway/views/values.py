"""Reading values out of metric rows that may lack them, and writing values for people."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""A metric row, or any mapping inside one."""

UNKNOWN = "-"
"""Shown for a value that is missing or null."""

BLOCKS = "▁▂▃▄▅▆▇█"


def value(row: object, *keys: str) -> Any:
    """The value under nested keys; None when any of them is missing."""
    for key in keys:
        if not isinstance(row, Mapping):
            return None
        row = row.get(key)
    return row


def number(row: object, *keys: str) -> float | None:
    """The number under nested keys; None when it is missing, not a number, or not finite."""
    found = value(row, *keys)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return float(found)


def integer(row: object, *keys: str) -> int | None:
    """As `number`, rounded down."""
    found = number(row, *keys)
    return None if found is None else math.floor(found)


def section(row: object, *keys: str) -> Row:
    """The mapping under nested keys; an empty one when it is missing or not a mapping."""
    found = value(row, *keys)
    return found if isinstance(found, Mapping) else {}


def listing(row: object, *keys: str) -> list[Any]:
    """The list under nested keys; an empty one when it is missing or not a list."""
    found = value(row, *keys)
    return list(found) if isinstance(found, list | tuple) else []


def known(values: Iterable[float | None]) -> list[float]:
    """Without the missing ones."""
    return [one for one in values if one is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of those that are known; None when there are none."""
    found = known(values)
    return sum(found) / len(found) if found else None


# --- writing ------------------------------------------------------------------------------------


def decimal(number: float | None, digits: int = 3) -> str:
    """A number with a fixed number of decimals."""
    return UNKNOWN if number is None else f"{number:.{digits}f}"


def count(number: float | None) -> str:
    """A count: 1,234 or 1.23 M."""
    if number is None:
        return UNKNOWN
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if abs(number) >= size:
            return f"{number / size:.3g} {unit}"
    if 0 < abs(number) < 10 and number != int(number):
        return f"{number:.1f}"
    return f"{number:,.0f}"


def share(number: float | None) -> str:
    """A share of one as per cent."""
    return UNKNOWN if number is None else f"{100 * number:.0f} %"


def seconds(number: float | None) -> str:
    """A short duration with its unit: 340 ms, 2.36 s; from two minutes on as a clock."""
    if number is None:
        return UNKNOWN
    if number < 0.9995:
        return f"{1000 * number:.0f} ms"
    return f"{number:.3g} s" if number < 120 else clock(number)


def clock(number: float | None) -> str:
    """Seconds as m:ss or h:mm:ss."""
    if number is None:
        return UNKNOWN
    minutes, left = divmod(int(number), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def _mean(points: Sequence[float]) -> float:
    return sum(points) / len(points)


def resampled(
    values: Sequence[float], size: int, pool: Callable[[Sequence[float]], float] = _mean
) -> list[float]:
    """At most `size` values, one for each of as many equal stretches, in order: their means."""
    if len(values) <= size:
        return list(values)
    edges = [len(values) * i // size for i in range(size + 1)]
    return [pool(values[a:b]) for a, b in itertools.pairwise(edges) if b > a]


def sparkline(values: Sequence[float], width: int) -> str:
    """A small plot in one line of at most `width` characters, scaled to its own range."""
    points = resampled(values, width)
    low, high = min(points, default=0.0), max(points, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((point - low) * scale)] for point in points)


def reasons(counts: Row) -> str:
    """Counts by reason, the most frequent first: `zero_advantage 12, truncated 3`."""
    found = {name: integer(counts, name) or 0 for name in counts}
    order = sorted(found.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {total:,}" for name, total in order if total)
