"""Every bound that a policy claims, against random workloads through the real loop; that it is
reached; and for every policy that claims none, a run that goes past `S`."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headway.config import Config
from headway.core.assembly import Selection, select
from headway.core.bound import OverBound
from headway.core.gate import GateState
from headway.core.ledger import SampleState
from headway.core.rollout import Source
from headway.loop import train_sink
from simulated import SimulatedRun, sim_config, simulate_in_memory

NUM_WORKLOADS = 50
"""Random workloads for each of the policies below."""

ENFORCEMENTS = ("admission", "ship", "both")
FORMULA = ("admission", "both")


def policies(**choices: tuple[Any, ...]) -> list[dict[str, Any]]:
    """All combinations of these fields of `rollout`."""
    return [
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    ]


BOUNDED = [
    *policies(
        enforcement=ENFORCEMENTS,
        order=("completion", "oldest_first"),
        over_bound=("drop", "trim"),
    ),
    *policies(enforcement=FORMULA, order=("window",), over_bound=("drop", "trim", "admit")),
    *policies(enforcement=FORMULA, order=("completion", "oldest_first"), over_bound=("wait",)),
    *policies(
        enforcement=ENFORCEMENTS,
        order=("completion", "oldest_first"),
        over_bound=("wait",),
        wait_seconds=(3.0,),
        after_wait=("drop", "trim"),
    ),
    *policies(
        enforcement=FORMULA,
        order=("completion", "oldest_first", "window"),
        over_bound=("admit",),
        max_head_offpolicyness=(0,),
    ),
]

UNBOUNDED = [
    *policies(enforcement=FORMULA, order=("completion", "oldest_first"), over_bound=("admit",)),
    *policies(
        enforcement=("ship",),
        order=("completion", "oldest_first"),
        over_bound=("admit",),
        max_head_offpolicyness=(0, 1, 3),
    ),
    *policies(
        enforcement=ENFORCEMENTS,
        order=("completion", "oldest_first"),
        over_bound=("wait",),
        wait_seconds=(0.5,),
        after_wait=("admit",),
    ),
]


def named(policy: dict[str, Any]) -> str:
    return "-".join(str(value) for value in policy.values())


LATENCIES: list[dict[str, Any]] = [
    {"kind": "constant", "value": 2.0},
    {"kind": "uniform", "low": 0.0, "high": 9.0},
    {"kind": "lognormal", "median": 3.0, "sigma": 1.0},
    {"kind": "lognormal", "median": 1.0, "sigma": 2.0, "max": 1000.0},
    {"kind": "long_tail", "median": 2.0, "alpha": 1.1, "max": 1000.0},
    {"kind": "bimodal", "median": 0.5, "sigma": 0.0, "share": 0.05, "second_median": 60.0},
    {"kind": "empirical", "values": [0.0, 2.0, 4.0, 8.0, 30.0]},
]
"""Most with a heavy tail; the first and the last let many samples end at the same instant."""

OTHERS = {
    "drop": ["trim"],
    "trim": ["drop"],
    "wait": ["drop", "trim"],
    "admit": ["drop", "trim"],
}
"""What else an environment may do without taking the run's bound away."""


