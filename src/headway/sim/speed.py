"""How fast an engine was under load, from the times at which its requests started and ended.

A request that sampled `L` tokens while `n(t)` requests were running had

    L = integral of curve(n(t)) / n(t) dt

of the engine, since running requests share it equally. A larger batch is never slower in all, and
gains less and less by every further request: so the curve is a sum of `a_k * min(n, k)` with no
negative `a_k`, over a few loads `k` at which it may bend. That makes one linear equation per
request in the `a_k`, and least squares without negative coefficients finds them.

Below the loads that the run had, the curve follows what is usual for engines: the time of a token,
which all running requests get at once, is affine in their number. Above, it stays constant.
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
    min_load: float
    max_load: float
    """Requests that one engine ran at once: fewer only 5 % of the time that it ran any, and the
    most. Outside, the curve is a guess."""
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
    if slots is not None:  # an end is noticed a little late: two requests in one slot
        load = np.minimum(load, slots)
    seconds = np.diff(grid) * _thawed(grid, requests.frozen)
    bends = _bends(float(load.max()))
    first, last = np.searchsorted(grid, begins), np.searchsorted(grid, ends)

    def per_request(columns: Floats) -> Floats:
        """Integrals of columns (one row per cell of the grid) over the time of each request."""
        done = np.vstack([np.zeros(columns.shape[1]), np.cumsum(columns * seconds[:, None], 0)])
        return np.asarray(done[last] - done[first])

    tokens = requests.num_tokens
    gained = per_request(np.minimum(load[:, None], bends) / np.maximum(load, 1e-9)[:, None])
    # Long rollouts scatter more: the weight makes the equations comparable.
    weight = 1 / np.sqrt(np.maximum(tokens, 1.0))
    gains = nonnegative_fit(gained * weight[:, None], tokens * weight)
    gains *= tokens.sum() / max(float((gained @ gains).sum()), 1e-9)
    rates = np.minimum(bends[:, None], bends) @ gains
    least = _least(load, seconds)
    time = per_request(np.column_stack([np.ones_like(load), load / load.max()]))
    return Speed(
        points=_with_usual_start(bends, rates, least, *_token_seconds(time, tokens)),
        min_load=least,
        max_load=float(load.max()),
        error=_error(ends, tokens, gained @ gains),
    )


def _token_seconds(time: Floats, tokens: Floats) -> tuple[float, float]:
    """Seconds of a token, alone and what the largest load adds to them.

    Args:
        time: of each request, its seconds, and these times its mean load as a share of the largest.
    """
    mean_load = time[:, 1] / np.maximum(time[:, 0], 1e-9)
    weight = 1 / np.sqrt(np.maximum(tokens, 1.0))
    columns = np.column_stack([tokens, tokens * mean_load]) * weight[:, None]
    alone, added = nonnegative_fit(columns, time[:, 0] * weight)
    return float(alone), float(added)


def _with_usual_start(
    bends: Floats, rates: Floats, least: float, alone: float, added: float
) -> tuple[tuple[float, float], ...]:
    """The fitted curve from `least` on, and below it the usual shape, scaled to meet it."""

    def usual(load: Floats) -> Floats:
        return np.asarray(load / (alone + added * load / bends[-1]))

    joint = min(max(least, 1.0), float(bends[-1]))
    at_joint = float(np.interp(joint, bends, rates))
    below = bends[bends < joint]
    start = usual(below) * at_joint / usual(np.array(joint)) if alone + added > 0 else below
    above = bends > joint
    loads = [*below, joint, *bends[above]]
    return tuple(zip(map(float, loads), map(float, [*start, at_joint, *rates[above]]), strict=True))


def _bends(most: float) -> Floats:
    """Loads at which the curve may bend: one per doubling, up to the largest."""
    num = max(int(np.log2(max(most, 1.0))), 0)
    return np.unique([1.0, *(most / 2.0**power for power in range(num, -1, -1) if most > 1)])


def _least(load: Floats, seconds: Floats) -> float:
    """The load that the engine had at least, 95 % of the time in which it ran anything."""
    busy = (load > 0) & (seconds > 0)
    order = np.argsort(load[busy])
    time = np.cumsum(seconds[busy][order])
    if not len(time):
        return 0.0
    return float(load[busy][order][np.searchsorted(time, 0.05 * time[-1])])


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


def nonnegative_fit(columns: Floats, wanted: Floats) -> Floats:
    """Least squares without negative coefficients (active-set method); for a few columns."""
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
