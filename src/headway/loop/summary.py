"""The summary that every run ends with: `docs/metrics.md` documents every key."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from headway.loop.orchestrator import Orchestrator
from headway.loop.outcome import Outcome


def summarize(
    run: Orchestrator, outcome: Outcome, *, wall_seconds: float, versions_of: Mapping[str, str]
) -> dict[str, Any]:
    """What `summary.json` holds. Keys are added by later versions, never renamed."""
    log = run.log
    return {
        "exit_reason": outcome.exit_reason,
        "exit_code": outcome.exit_code,
        "message": outcome.message,
        "steps": log.num_trained,
        "wall_seconds": wall_seconds,
        "step_seconds_mean": _mean(log.step_seconds),
        "reward_first10_mean": _mean(log.rewards[:10]),
        "reward_last10_mean": _mean(log.rewards[-10:]),
        "eval": [
            {"version": one.version, "env": one.env, "reward_mean": one.reward_mean}
            for one in run.evals
        ],
        "age": {
            "configured": run.config.rollout.max_head_offpolicyness,
            "guaranteed": run.gate.guaranteed_age,
            **log.ages.summary(),
        },
        "admissions_first_step": log.admissions[0] if log.admissions else None,
        "admissions_per_step_max": max(log.admissions, default=None),
        "samples": run.ledger.summary(),
        "tokens": {
            "generated": run.engine.num_tokens,
            "trained": log.num_tokens_trained,
            "trimmed": 0,
        },
        "idle": {"trainer": log.trainer_idle_share, "engine": run.engine.idle_share},
        "seed": run.config.run.seed,
        "versions_of": dict(versions_of),
    }


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None
