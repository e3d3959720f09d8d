"""The summary that every run ends with: `docs/metrics.md` documents every key."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from headway.config import Config
from headway.core.ages import Ages
from headway.core.ledger import Ledger, SampleState
from headway.loop.orchestrator import Orchestrator
from headway.loop.outcome import Outcome
from headway.loop.train_sink import TOO_OLD


def summarize(
    config: Config,
    run: Orchestrator | None,
    outcome: Outcome,
    *,
    wall_seconds: float,
    loop_seconds: float,
    versions_of: Mapping[str, str],
) -> dict[str, Any]:
    """What `summary.json` holds. Keys are added by later versions, never renamed.

    `wall_seconds` is the whole run with start-up and clean-up, `loop_seconds` the control loop's
    share of it. `run` is None when the run ended before its loop began; what was never measured is
    then null.
    """
    log = run.log if run else None
    ages = log.ages if log else Ages()
    return {
        "exit_reason": outcome.exit_reason,
        "exit_code": outcome.exit_code,
        "message": outcome.message,
        "steps": log.num_trained if log else 0,
        "wall_seconds": wall_seconds,
        "loop_seconds": loop_seconds,
        "step_seconds_mean": _mean(log.step_seconds) if log else None,
        "reward_first10_mean": _mean(log.rewards[:10]) if log else None,
        "reward_last10_mean": _mean(log.rewards[-10:]) if log else None,
        "eval": [
            {"version": one.version, "env": one.env, "reward_mean": one.reward_mean}
            for one in (run.eval_sink.results if run else ())
        ],
        "age": {
            "configured": config.rollout.max_head_offpolicyness,
            "guaranteed": run.bound.guaranteed_age if run else None,
            **ages.summary(),
        },
        "admissions_first_step": log.admissions[0] if log and log.admissions else None,
        "admissions_per_step_max": max(log.admissions, default=None) if log else None,
        "samples": (run.ledger if run else Ledger()).summary(),
        "tokens": {
            "generated": run.engine.num_tokens if run else 0,
            "trained": log.num_tokens_trained if log else 0,
            "trimmed": log.num_tokens_trimmed if log else 0,
        },
        "price": {
            "samples_dropped": run.ledger.reasons[SampleState.DROPPED][TOO_OLD] if run else 0,
            "tokens_trimmed": log.num_tokens_trimmed if log else 0,
            "held_seconds": log.held_seconds if log else 0.0,
            "starved_seconds": log.starved_seconds if log else 0.0,
        },
        "bias": run.train_sink.bias.summary() if run else None,
        "trace_hash": run.trace.digest if run else None,
        "idle": {
            "trainer": log.trainer_idle_share if log else None,
            "engine": run.engine.idle_share if run else None,
        },
        "seed": config.run.seed,
        "versions_of": dict(versions_of),
    }


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None
