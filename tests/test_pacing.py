"""Just-in-time pacing: the controller's properties, and how it settles on a model of the loop."""

import heapq
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.gate import CapacityGate
from headway.core.pacing import BatchTaken, JustInTime, PacingState
from headway.errors import InvariantError

SYNC_SECONDS = 0.2
TRAIN_SECONDS = 10.0
MEMORY = 48
"""Batches after which nothing is left of what was seen before."""

Latency = Callable[[random.Random, float], float]
"""Seconds of one sample, from chance and the time of its admission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run: mean age, seconds per step, and the limit after every batch."""

    age: float
    step_seconds: float
    limits: list[int]


class Model:
    """Admission, completion and a trainer of constant speed, as events; no loop of Headway's.

    Oldest finished samples first; admission is held while new weights are loaded.
    """

    def __init__(
        self,
        latency: Latency,
        *,
        seed: int,
        pacing: JustInTime | None = None,
        batch_size: int = 32,
        staleness: int = 8,
        max_concurrent: int = 10**9,
        accept: float = 1.0,
        train_seconds: Callable[[int], float] = lambda step: TRAIN_SECONDS,
    ) -> None:
        self._gate = CapacityGate(
            max_head_offpolicyness=staleness, batch_size=batch_size, max_concurrent=max_concurrent
        )
        self._latency = latency
        self._chance = random.Random(seed)
        self._pacing = pacing
        self._accept = accept
        self._train_seconds = train_seconds
        self._now = 0.0
        self._version = self._num_admitted = self._num_accepted = 0
        self._serves_at: float | None = None
        self._running: list[tuple[float, int, int]] = []
        self._buffer: list[tuple[int, int]] = []

    def run(self, steps: int) -> Outcome:
        ages, limits, size = [], [], self._gate.batch_size
        self._admit()
        for step in range(steps):
            num_ready = len(self._buffer)
            if step:
                self._serves_at = self._now + SYNC_SECONDS
            self._advance(until=math.inf, full=size)
            if step and self._pacing:
                num_unbatched = len(self._buffer) + len(self._running)
                self._pacing.batch_taken(
                    BatchTaken(num_ready=num_ready, num_unbatched=num_unbatched)
                )
                limits.append(self._pacing.limit())
            ages += [step - heapq.heappop(self._buffer)[1] for _ in range(size)]
            self._admit()
            self._advance(until=self._now + self._train_seconds(step))
        return Outcome(age=sum(ages) / len(ages), step_seconds=self._now / steps, limits=limits)

    def _admit(self) -> None:
        if self._serves_at is not None:
            return
        slots = self._gate.slots(self._version, self._num_accepted, len(self._running))
        if self._pacing:
            unbatched = len(self._buffer) + len(self._running)
            slots = min(slots, self._pacing.limit() - unbatched)
        for _ in range(slots):
            ends_at = self._now + self._latency(self._chance, self._now)
            heapq.heappush(self._running, (ends_at, self._num_admitted, self._version))
            self._num_admitted += 1

    def _advance(self, *, until: float, full: int | None = None) -> None:
        while full is None or len(self._buffer) < full:
            ends_at = self._running[0][0] if self._running else math.inf
            serves_at = math.inf if self._serves_at is None else self._serves_at
            if min(ends_at, serves_at) > until:
                break
            self._now = min(ends_at, serves_at)
            if serves_at <= ends_at:
                self._version += 1
                self._serves_at = None
            else:
                _, number, version = heapq.heappop(self._running)
                if self._chance.random() < self._accept:
                    heapq.heappush(self._buffer, (number, version))
                    self._num_accepted += 1
            self._admit()
        if until < math.inf:
            self._now = until


def lognormal(median: float = 20.0, sigma: float = 1.0) -> Latency:
    return lambda chance, now: chance.lognormvariate(math.log(median), sigma)


