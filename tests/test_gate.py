"""The gate's formula and the ledger, against the reference results in cases/seed_gate.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.gate import CapacityGate, GateState, check_start
from headway.core.ledger import ARROWS, Admission, Ledger, SampleState
from headway.core.rollout import GroupId
from headway.errors import InvariantError

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "cases/seed_gate.json").read_text())
UNLIMITED = 10**6


def tick_model(
    gate: CapacityGate, *, latency: tuple[int, int], ticks: int, start: GateState | None = None
) -> tuple[list[int], list[int]]:
    """Ages and admissions per tick of the integer-time model that the cases describe."""
    rng = np.random.default_rng(0)
    ledger = Ledger(start)
    version = start.version if start else 0
    next_id = ledger.num_admitted
    running: list[tuple[GroupId, int, int]] = []
    finished: list[tuple[GroupId, int]] = []
    ages, admissions = [], []
    low, high = latency
    for _ in range(ticks):
        admitted = 0
        while gate.capacity(ledger.gate_state(version)) > 0:
            ledger.admit(GroupId(next_id), Admission(version, "test"))
            wait = low if high <= low else int(rng.integers(low, high))
            running.append((GroupId(next_id), version, wait))
            next_id += 1
            admitted += 1
        admissions.append(admitted)
        running = [(group_id, born, wait - 1) for group_id, born, wait in running]
        for group_id, born, wait in running:
            if wait <= 0:
                ledger.move(group_id, SampleState.FINISHED)
                ledger.move(group_id, SampleState.ACCEPTED)
                finished.append((group_id, born))
        running = [one for one in running if one[2] > 0]
        while len(finished) >= gate.batch_size:
            batch, finished = finished[: gate.batch_size], finished[gate.batch_size :]
            for group_id, born in batch:
                ledger.move(group_id, SampleState.BATCHED)
                ledger.move(group_id, SampleState.TRAINED)
                ages.append(version - born)
            version += 1
        ledger.check()
    return ages, admissions


def gate_for(staleness: int | None, concurrent: int = 64) -> CapacityGate:
    return CapacityGate(max_head_offpolicyness=staleness, batch_size=8, max_concurrent=concurrent)


@pytest.mark.parametrize("case", CASES["uniform"])
def test_uniform_latency_reaches_the_bound_exactly(case: dict[str, int]) -> None:
    ages, _ = tick_model(gate_for(case["S"]), latency=(3, 3), ticks=60)
    assert max(ages) == case["max_age"]


@pytest.mark.parametrize("case", CASES["jitter_1_6"])
def test_jitter_overshoots_the_bound(case: dict[str, int]) -> None:
    ages, _ = tick_model(gate_for(case["S"]), latency=(1, 6), ticks=60)
    assert max(ages) == case["max_age"]
    assert abs(np.mean(ages) - case["S"]) < 1


def test_the_overshoot_grows_with_the_spread_of_completion_times() -> None:
    narrow, _ = tick_model(gate_for(2), latency=(1, 3), ticks=60)
    wide, _ = tick_model(gate_for(2), latency=(1, 12), ticks=60)
    assert max(narrow) < max(wide)


@pytest.mark.parametrize("case", CASES["ungated_S_1e9_80_ticks"])
def test_without_the_staleness_term_concurrency_sets_the_age(case: dict[str, int]) -> None:
    concurrent = case["max_concurrent"]
    for staleness in (None, 10**9):
        ages, _ = tick_model(gate_for(staleness, concurrent), latency=(3, 3), ticks=80)
        assert max(ages) == case["max_age"] == concurrent // 8 - 1


@pytest.mark.parametrize("case", CASES["gated_S_2_80_ticks"])
def test_the_smaller_limit_binds(case: dict[str, int]) -> None:
    ages, _ = tick_model(gate_for(2, case["max_concurrent"]), latency=(3, 3), ticks=80)
    assert max(ages) == case["max_age"]


@pytest.mark.parametrize("case", CASES["initial_capacity"])
def test_initial_capacity(case: dict[str, int]) -> None:
    assert gate_for(case["S"], case["max_concurrent"]).capacity(GateState()) == case["capacity"]


@pytest.mark.parametrize("case", CASES["resume_at_version_40_S_2"])
def test_resume(case: dict[str, Any]) -> None:
    start = GateState.recovered(40, 8) if case["accepted_restored"] else GateState(version=40)
    gate = gate_for(2, case["max_concurrent"])
    ages, admissions = tick_model(gate, latency=(3, 3), ticks=60, start=start)
    assert admissions[0] == case["first_tick_admissions"]
    assert max(ages) == case["max_age"]
    if case["accepted_restored"]:
        check_start(gate, start)
    else:
        with pytest.raises(InvariantError, match=r"first step would admit 344 samples.* = 24"):
            check_start(gate, start)


counts = st.integers(0, 500)


@given(counts, counts, counts, counts, st.integers(1, 64), st.integers(1, 512))
def test_the_formula(
    staleness: int, version: int, accepted: int, running: int, batch: int, concurrent: int
) -> None:
    gate = CapacityGate(
        max_head_offpolicyness=staleness, batch_size=batch, max_concurrent=concurrent
    )
    state = GateState(version=version, accepted=accepted, running=running)
    expected = min(concurrent - running, (staleness + version + 1) * batch - (accepted + running))
    assert gate.capacity(state) == expected


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_ledger_conserves_samples_and_refuses_moves_without_an_arrow(
    data: st.DataObject,
) -> None:
    ledger = Ledger(GateState(version=3, admitted=30, accepted=24, rejected=6))
    living: dict[GroupId, SampleState] = {}
    final = 0
    for number in range(data.draw(st.integers(0, 60))):
        if not living or data.draw(st.booleans()):
            group_id = GroupId(1000 + number)
            ledger.admit(group_id, Admission(0, "test"))
            living[group_id] = SampleState.RUNNING
        else:
            group_id = data.draw(st.sampled_from(sorted(living)))
            to = data.draw(st.sampled_from(SampleState))
            if to is SampleState.RUNNING and living[group_id] is SampleState.INTERRUPTED:
                ledger.admit(group_id, Admission(0, "test"))
                living[group_id] = to
            elif to in ARROWS[living[group_id]]:
                ledger.move(group_id, to, "why")
                if ARROWS[to]:
                    living[group_id] = to
                else:
                    del living[group_id]
                    final += 1
            else:
                with pytest.raises(InvariantError, match="cannot go"):
                    ledger.move(group_id, to, "why")
        ledger.check()
        assert ledger.living() == living
        assert ledger.num_admitted == 30 + len(living) + final
        state = ledger.gate_state(3)
        interrupted = ledger.counts[SampleState.INTERRUPTED]
        assert state.admitted == state.running + state.accepted + state.rejected + interrupted


def test_the_ledger_refuses_a_sample_twice_and_a_loss_without_a_reason() -> None:
    ledger = Ledger()
    ledger.admit(GroupId(1), Admission(0, "test"))
    with pytest.raises(InvariantError, match="admitted twice"):
        ledger.admit(GroupId(1), Admission(0, "test"))
    with pytest.raises(InvariantError, match="without a reason"):
        ledger.move(GroupId(1), SampleState.FAILED)
    ledger.num_lost += 1
    with pytest.raises(InvariantError, match="does not add up"):
        ledger.check()
