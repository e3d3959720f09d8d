"""CPU time of a simulated run per rollout: stated seconds, and engines whose speed depends on load.

The whole of `headway simulate`, rows, trace and summary on disk included; lognormal lengths;
batches of 32 samples: groups of eight rollouts, as in GRPO, or lone rollouts. Import is left out.

    python -m benchmarks.simulator [--json] [--rollouts N]
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from headway.collector import tame_collector
from headway.config import Config
from headway.sim.app import simulate

WORKLOADS: dict[str, dict[str, Any]] = {
    "stated seconds": {"rollout_seconds": {"median": 20, "sigma": 1}},
    "load-dependent": {
        "rollout_tokens": {"median": 1000, "sigma": 1},
        "engine": {"slots": 512, "throughput": [[1, 60], [64, 3000], [512, 16000]]},
    },
}


GROUP_SIZES = (8, 1)
BATCH_SIZE = 32


def config_for(
    workload: dict[str, Any], group_size: int, num_rollouts: int, run_dir: Path
) -> Config:
    """`B` = 32, `S` = 8, nothing rejected."""
    return Config.model_validate(
        {
            "run": {
                "dir": str(run_dir),
                "steps": -(-num_rollouts // (BATCH_SIZE * group_size)),
                "stall_seconds": 1e5,
                "metrics_interval_seconds": 60,
            },
            "rollout": {
                "max_head_offpolicyness": 8,
                "consumer_batch_size": BATCH_SIZE,
                "group_size": group_size,
                "filters": [],
                "max_concurrent_rollouts": 288,
                "deadline_seconds": 1e5,
            },
            "actor": {"advantage": "mean" if group_size == 1 else "grpo"},
            "eval": {"every": 0},
            "simulate": workload,
        }
    )


def measure(name: str, group_size: int, num_rollouts: int) -> dict[str, Any]:
    """One run in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_for(WORKLOADS[name], group_size, num_rollouts, Path(folder) / "run")
        summary = simulate(config)
    done = summary["steps"] * BATCH_SIZE * group_size
    return {
        "workload": name,
        "group_size": group_size,
        "rollouts": done,
        "cpu_seconds": summary["cpu_seconds"],
        "cpu_us_per_rollout": summary["cpu_seconds"] / done * 1e6,
        "virtual_seconds": summary["wall_seconds"],
    }


def main() -> None:
    """All in one process."""
    parser = argparse.ArgumentParser(description="CPU time of a simulated run per rollout")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rollouts", type=int, default=50_000)
    options = parser.parse_args()
    tame_collector()
    rows = [measure(name, size, options.rollouts) for size in GROUP_SIZES for name in WORKLOADS]
    if options.json:
        print(json.dumps(rows))
        return
    print("Simulated runs, rows and trace written")
    print(f"{'workload':>16} {'group':>6} {'rollouts':>10} {'CPU s':>8} {'CPU us/rollout':>15}")
    for row in rows:
        print(
            f"{row['workload']:>16} {row['group_size']:>6} {row['rollouts']:>10,} "
            f"{row['cpu_seconds']:>8.2f} {row['cpu_us_per_rollout']:>15.1f}"
        )


if __name__ == "__main__":
    main()
