"""Tests against real servers, two of one kind; `make test-vllm` and `make test-sglang` run them.

They are left out unless `HEADWAY_REAL_KIND` (`vllm`, `sglang`, or `local` for the embedded engine)
says which, and `HEADWAY_REAL_PYTHON` the interpreter of the environment that it is installed in.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

if not os.environ.get("HEADWAY_REAL_KIND"):
    collect_ignore_glob = ["test_*.py"]

from servers import Servers  # noqa: E402 - its imports are found by the path above


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two running servers, for all tests of a module."""
    with Servers.running(tmp_path_factory.mktemp("servers")) as servers:
        yield servers