def workload(policy: dict[str, Any], seed: int) -> tuple[Config, GateState | None]:
    """A configuration and the state to start from, all drawn from the seed."""
    rng = np.random.default_rng(seed)

    def one_of(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    steps, start = one_of(8, 12), one_of(0, 0, 7)
    staleness, batch = one_of(0, 1, 1, 2, 3, 5), one_of(1, 2, 3, 5)
    staleness = policy.get("max_head_offpolicyness", staleness)
    group = one_of(1, 1, 1, 1, 3)
    needs_room = policy["order"] == "window" or policy["over_bound"] == "wait"
    least_room = (staleness + 1) * batch if needs_room else batch
    envs = [{"id": name} for name in ["one", "two", "three"][: one_of(1, 1, 2, 3)]]
    for env in envs[1:]:
        if choice := one_of(None, *OTHERS[policy["over_bound"]]):
            env["over_bound"] = choice
    config = sim_config(
        run={
            "steps": start + steps,
            "seed": seed,
            "max_empty_batches": 10**6,
            "stall_seconds": 1e5,
            "metrics_interval_seconds": 1e4,
        },
        rollout={
            "max_head_offpolicyness": staleness,
            "window": one_of(1, 2, batch, batch + 2, 3 * batch),
            "pacing": one_of("fill", "just_in_time"),
            "consumer_batch_size": batch,
            "group_size": group,
            "max_batches_ahead": one_of(0, 0, 1, 2),
            "max_concurrent_rollouts": one_of(1, batch, 3 * batch, 20),
            "queue_size": least_room + one_of(0, 1, 50),
            "filters": one_of([], ["zero_advantage"]),
            "max_failed_samples": 10**6,
            "max_environment_retries": one_of(0, 1),
            "deadline_seconds": 1e5,
            **policy,
        },
        actor={"advantage": "mean" if group == 1 else "grpo"},
        envs=envs,
        eval={"every": one_of(0, 0, 3), "num_tasks": 2, "max_concurrent": 2},
        engine={
            "update_mode": one_of("keep", "keep", "interrupt", "finish"),
            "update_seconds": 1e5,
        },
        simulate={
            "rollout_seconds": one_of(*LATENCIES),
            "turns": one_of(1, 1, {"kind": "uniform", "low": 1, "high": 4}),
            "tool_seconds": one_of(0, 0.5),
            "train_seconds": one_of(0, 0.5, 4, 30, {"kind": "lognormal", "median": 4.0}),
            "weight_sync_seconds": one_of(0.0, 0.2, 3.0),
            "tokens_per_second": 4,
            "faults": {"environment_failure_probability": one_of(0.0, 0.0, 0.2)},
        },
    )
    return config, GateState.recovered(start, batch) if start else None


def trained_ages(run: SimulatedRun) -> Iterator[int]:
    """Ages of all tokens in the loss masks of the batches that were kept."""
    for batch in run.store.batches:
        for rollout in batch.rollouts:
            assert rollout.source is Source.LIVE
            assert rollout.loss_mask.sum() == rollout.version_runs.num_tokens
            yield from (batch.step - rollout.version_runs.expand()).tolist()


def assert_sound(run: SimulatedRun, first: int) -> list[int]:
    """Ages of a run that reached its target, kept its books and trained no sample twice."""
    config, ledger = run.orchestrator.config, run.orchestrator.ledger
    assert run.outcome.exit_reason == "completed", run.outcome
    ledger.check()
    counts = ledger.counts
    assert counts[SampleState.RUNNING] == counts[SampleState.FINISHED] == 0
    assert counts[SampleState.ACCEPTED] == len(run.store.leftovers)
    batch = config.rollout.consumer_batch_size
    assert [one.step for one in run.store.batches] == list(range(first, config.run.steps))
    assert all(len(one.groups) == batch for one in run.store.batches)
    ids = [t.group.group_id for one in run.store.batches for t in one.groups]
    assert len(set(ids)) == len(ids)
    assert counts[SampleState.TRAINED] == config.run.steps * batch
    ages = list(trained_ages(run))
    assert min(ages) >= 0
    assert run.orchestrator.log.ages.tokens.max == max(ages)
    assert run.orchestrator.log.ages.tokens.total == len(ages)
    return ages


@pytest.mark.parametrize("policy", BOUNDED, ids=named)
def test_a_claimed_bound_holds_on_random_workloads(policy: dict[str, Any]) -> None:
    offset = 10_000 * BOUNDED.index(policy)
    for seed in range(offset, offset + NUM_WORKLOADS):
        config, start = workload(policy, seed)
        bound = config.bound.guaranteed_age
        assert bound is not None
        run = simulate_in_memory(config, keep_batches=None, start=start)
        try:
            ages = assert_sound(run, start.version if start else 0)
            assert max(ages) <= bound
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {config.rollout}, {config.envs}") from error


# --- the bounds are reached -------------------------------------------------------------------


def straggler_run(
    policy: dict[str, Any],
    *,
    straggler: int,
    seconds: float = 1000.0,
    steps: int = 30,
    **rollout: Any,
) -> SimulatedRun:
    """All samples are quick but the one of this number. One batch takes 2 s to train."""
    numbers = itertools.count()
    config = sim_config(
        run={"steps": steps, "stall_seconds": 1e5, "metrics_interval_seconds": 1e4},
        rollout={
            "consumer_batch_size": 4,
            "max_concurrent_rollouts": 20,
            "deadline_seconds": 1e5,
            **rollout,
            **policy,
        },
        simulate={"train_seconds": 2.0, "weight_sync_seconds": 0.0, "tokens_per_second": 4},
    )
    return simulate_in_memory(
        config,
        latency=lambda: seconds if next(numbers) == straggler else 0.5,
        keep_batches=None,
    )


@pytest.mark.parametrize("policy", BOUNDED, ids=named)
def test_a_claimed_bound_is_reached(policy: dict[str, Any]) -> None:
    """Otherwise a smaller one would be true, and the claimed one of less use.

    Quick rollouts fill the budget of the formula, and the last of it is trained at age `S`. Without
    the formula it is a rollout that takes `S` batches. In a window the last sample of the first
    opening is as late as the window allows.
    """
    for staleness, window in ((1, 1), (2, 4), (3, 6), (2, 9), (1, 14)):
        settings = {"max_head_offpolicyness": staleness, "window": window, **policy}
        is_window = policy["order"] == "window" and policy["over_bound"] == "admit"
        last_of_opening = (settings["max_head_offpolicyness"] + 1) * 4 - 1
        run = straggler_run(settings, straggler=last_of_opening if is_window else 10**9, steps=14)
        bound = run.orchestrator.bound.guaranteed_age
        if policy["enforcement"] == "ship":
            run = straggler_run(settings, straggler=6, seconds=2.0 * staleness + 0.5, steps=14)
        assert max(assert_sound(run, 0)) == bound


# --- policies that claim none -----------------------------------------------------------------


@pytest.mark.parametrize("policy", UNBOUNDED, ids=named)
@pytest.mark.parametrize("pacing", ["fill", "just_in_time"])
def test_without_a_claim_there_is_a_run_beyond_any_bound(
    policy: dict[str, Any], pacing: str
) -> None:
    ages = []
    for seconds in (20.0, 40.0):
        run = straggler_run(policy, straggler=1, seconds=seconds, pacing=pacing)
        assert run.orchestrator.bound.guaranteed_age is None
        ages.append(max(assert_sound(run, 0)))
    staleness = run.orchestrator.bound.max_age
    # The longer the straggler, the older: no number holds for all workloads.
    assert staleness < ages[0] < ages[1]


# --- the assertion at the consumer --------------------------------------------------------------


@pytest.mark.parametrize("over_bound", ["drop", "wait"])
def test_a_broken_bound_ends_the_run_with_all_operands(
    over_bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lenient(*args: Any, **options: Any) -> Selection:
        step, candidates, unbatched, bound = args
        bound = dataclasses.replace(bound, over_bound=OverBound.ADMIT)
        return select(step, candidates, unbatched, bound, **options)

    monkeypatch.setattr(train_sink, "select", lenient)
    run = straggler_run({"over_bound": over_bound}, straggler=1, seconds=20.0)
    assert (run.outcome.exit_reason, run.outcome.exit_code) == ("invariant_broken", 3)
    message = str(run.outcome.message)
    for operand in (
        "batch 11 holds ages 2 to 11",
        "guaranteed are 0 to 2",
        "max_age=2",
        "{2: 3, 11: 1}",
    ):
        assert operand in message
    assert run.orchestrator.ledger.counts[SampleState.TRAINED] == 10 * 4  # batch 10 is in training


# --- narrow queues ----------------------------------------------------------------------------


@pytest.mark.parametrize("over_bound", ["drop", "trim", "admit"])
@pytest.mark.parametrize("seed", range(5))
def test_a_sink_that_holds_one_batch_blocks_neither_drops_nor_the_last_evaluation(
    over_bound: str, seed: int
) -> None:
    config = sim_config(
        run={"seed": seed},
        rollout={"over_bound": over_bound, "queue_size": 8, "max_head_offpolicyness": 1},
        eval={"every": 5, "num_tasks": 3},
        simulate={"rollout_seconds": {"kind": "lognormal", "median": 5.0, "sigma": 1.5}},
    )
    run = simulate_in_memory(config, keep_batches=None)
    assert_sound(run, 0)
    assert {result.version for result in run.orchestrator.eval_sink.results} >= {0, 20}
