"""Every bound that a policy claims, against random workloads through the real loop; that it is
reached; and for every policy that claims none, a run that goes past `S`."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headway.config import Config
from headway.core.gate import GateState
from headway.core.ledger import SampleState
from headway.core.rollout import Source
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
    group = one_of(1, 1, 1, 2, 4)
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
            "pacing": one_of("fill", "fill"),
            "consumer_batch_size": batch,
            "group_size": group,
            "max_batches_ahead": one_of(0, 0, 1, 2),
            "max_concurrent_rollouts": one_of(1, batch, 3 * batch, 60),
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
            "turns": one_of(1, 1, {"kind": "uniform", "low": 1, "high": 5}),
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
    """The run reached its target, lost no sample from its books and trained none twice; its ages."""
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
