"""Distributions by their inverse: a uniform number in, a value out.

One uniform number makes one value, so a draw is a pure function of what it is drawn for
(`sim/workload.py`), and two runs that ask in another order get the same values.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import assert_never

import numpy as np

from headway.config import DistributionConfig
from headway.errors import ConfigError

Inverse = Callable[[float], float]
"""The inverse of a distribution function: from (0, 1) to values; it never falls."""

BETA_POINTS = 2048
"""Resolution of the Beta distribution's table."""

_normal = NormalDist().inv_cdf


def inverse_of(config: DistributionConfig) -> Inverse:
    """The inverse of a stated distribution. Raises ConfigError when its file cannot be used.

    Example:
        >>> inverse_of(DistributionConfig(kind="uniform", low=2, high=4))(0.25)
        2.5
    """
    inverse = _uncut(config)
    if (limit := config.max) is None:
        return inverse
    return lambda uniform: min(inverse(uniform), limit)


def _uncut(config: DistributionConfig) -> Inverse:
    match config.kind:
        case "constant":
            value = config.value
            return lambda _: value
        case "uniform":
            low, width = config.low, config.high - config.low
            return lambda uniform: low + width * uniform
        case "lognormal":
            return _lognormal(config.median, config.sigma)
        case "bimodal":
            first = _lognormal(config.median, config.sigma)
            second = _lognormal(config.second_median, config.second_sigma)
            return _either(first, second, config.share)
        case "long_tail":
            power = -1 / config.alpha
            least = config.median * 0.5 ** (1 / config.alpha)
            return lambda uniform: least * (1 - uniform) ** power
        case "empirical":
            if config.quantiles:
                return _interpolated(config.quantiles)
            return _one_of(config.values or _read(Path(config.file or "")))
        case _:
            assert_never(config.kind)


def _lognormal(median: float, sigma: float) -> Inverse:
    if sigma == 0:
        return lambda _: median
    exp = math.exp
    return lambda uniform: median * exp(sigma * _normal(uniform))


def _either(first: Inverse, second: Inverse, share: float) -> Inverse:
    """The second with probability `share`; which one is decided by the same uniform number."""

    def inverse(uniform: float) -> float:
        if uniform < 1 - share:
            return first(uniform / (1 - share))
        return second(min(max((uniform - 1 + share) / share, 1e-12), 1 - 1e-12))

    return inverse if share else first


def _one_of(values: Sequence[float]) -> Inverse:
    ranked = sorted(values)
    count = len(ranked)
    return lambda uniform: ranked[int(uniform * count)]


def _interpolated(points: Sequence[tuple[float, float]]) -> Inverse:
    probabilities = [point[0] for point in points]
    values = [point[1] for point in points]

    def inverse(uniform: float) -> float:
        above = bisect_right(probabilities, uniform)
        if above == 0:
            return values[0]
        if above == len(values):
            return values[-1]
        low, high = probabilities[above - 1], probabilities[above]
        share = (uniform - low) / (high - low)
        return values[above - 1] + share * (values[above] - values[above - 1])

    return inverse


def _read(path: Path) -> list[float]:
    """The numbers in a text file, one a line. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"simulate: cannot read the values in {path}: {error}; give a text file with one "
            "number a line"
        ) from error
    values = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ConfigError(f"{path}:{number}: {text!r:.60} is no number from 0 up")
        values.append(value)
    if not values:
        raise ConfigError(f"{path} holds no values; give one number a line")
    return values


def beta_inverse(mean: float, spread: float) -> Inverse:
    """Beta distribution of a probability with this mean, whose variance is `spread` times the
    largest that the mean allows, `mean * (1 - mean)`. Spread 0 is the mean itself.

    From a table, which is exact to about 1e-3 and spares a special function.
    """
    if spread == 0 or mean in (0, 1):
        return lambda _: mean
    size = 1 / spread - 1
    drawn = np.random.default_rng(0).beta(mean * size, (1 - mean) * size, 64 * BETA_POINTS)
    return _one_of(np.sort(drawn)[32::64].tolist())


def curve_of(points: Sequence[tuple[float, float]]) -> Callable[[int], float]:
    """An engine's throughput by number of running requests: linear between the points, in
    proportion below the first, constant beyond the last.

    Example:
        >>> curve_of([(1, 60), (8, 400)])(8)
        400.0
    """
    xs = [0.0, *(point[0] for point in points)]
    ys = [0.0, *(point[1] for point in points)]
    return lambda num_running: float(np.interp(num_running, xs, ys))
