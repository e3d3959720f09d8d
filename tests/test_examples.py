"""The configurations that the README and the Makefile run."""

from pathlib import Path

import pytest

from headway.config.file import load_config
from headway.sim.app import simulate_in_memory

EXAMPLES = Path(__file__).parent.parent / "examples"
WORKLOADS = sorted((EXAMPLES / "workloads").glob("*.yaml"))


@pytest.mark.parametrize(("name", "staleness"), [("demo.yaml", 2), ("demo_sync.yaml", 0)])
def test_demo_configurations_load_without_a_warning(name: str, staleness: int) -> None:
    config = load_config(EXAMPLES / name)
    assert config.rollout.max_head_offpolicyness == staleness
    assert config.warnings == []


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_workloads_load_without_a_warning_and_run(path: Path) -> None:
    assert load_config(path).warnings == []
    summary = simulate_in_memory(load_config(path, ["--run.steps", "12"]))
    assert (summary["exit_reason"], summary["steps"]) == ("completed", 12)
