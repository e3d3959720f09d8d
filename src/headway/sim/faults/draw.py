"""Schedules from seeds: every policy, small runs, and a few faults in each of a few lives."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.config import LivenessConfig
from headway.sim.faults.schedule import TRAINER_STAGES, Fault, FaultKind, Schedule

_KIND = FaultKind
_WEIGHTS: Mapping[FaultKind, float] = {
    _KIND.ENGINE_CRASH: 3,
    _KIND.ENGINE_HANG: 2,
    _KIND.SLOW_START: 1,
    _KIND.LATE_ANSWERS: 2,
    _KIND.WRONG_ANSWERS: 2,
    _KIND.UPDATE_FAILS: 2,
    _KIND.UPDATE_REFUSED: 1,
    _KIND.UPDATE_HANGS: 1,
    _KIND.ENV_ERROR: 2,
    _KIND.ENV_HANG: 2,
    _KIND.TRAINER_CRASH: 4,
    _KIND.TRAINER_HANG: 1,
    _KIND.BAD_WEIGHTS: 1,
    _KIND.CORRUPT_CHECKPOINT: 3,
    _KIND.STRAY_FILES: 3,
    _KIND.SLOW_DISK: 3,
    _KIND.FULL_DISK: 2,
    _KIND.CLOCK_JUMP: 2,
    _KIND.STOP: 3,
}
STALL_SECONDS = 150.0
"""Limit of every part: short, so that what hangs is soon found."""
_NUM_CALLS = 1_500
"""Of functions, among which kills of a resume are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A run that is to be broken, where it is not drawn.

    Args:
        config: sections of the configuration.
        seconds: how long it takes undisturbed, in virtual seconds.
        num_callbacks: that its event loop runs meanwhile: kills are drawn among them.
    """

    config: Mapping[str, Any]
    seconds: float
    num_callbacks: int = 5_000


def draw(seed: int, workload: Workload | None = None) -> Schedule:
    """The schedule of a seed, on a drawn run or on the one that is stated."""
    chance = random.Random(seed)
    drawn = draw_config(chance, seed)
    workload = workload or Workload(config=drawn, seconds=4.0 * drawn["run"]["steps"])
    return Schedule(
        seed=seed,
        config=workload.config,
        faults=draw_faults(chance, workload.seconds, workload.num_callbacks),
        seconds=workload.seconds,
    )


def draw_faults(chance: random.Random, seconds: float, num_callbacks: int) -> tuple[Fault, ...]:
    """What goes wrong; every life but the last is cut off, more often than not."""
    num_lives = chance.choice((1, 1, 2, 2, 3, 4))
    faults = []
    for life in range(num_lives):
        for kind in chance.choices([*_WEIGHTS], [*_WEIGHTS.values()], k=chance.randrange(5)):
            faults.append(_fault(chance, kind, life, seconds / num_lives))
        if chance.random() < 0.6:
            # Half of them evenly, half of them early: there a resume has just begun.
            is_early = chance.random() < 0.5
            power = chance.uniform(1.0, math.log10(num_callbacks))
            at = float(round(10**power if is_early else chance.uniform(0, num_callbacks)))
            faults.append(Fault(kind=_KIND.KILL, life=life, at=at, which=chance.randrange(2)))
        if life and chance.random() < 0.15:
            at = float(chance.randrange(1, _NUM_CALLS))
            faults.append(Fault(kind=_KIND.KILL_IN_RECOVERY, life=life, at=at))
    return tuple(dict.fromkeys(faults))


def _fault(chance: random.Random, kind: FaultKind, life: int, seconds: float) -> Fault:
    """One fault; instants lie on a grid, so that things happen at the same one."""
    at = round(chance.uniform(0, seconds) * 4) / 4
    which = chance.randrange(60)
    lasts: float | None = chance.choice((1.0, 3.0, 8.0, 20.0))
    match kind:
        case _KIND.ENGINE_CRASH | _KIND.ENGINE_HANG | _KIND.FULL_DISK:
            lasts = chance.choice((1.0, 5.0, 20.0, None))
        case _KIND.SLOW_START:
            lasts = chance.choice((0.5, 3.0, 5.0))
        case _KIND.TRAINER_CRASH:
            which = chance.randrange(len(TRAINER_STAGES))
        case _KIND.TRAINER_HANG:
            lasts = chance.choice((5.0, 30.0, None))
        case _KIND.BAD_WEIGHTS:
            lasts = None
        case _KIND.CLOCK_JUMP:
            lasts = chance.choice((0.3, 2.0, 10.0, 100.0, 1000.0))
        case _KIND.STOP:
            lasts = chance.choice((0.0, 0.5, 3.0))
        case _:
            pass
    if kind in (_KIND.CORRUPT_CHECKPOINT, _KIND.SLOW_START):
        at = 0.0
    return Fault(kind=kind, life=life, at=at, seconds=lasts, which=which)


def draw_config(chance: random.Random, seed: int) -> dict[str, Any]:
    """A small run of any policy."""
    S, B = chance.choice((0, 1, 1, 2, 2, 3, 4)), chance.choice((2, 2, 3, 4))
    group_size = chance.choice((1, 2, 2, 3))
    policy = _policy(chance)
    holds = policy["order"] == "window" or policy["over_bound"] == "wait"
    many = (S + 1) * B
    train = chance.choice((1.0, 2.0, 4.0))
    envs = _envs(chance, policy)
    holds = holds or any(env.get("over_bound") == "wait" for env in envs)
    return {
        "run": {
            "steps": chance.randrange(5, 12),
            "seed": seed,
            "stall_seconds": STALL_SECONDS,
            "shutdown_seconds": chance.choice((5.0, 20.0, 40.0)),
            "metrics_interval_seconds": 5.0,
            "max_empty_batches": 100_000,
        },
        "rollout": {
            "max_head_offpolicyness": S,
            **policy,
            "consumer_batch_size": B,
            "group_size": group_size,
            "filters": ["zero_advantage"] if group_size > 1 and chance.random() < 0.6 else [],
            "max_concurrent_rollouts": chance.choice((B, 2 * B, many, many + B)),
            "queue_size": chance.choice((many if holds else B, many, 1024)),
            "deadline_seconds": chance.choice((15.0, 40.0)),
            "max_infrastructure_retries": chance.choice((1, 2, 3)),
            "max_environment_retries": chance.choice((0, 1)),
            "max_batches_ahead": chance.choice((0, 0, 0, 1)),
            "max_failed_samples": chance.choice((16, 64)),
        },
        "actor": {
            "advantage": "mean" if group_size == 1 else chance.choice(("grpo", "rloo", "mean")),
            "checkpoint_every": chance.choice((0, 1, 2, 3, 5)),
        },
        "envs": envs,
        "eval": {"every": chance.choice((0, 0, 3)), "num_tasks": 2, "max_concurrent": 2},
        "liveness": LivenessConfig.all_of(STALL_SECONDS).model_dump(mode="json"),
        "engine": {
            "count": chance.choice((1, 2, 2, 3)),
            "update_mode": chance.choice(("keep", "interrupt", "finish")),
            "update_seconds": 12.0,
            "check_weights": chance.choice(("full", "shapes", "off")),
            "health_seconds": 2.0,
            "health_deadline_seconds": 2.0,
            "live_seconds": chance.choice((10.0, 60.0)),
            "slow_start_seconds": chance.choice((0.0, 5.0)),
            "max_retries": chance.choice((0, 1, 2)),
        },
        "weights": {
            "keep_last": chance.choice((3, 4)),
            "poll_seconds": chance.choice((0.25, 0.5, 1.0)),
        },
        "simulate": {
            "rollout_seconds": chance.choice(_LENGTHS),
            "tokens_per_second": chance.choice((4, 20)),
            "turns": chance.choice((1, 1, {"kind": "uniform", "low": 0.5, "high": 3.5})),
            "tool_seconds": chance.choice((0.0, 0.5)),
            "prompt_tokens": 4,
            "train_seconds": chance.choice((train, {"kind": "uniform", "low": 0.5, "high": train})),
            "weight_sync_seconds": chance.choice((0.0, 0.25, 1.0)),
            "recompute_seconds": chance.choice((0.0, 0.5)),
        },
    }


_LENGTHS: tuple[Any, ...] = (
    1.0,
    {"kind": "constant", "value": 2.0},
    {"kind": "uniform", "low": 0.5, "high": 3.0},
    {"kind": "lognormal", "median": 1.0, "sigma": 1.0, "max": 6.0},
    {"kind": "lognormal", "median": 2.0, "sigma": 0.7, "max": 8.0},
    {
        "kind": "bimodal",
        "median": 0.5,
        "sigma": 0.3,
        "share": 0.2,
        "second_median": 6.0,
        "max": 8.0,
    },
)


def _policy(chance: random.Random) -> dict[str, Any]:
    """Any combination that is possible."""
    enforcement = chance.choice(("admission", "admission", "ship", "both"))
    order = chance.choice(("completion", "oldest_first", "oldest_first", "window"))
    over_bound = chance.choice(("admit", "wait", "drop", "trim", "trim"))
    policy: dict[str, Any] = {
        "enforcement": enforcement,
        "order": order,
        "over_bound": over_bound,
        "pacing": chance.choice(("fill", "just_in_time")),
    }
    if order == "window":
        policy["window"] = chance.choice((1, 2, 4, 8))
        if enforcement == "ship":
            policy["enforcement"] = "both"
        if over_bound == "wait":
            policy["over_bound"] = "drop"
    if policy["over_bound"] == "wait":
        policy["wait_seconds"] = chance.choice((None, 1.0, 4.0))
        policy["after_wait"] = chance.choice(("admit", "drop", "trim"))
        if enforcement == "ship":
            policy["wait_seconds"] = policy["wait_seconds"] or 1.0
    return policy


def _envs(chance: random.Random, policy: Mapping[str, Any]) -> list[dict[str, Any]]:
    if chance.random() < 0.7:
        return [{"id": "arithmetic"}]
    second = {"id": "arithmetic", "name": "agent", "weight": chance.choice((0.5, 1.0))}
    other = chance.choice((None, "drop", "trim", "admit"))
    if other is not None:
        second["over_bound"] = other
    return [{"id": "arithmetic"}, second]
