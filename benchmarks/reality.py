"""What a plan predicts against what a real run does, on the demo.

One real run is recorded, a workload is fitted to it, and other settings are predicted from that.
Then each of them is run for real, for as many steps. The first steps are left out on both sides:
trainer and engines warm up in them. The recorded run comes again at the end: how much it differs
from itself is what no prediction can be better than. Run it on a machine that does nothing else.

    python -m benchmarks.reality [--steps 40] [--keep DIR] [--json]
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.app import run
from headway.builtin_model import ensure_model
from headway.config import Config
from headway.config.file import load_config
from headway.sim.app import simulate_in_memory
from headway.sim.fit import fit_run
from headway.sim.predict import Setting
from headway.sim.trainer import RowList

DEMO = Path(__file__).parent.parent / "examples" / "demo.yaml"
WARM_UP = 5
TOLERANCE = 0.1
"""The largest error that is asked for."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "S = 0, 16 in flight": {"max_head_offpolicyness": 0, "max_concurrent_rollouts": 16},
    "S = 1, 24 in flight": {"max_head_offpolicyness": 1, "max_concurrent_rollouts": 24},
    "S = 4, 80 in flight": {"max_head_offpolicyness": 4, "max_concurrent_rollouts": 80},
    "admission preset": {"preset": "admission"},
    "the recorded one again": {},
}


def steady(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean step time and mean head age after the warm-up."""
    steps = [row for row in rows if row["kind"] == "step"][WARM_UP:]
    ages = [row["age"]["head_mean"] for row in steps if row["age"]["head_mean"] is not None]
    return float(np.mean([row["step_seconds"] for row in steps])), float(np.mean(ages))


def real(config: Config, folder: Path) -> tuple[float, float]:
    """Run it with real processes."""
    placed = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})})
    summary = run(placed, model_dir=ensure_model(config.model, seed=config.run.seed))
    if summary["exit_code"]:
        sys.exit(f"{folder}: {summary['exit_reason']}: {summary['message']}")
    with (folder / "metrics.jsonl").open(encoding="utf-8") as lines:
        return steady([json.loads(line) for line in lines])


def predicted(fitted: Config, config: Config) -> tuple[float, float]:
    """Simulate the setting of `config` on the fitted workload, from its start as a real run."""
    rows = RowList()
    simulate_in_memory(Setting.of(config).apply(fitted), metrics=rows)
    return steady(rows.rows)


def compare(num_steps: int, folder: Path) -> list[dict[str, Any]]:
    """One row per setting."""
    words = ["--run.steps", str(num_steps), "--eval.every", "0"]
    base = load_config(DEMO, words)
    recorded = folder / "recorded"
    real(base, recorded)
    fit = fit_run(recorded)
    print(f"fitted: {fit.config.simulate.engine}, error {fit.speed_error:.2f}", file=sys.stderr)
    for note in fit.notes:
        print(f"  {note}", file=sys.stderr)
    rows = []
    for index, (name, changes) in enumerate(SETTINGS.items()):
        options = [word for key in changes for word in (f"--rollout.{key}", str(changes[key]))]
        config = load_config(DEMO, [*words, *options])
        told = predicted(fit.config, config)
        was = real(config, folder / f"setting-{index}")
        rows.append(
            {
                "setting": name,
                "step_seconds": {"predicted": told[0], "real": was[0]},
                "head_age_mean": {"predicted": told[1], "real": was[1]},
            }
        )
        print(f"{name}: {told} predicted, {was} real", file=sys.stderr)
    return rows


def error(pair: Mapping[str, float]) -> float:
    """Of a prediction, as a share; of an age below a tenth of a version, its difference."""
    return (pair["predicted"] - pair["real"]) / max(pair["real"], 0.1)


def main() -> int:
    """Print the table; 1 when a prediction is off by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--keep", type=Path, help="keep the runs in this new folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows = compare(options.steps, options.keep or Path(temporary))
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            step, age = row["step_seconds"], row["head_age_mean"]
            print(
                f"{row['setting']:<24} step {step['predicted']:6.3f} predicted {step['real']:6.3f} "
                f"real ({100 * error(step):+5.1f} %)   age {age['predicted']:5.2f} predicted "
                f"{age['real']:5.2f} real ({100 * error(age):+5.1f} %)"
            )
    worst = max(abs(error(row[key])) for row in rows for key in ("step_seconds", "head_age_mean"))
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
