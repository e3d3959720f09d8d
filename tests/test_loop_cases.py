"""The reference results again, through the whole loop in virtual time."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.core.gate import GateState
from headway.errors import InvariantError
from simulated import (
    SimulatedRun,
    admit_on_ticks,
    sim_config,
    simulate_in_memory,
    tick_latency,
)

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "cases/seed_gate.json").read_text())
NO_LIMIT = 10**6


def run_ticks(
    staleness: int,
    *,
    latency: tuple[int, int],
    concurrent: int = 64,
    ticks: int = 60,
    enforcement: str = "admission",
    **options: Any,
) -> SimulatedRun:
    """The reference model's run: instant training, admission at whole ticks only."""
    config = sim_config(
        run={"steps": 10**6},
        rollout={
            "max_head_offpolicyness": staleness,
            "max_concurrent_rollouts": concurrent,
            "enforcement": enforcement,
        },
        simulate={"train_seconds": 0, "weight_sync_seconds": 0},
    )
    return simulate_in_memory(
        config,
        latency=tick_latency(*latency),
        script=lambda orchestrator: admit_on_ticks(orchestrator, ticks),
        **options,
    )


def head_max(run: SimulatedRun) -> int | None:
    return run.orchestrator.log.ages.heads.max


@pytest.mark.parametrize("case", CASES["uniform"])
def test_uniform_latency_reaches_the_bound_exactly(case: dict[str, int]) -> None:
    assert head_max(run_ticks(case["S"], latency=(3, 3))) == case["max_age"]


@pytest.mark.parametrize("case", CASES["jitter_1_6"])
def test_jitter_overshoots_the_bound(case: dict[str, int]) -> None:
    run = run_ticks(case["S"], latency=(1, 6))
    assert head_max(run) == case["max_age"] > case["S"]


@pytest.mark.parametrize("case", CASES["ungated_S_1e9_80_ticks"])
def test_without_the_staleness_term_concurrency_sets_the_age(case: dict[str, int]) -> None:
    concurrent = case["max_concurrent"]
    run = run_ticks(2, latency=(3, 3), concurrent=concurrent, ticks=80, enforcement="ship")
    assert head_max(run) == case["max_age"] == concurrent // 8 - 1


@pytest.mark.parametrize("case", CASES["gated_S_2_80_ticks"])
def test_the_smaller_limit_binds(case: dict[str, int]) -> None:
    run = run_ticks(2, latency=(3, 3), concurrent=case["max_concurrent"], ticks=80)
    assert head_max(run) == case["max_age"]


@pytest.mark.parametrize("case", CASES["resume_at_version_40_S_2"])
def test_resume(case: dict[str, Any]) -> None:
    restored = case["accepted_restored"]
    run = run_ticks(
        2,
        latency=(3, 3),
        concurrent=case["max_concurrent"],
        start=GateState.recovered(40, 8) if restored else GateState(version=40),
        check_first_step=False,
    )
    assert head_max(run) == case["max_age"]
    # Two batches are trained within the third tick, so the first admissions are the first step's.
    assert run.orchestrator.log.admissions[0] == case["first_tick_admissions"]


def test_a_start_without_its_counters_is_refused_before_anything_is_admitted() -> None:
    with pytest.raises(InvariantError, match=r"would admit 344 samples, at most .* = 24"):
        run_ticks(2, latency=(3, 3), start=GateState(version=40))