def both(
    latency: Latency,
    *,
    seed: int,
    steps: int = 300,
    batch_size: int = 32,
    staleness: int = 8,
    max_concurrent: int = 10**9,
    accept: float = 1.0,
    train_seconds: Callable[[int], float] = lambda step: TRAIN_SECONDS,
) -> tuple[Outcome, Outcome]:
    """The same workload under `fill` and just in time."""

    def run(pacing: JustInTime | None) -> Outcome:
        return Model(
            latency,
            seed=seed,
            pacing=pacing,
            batch_size=batch_size,
            staleness=staleness,
            max_concurrent=max_concurrent,
            accept=accept,
            train_seconds=train_seconds,
        ).run(steps)

    ceiling = (staleness + 1) * batch_size
    return run(None), run(JustInTime(batch_size=batch_size, ceiling=ceiling))


# --- the controller alone -------------------------------------------------------------------------

seen_batches = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000)), max_size=120)
sizes = st.integers(1, 64)
staleness_or_none = st.none() | st.integers(0, 64)


def controller(size: int, staleness: int | None, state: PacingState | None = None) -> JustInTime:
    ceiling = None if staleness is None else (staleness + 1) * size
    return JustInTime(batch_size=size, ceiling=ceiling, state=state)


@given(sizes, staleness_or_none, seen_batches)
def test_the_limit_lets_a_batch_fill_and_keeps_to_the_ceiling(
    size: int, staleness: int | None, seen: list[tuple[int, int]]
) -> None:
    pacing = controller(size, staleness)
    for num_ready, others in [(size, 0), *seen]:
        assert pacing.limit() >= size
        assert staleness is None or pacing.limit() <= (staleness + 1) * size
        assert len(pacing.state.needs) <= MEMORY
        pacing.batch_taken(BatchTaken(num_ready=num_ready, num_unbatched=size + others))


@given(sizes, staleness_or_none, seen_batches, st.integers(0, 120))
def test_a_controller_built_from_its_state_goes_on_the_same(
    size: int, staleness: int | None, seen: list[tuple[int, int]], cut: int
) -> None:
    whole = controller(size, staleness)
    resumed = controller(size, staleness)
    for number, (num_ready, others) in enumerate(seen):
        if number == cut:
            saved = json.loads(json.dumps(asdict(resumed.state)))
            resumed = controller(size, staleness, PacingState(needs=tuple(saved["needs"])))
        batch = BatchTaken(num_ready=num_ready, num_unbatched=size + others)
        whole.batch_taken(batch)
        resumed.batch_taken(batch)
        assert resumed.limit() == whole.limit()
    assert resumed.state == whole.state


@given(sizes, st.integers(0, 63), st.integers(0, 500))
def test_a_shortage_raises_the_limit_at_once(size: int, num_ready: int, others: int) -> None:
    num_ready = min(num_ready, size - 1)
    pacing = controller(size, None)
    limit = pacing.limit()
    pacing.batch_taken(BatchTaken(num_ready=num_ready, num_unbatched=max(limit, size) + others))
    assert pacing.limit() > limit + others


@given(sizes, staleness_or_none, seen_batches, st.integers(0, 200))
def test_the_limit_comes_down_to_what_is_needed_once_the_past_is_forgotten(
    size: int, staleness: int | None, seen: list[tuple[int, int]], running: int
) -> None:
    pacing = controller(size, staleness)
    for num_ready, others in seen:
        pacing.batch_taken(BatchTaken(num_ready=num_ready, num_unbatched=size + others))
    for _ in range(MEMORY):
        buffered = size + 7
        pacing.batch_taken(BatchTaken(num_ready=buffered, num_unbatched=buffered + running))
    need = size + running
    assert pacing.limit() == (need if staleness is None else min(need, (staleness + 1) * size))


def test_an_empty_state_is_a_new_run_and_impossible_counts_are_refused() -> None:
    pacing = JustInTime(batch_size=32, ceiling=288, state=PacingState())
    assert pacing.state == JustInTime(batch_size=32, ceiling=288).state
    for num_ready, num_unbatched in [(-1, 40), (8, 31)]:
        with pytest.raises(InvariantError, match=r"batch of 32 samples .* includes it"):
            pacing.batch_taken(BatchTaken(num_ready=num_ready, num_unbatched=num_unbatched))


