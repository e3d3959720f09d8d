"""Tests against real servers, two of one kind; `make test-vllm` and `make test-sglang` run them.

They are left out unless `HEADWAY_REAL_KIND` (`vllm`, `sglang`, or `local` for the embedded engine)
says which, and `HEADWAY_REAL_PYTHON` the interpreter of the environment that it is installed in.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from runs import Run
    from servers import Servers

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/, for what they share with the others
if not os.environ.get("HEADWAY_REAL_KIND"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Servers]":
    """Two running servers, from the first test that needs them on."""
    from servers import Servers

    with Servers.running(tmp_path_factory.mktemp("servers")) as servers:
        yield servers


@pytest.fixture
def start(tmp_path: Path) -> "Iterator[Callable[..., Run]]":
    """Starts runs and ends those that a failing test leaves behind."""
    from runs import Run

    runs: list[Run] = []

    def start(engine: dict[str, Any], **sections: dict[str, Any]) -> Run:
        runs.append(Run(tmp_path, engine, **sections))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        run.said.close()
