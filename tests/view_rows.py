"""Plausible metric rows of a run, made by one seed: what the views are tested and developed on."""

import json
import random
from pathlib import Path
from typing import Any

CONFIG = """\
run: {dir: runs/demo, steps: 60, seed: 0}
rollout:
  max_head_offpolicyness: 2
  consumer_batch_size: 16
  max_concurrent_rollouts: 48
  group_size: 4
envs:
- {id: arithmetic, weight: 1.0}
"""


def _age(rng: random.Random, oldest: int) -> dict[str, float | None]:
    mean = oldest * rng.uniform(0.3, 0.6)
    return {
        "max": oldest,
        "p99": oldest,
        "mean": mean,
        "head_max": oldest,
        "head_mean": min(float(oldest), mean + 0.2),
    }


def step_row(rng: random.Random, step: int, num_steps: int, time: float) -> dict[str, Any]:
    """One batch that has been trained."""
    progress = step / max(1, num_steps - 1)
    oldest = min(step, 2 + (rng.random() < 0.1))
    return {
        "kind": "step",
        "time": time,
        "step": step,
        "reward_mean": 0.2 + 0.55 * progress**0.7 + rng.gauss(0, 0.04),
        "reward_std": 0.4,
        "age": _age(rng, oldest),
        "age_counts": {str(age): 4000 // (age + 1) for age in range(oldest + 1)},
        "num_samples": 16,
        "num_rollouts": 64,
        "num_tokens": 6400 + rng.randrange(800),
        "rollout_tokens_mean": 105.0,
        "admissions": 16 + rng.randrange(5),
        "rejected": {"zero_advantage": rng.randrange(6)} if rng.random() < 0.7 else {},
        "failed": {"environment": 1} if rng.random() < 0.1 else {},
        "assembled_seconds": rng.uniform(1.0, 2.2),
        "parked_seconds": rng.uniform(0, 0.4),
        "write_seconds": 0.01,
        "train_seconds": rng.uniform(1.2, 1.5),
        "trainer_idle_seconds": rng.uniform(0, 0.5),
        "publish_seconds": 0.09,
        "sync_seconds": rng.uniform(0.05, 0.12),
        "step_seconds": rng.uniform(1.8, 2.4),
        "trainer": {
            "loss": rng.gauss(0, 0.02),
            "grad_norm": 0.5 + rng.random(),
            "clip_fraction": 0.05 * rng.random(),
            "behaviour_weight_mean": 1 + rng.gauss(0, 0.01),
            "kl": 0.01 * progress,
        },
        "env_metrics": {"exact": 0.5 * progress},
    }


def interval_row(rng: random.Random, step: int, time: float) -> dict[str, Any]:
    """One tick of the metrics loop."""
    running, speed = 40 + rng.randrange(9), rng.gauss(3300, 300)
    return {
        "kind": "interval",
        "time": time,
        "version": step,
        "step": step + 1,
        "num_running": running,
        "capacity": 48 - running,
        "in_queue": 1024,
        "out_queue": rng.randrange(3),
        "num_buffered": rng.randrange(16),
        "batches_waiting": rng.randrange(2),
        "batches_shipped": step + 1,
        "age": _age(rng, min(step, 3)),
        "tokens_generated": int(time * 3300),
        "tokens_per_second": speed,
        "eval_running": rng.choice([0, 0, 0, 16]),
        "waiting_for": {
            "feed": "room in the input queue",
            "submission": rng.choice(
                [
                    "a rollout to finish (max_concurrent_rollouts)",
                    f"version {step + 1} (max_head_offpolicyness)",
                ]
            ),
            "fetch": rng.choice(["a finished sample", None]),
            "ship": rng.choice([f"batch {step + 1} to fill", f"the trainer to reach {step}"]),
            "watcher": f"version {step + 1} to appear",
            "trainer": None,
        },
        "engines": {
            "engine-0": {"num_running": running, "num_waiting": 3, "tokens_per_second": speed}
        },
        "idle": {"trainer": 0.14 + 0.3 / (1 + step), "engine": 0.03},
        "rss_mb": 412.0,
    }


def eval_row(rng: random.Random, version: int, num_steps: int, time: float) -> dict[str, Any]:
    """One evaluation."""
    return {
        "kind": "eval",
        "time": time,
        "version": version,
        "env": "arithmetic",
        "reward_mean": 0.22 + 0.5 * version / max(1, num_steps) + rng.gauss(0, 0.02),
        "num_rollouts": 64,
        "num_failed": 0,
        "eval_seconds": 3.2,
        "head": version,
        "tail": version + 1,
    }


def summary_of(rows: list[dict[str, Any]], exit_reason: str = "completed") -> dict[str, Any]:
    """The content of `summary.json`."""
    steps = [row for row in rows if row["kind"] == "step"]
    rewards = [row["reward_mean"] for row in steps]
    evals = [row for row in rows if row["kind"] == "eval"]
    return {
        "exit_reason": exit_reason,
        "message": None if exit_reason == "completed" else "trainer: the process ended (exit 9)",
        "steps": len(steps),
        "wall_seconds": rows[-1]["time"] + 8.0,
        "loop_seconds": rows[-1]["time"],
        "step_seconds_mean": 2.1 if steps else None,
        "reward_first10_mean": sum(rewards[:10]) / len(rewards[:10]) if rewards else None,
        "reward_last10_mean": sum(rewards[-10:]) / len(rewards[-10:]) if rewards else None,
        "eval": [{key: row[key] for key in ("version", "env", "reward_mean")} for row in evals],
        "age": {
            "configured": 2,
            "guaranteed": None,
            "max": 3 if steps else None,
            "p99": 2,
            "mean": 0.93,
            "head_max": 3,
            "head_mean": 1.1,
        },
        "admissions_first_step": 48,
        "admissions_per_step_max": 21,
        "samples": {
            "admitted": 1131,
            "running": 0,
            "finished": 0,
            "accepted": 0,
            "batched": 0,
            "trained": 960,
            "rejected": 160,
            "failed": 4,
            "dropped": 7,
            "reasons": {
                "rejected": {"zero_advantage": 160},
                "failed": {"environment": 4},
                "dropped": {"completed": 7},
            },
        },
        "tokens": {"generated": 412_000, "trained": 401_000, "trimmed": 0},
        "idle": {"trainer": 0.15, "engine": 0.03},
        "seed": 0,
        "versions_of": {"headway": "0.1.0", "libraries": {"torch": "2.13.0", "numpy": "2.3.1"}},
    }


def run_rows(
    num_steps: int = 60, *, seed: int = 0, exit_reason: str | None = "completed"
) -> list[dict[str, Any]]:
    """All rows of a run; without a summary when `exit_reason` is None, as a crash leaves it."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = [
        {
            "kind": "run",
            "time": 0.0,
            "run_dir": "runs/demo",
            "seed": seed,
            "steps": 60,
            "configured": 2,
            "guaranteed": None,
            "batch_size": 16,
            "group_size": 4,
            "max_concurrent": 48,
            "engines": ["engine-0"],
            "simulated": False,
            "headway": "0.1.0",
        },
        {"kind": "event", "time": 0.1, "level": "info", "text": "engine-0 is ready"},
    ]
    time = 0.5
    for step in range(num_steps):
        if step % 20 == 0:
            rows.append(eval_row(rng, step, num_steps, time + 0.3))
        for _ in range(2):
            rows.append(interval_row(rng, step, time))
            time += 1.0
        rows.append(step_row(rng, step, num_steps, time))
    text = "sample 41: arithmetic: reward raised ValueError: <not a number> & more"
    rows.append({"kind": "event", "time": time, "level": "warning", "text": text})
    if num_steps:
        rows.append(eval_row(rng, num_steps, num_steps, time + 1))
    if exit_reason is not None:
        rows.append({"kind": "summary", "time": time + 2, **summary_of(rows, exit_reason)})
    return rows


def write_run(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    """A run directory with these rows, as far as the views read one."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(lines, encoding="utf-8")
    (run_dir / "config.yaml").write_text(CONFIG, encoding="utf-8")
    for row in rows:
        if row.get("kind") == "summary":
            content = {key: one for key, one in row.items() if key not in ("kind", "time")}
            (run_dir / "summary.json").write_text(json.dumps(content), encoding="utf-8")
