"""The configurations that the README and the Makefile run."""

from pathlib import Path

import pytest

from headway.config.file import load_config

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(("name", "staleness"), [("demo.yaml", 2), ("demo_sync.yaml", 0)])
def test_demo_configurations_load_without_a_warning(name: str, staleness: int) -> None:
    config = load_config(EXAMPLES / name)
    assert config.rollout.max_head_offpolicyness == staleness
    assert config.warnings == []
