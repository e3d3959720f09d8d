"""How fast an engine was under load, from the times at which its requests started and ended.

A request that sampled `L` tokens while `n(t)` requests were running had

    L = integral of curve(n(t)) / n(t) dt

of the engine, since running requests share it equally. With a curve that is linear between knots
this is one linear equation per request in the curve's values at the knots. Least squares, under the
condition that the curve does not fall, finds them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What the engines served: one entry per rollout in each array (seconds; tokens).

    `frozen` are the spans in which engines sampled nothing, `(from, to)`, in order.
    """

    started_at: Floats
    ended_at: Floats
    num_tokens: Floats
    frozen: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of one engine: `points` are `(running requests, tokens per second of all)`."""

    points: tuple[tuple[float, float], ...]
    max_load: float
    """Most requests that one engine ran at once."""
    error: float
    """Root mean square, over equal stretches of the run, of what the curve is off, as a share."""

    def at(self, load: float) -> float:
        """Tokens per second with this many running requests: in proportion below the first point,
        constant beyond the last."""
        loads, rates = zip(*self.points, strict=True)
        if load <= loads[0]:
            return float(rates[0] * load / loads[0])
        return float(np.interp(load, loads, rates))


def served_from(started_at: Floats, ended_at: Floats, num_slots: int) -> Floats:
    """When each request left the queue, if at most `num_slots` run, first in first out."""
    begins = np.empty_like(started_at)
    running: list[float] = []
    for index in np.argsort(started_at, kind="stable"):
        at, end = float(started_at[index]), float(ended_at[index])
        while running and running[0] <= at:
            heapq.heappop(running)
        if len(running) >= num_slots:
            at = heapq.heappop(running)
        begins[index] = min(at, end)
        heapq.heappush(running, end)
    return begins


def fit_speed(requests: Requests, *, num_engines: int, slots: int | None) -> Speed:
    """Fit the curve; engines are alike and share the load evenly.

    Args:
        slots: requests that one engine runs at once; None: all of them run.
    """
    begins, ends = requests.started_at, requests.ended_at
    if slots is not None:
        begins = served_from(begins, ends, slots * num_engines)
    grid = np.unique(np.concatenate([begins, ends, np.ravel(list(requests.frozen))]))
    load = _load(grid, begins, ends) / num_engines
    seconds = np.diff(grid) * _thawed(grid, requests.frozen)
    knots = _knots(load, seconds)
    basis = _hats(load, knots) * (seconds / np.maximum(load, 1e-9))[:, None]
    done = np.vstack([np.zeros(len(knots)), np.cumsum(basis, axis=0)])
    per_request = done[np.searchsorted(grid, ends)] - done[np.searchsorted(grid, begins)]
    rates = _rising_fit(per_request, requests.num_tokens)
    fitted = per_request @ rates
    rates = rates * (requests.num_tokens.sum() / max(fitted.sum(), 1e-9))
    return Speed(
        points=tuple(zip(knots.tolist(), rates.tolist(), strict=True)),
        max_load=float(load.max()),
        error=_error(ends, requests.num_tokens, per_request @ rates),
    )


def _load(grid: Floats, begins: Floats, ends: Floats) -> Floats:
    """Requests that run between each instant of the grid and the next."""
    change = np.zeros(len(grid))
    np.add.at(change, np.searchsorted(grid, begins), 1)
    np.add.at(change, np.searchsorted(grid, ends), -1)
    return np.cumsum(change)[:-1]


def _thawed(grid: Floats, frozen: Sequence[tuple[float, float]]) -> Floats:
    """1 where the engines sample, 0 where they stand still."""
    samples = np.ones(len(grid) - 1)
    for start, end in frozen:
        samples[np.searchsorted(grid, start) : np.searchsorted(grid, end)] = 0.0
    return samples


def _knots(load: Floats, seconds: Floats) -> Floats:
    """Loads at which the curve may bend: about one per doubling, where the run spent its time."""
    busy = load > 0
    order = np.argsort(load[busy])
    time = np.cumsum(seconds[busy][order])
    if not len(time) or time[-1] <= 0:
        return np.ones(1)
    least, most = load[busy].min(), load[busy].max()
    knots = [max(float(most), 1.0)]
    while knots[0] / 2 > max(least, 1.0):
        knots.insert(0, knots[0] / 2)
    if knots[0] > 1:
        knots.insert(0, 1.0)
    # A knot with hardly any time on both sides says nothing: leave it out.
    kept = [knots[-1]]
    sorted_load = load[busy][order]
    for knot in reversed(knots[:-1]):
        below = float(np.interp(knot, sorted_load, time))
        upto = float(np.interp(kept[0], sorted_load, time))
        if upto - below > 0.01 * time[-1] and below > 0.01 * time[-1]:
            kept.insert(0, knot)
    return np.array(kept)


def _hats(load: Floats, knots: Floats) -> Floats:
    """Weights of the knots' values in the curve at each load; in proportion below the first."""
    weights = np.zeros((len(load), len(knots)))
    right = np.clip(np.searchsorted(knots, load), 1, max(len(knots) - 1, 1))
    rows = np.arange(len(load))
    below = load <= knots[0]
    weights[below, 0] = load[below] / knots[0]
    if len(knots) > 1:
        low, high = knots[right - 1], knots[right]
        part = np.clip((load - low) / (high - low), 0.0, 1.0)
        inside = ~below
        weights[rows[inside], right[inside]] = part[inside]
        weights[rows[inside], right[inside] - 1] = 1 - part[inside]
    else:
        weights[~below, 0] = 1.0
    return weights


def _rising_fit(columns: Floats, wanted: Floats) -> Floats:
    """Values at the knots that do not fall and fit best in least squares."""
    num_knots = columns.shape[1]
    steps = np.tril(np.ones((num_knots, num_knots)))  # values are sums of increments >= 0
    # Long rollouts scatter more: weights make the equations comparable.
    weight = 1 / np.sqrt(np.maximum(wanted, 1.0))
    increments = _nonnegative_fit((columns @ steps) * weight[:, None], wanted * weight)
    return steps @ increments


def _nonnegative_fit(columns: Floats, wanted: Floats) -> Floats:
    """Least squares with no negative coefficient, by the active-set method; a handful of columns."""
    gram, target = columns.T @ columns, columns.T @ wanted
    free = np.zeros(len(target), bool)
    values = np.zeros(len(target))
    for _ in range(10 * len(target) + 10):
        slope = target - gram @ values
        candidates = np.where(free, -np.inf, slope)
        best = int(np.argmax(candidates))
        if candidates[best] <= 1e-9 * max(float(np.abs(target).max()), 1e-30):
            break
        free[best] = True
        while True:
            trial = np.zeros(len(target))
            chosen = np.flatnonzero(free)
            trial[chosen] = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], target[chosen])[0]
            if (trial[chosen] > 0).all():
                values = trial
                break
            negative = chosen[trial[chosen] <= 0]
            back = values[negative] / np.maximum(values[negative] - trial[negative], 1e-30)
            values = values + float(back.min()) * (trial - values)
            free &= values > 1e-12
            if not free.any():
                break
    return values


def _error(ends: Floats, wanted: Floats, fitted: Floats, num_stretches: int = 20) -> float:
    order = np.argsort(ends)
    shares = [
        fitted[part].sum() / max(wanted[part].sum(), 1.0) - 1
        for part in np.array_split(order, min(num_stretches, len(order)))
    ]
    return float(np.sqrt(np.mean(np.square(shares))))