# --- the controller on the model -----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_half_the_age_at_the_same_step_time_on_the_reference_workload(seed: int) -> None:
    fill, paced = both(lognormal(), seed=seed)
    assert fill.age == pytest.approx(7.9, abs=0.1)
    assert paced.age <= 0.6 * fill.age
    assert paced.step_seconds <= 1.01 * fill.step_seconds
    assert max(paced.limits) < 180, "no pinning at the ceiling of 288"


def slow_tenth(chance: random.Random, now: float) -> float:
    return 300.0 if chance.random() < 0.1 else 5.0


def slow_spells(chance: random.Random, now: float) -> float:
    return lognormal()(chance, now) * (3 if now % 500 < 40 else 1)


TRAINER_BOUND: dict[str, Latency] = {
    "constant": lambda chance, now: 33.0,
    "uniform": lambda chance, now: chance.uniform(5, 60),
    "heavy tail": lognormal(5, 2),
    "short": lognormal(2, 1),
    "one in ten is slow": slow_tenth,
    "evals slow it down": slow_spells,
}


@pytest.mark.parametrize("name", TRAINER_BOUND)
def test_the_trainer_hardly_starves_below_the_ceiling(name: str) -> None:
    fill, paced = both(TRAINER_BOUND[name], seed=1)
    assert paced.step_seconds <= 1.025 * fill.step_seconds
    assert paced.age <= 0.75 * fill.age
    assert max(paced.limits) < 230


@pytest.mark.parametrize("pause_seconds", [100.0, 400.0])
def test_a_paused_trainer_does_not_empty_the_pipeline(pause_seconds: float) -> None:
    def train_seconds(step: int) -> float:
        return TRAIN_SECONDS + (pause_seconds if step % 50 == 49 else 0)

    fill, paced = both(lognormal(), seed=2, train_seconds=train_seconds)
    assert paced.step_seconds <= 1.01 * fill.step_seconds
    assert paced.age <= 0.6 * fill.age


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_another_train_time(factor: float) -> None:
    def train_seconds(step: int) -> float:
        return TRAIN_SECONDS * (1 if (step < 150) == (factor > 1) else max(factor, 1 / factor))

    fill, paced = both(lognormal(), seed=3, train_seconds=train_seconds)
    assert paced.step_seconds <= 1.015 * fill.step_seconds
    assert paced.age <= 0.55 * fill.age


def test_ten_times_slower_for_a_while() -> None:
    def latency(chance: random.Random, now: float) -> float:
        return lognormal()(chance, now) * (10 if 1000 <= now < 2500 else 1)

    fill, paced = both(latency, seed=4, steps=300)
    assert paced.step_seconds <= 1.025 * fill.step_seconds
    assert max(paced.limits) == 288, "bound by generation: everything that S allows"
    assert max(paced.limits[-20:]) < 200, "and back"


GENERATION_BOUND: dict[str, tuple[int, int, float, float]] = {
    # name: S, max_concurrent, share accepted, median latency
    "S=0": (0, 10**9, 1.0, 20.0),
    "S=1": (1, 10**9, 1.0, 20.0),
    "S=2": (2, 10**9, 1.0, 60.0),
    "few slots": (8, 64, 1.0, 20.0),
    "most are rejected": (8, 10**9, 0.3, 20.0),
    "long": (8, 10**9, 1.0, 200.0),
}


@pytest.mark.parametrize("name", GENERATION_BOUND)
def test_a_run_bound_by_generation_is_as_fast_as_fill(name: str) -> None:
    staleness, max_concurrent, accept, median = GENERATION_BOUND[name]
    fill, paced = both(
        lognormal(median),
        seed=5,
        staleness=staleness,
        max_concurrent=max_concurrent,
        accept=accept,
    )
    assert paced.step_seconds <= 1.03 * fill.step_seconds
    assert paced.age <= fill.age + 0.1


@pytest.mark.parametrize("size", [1, 4, 128])
def test_other_batch_sizes(size: int) -> None:
    fill, paced = both(lognormal(), seed=6, batch_size=size, steps=200)
    assert paced.step_seconds <= 1.03 * fill.step_seconds
    assert paced.age < 0.9 * fill.age
