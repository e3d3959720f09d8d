"""One run directory: where everything lies, and what may become one."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import yaml

from headway.config import Config
from headway.errors import RunDirError
from headway.ports import MetricsSink
from headway.store.atomic import atomic_file, write_json


class RunDir:
    """Paths of a run. `create` makes a new one, `RunDir(path)` looks at one that exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.versions = path / "versions.json"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.batches = path / "batches"
        self.weights = path / "weights"
        self.logs = path / "logs"
        self.trainer_ready = path / "trainer" / "ready.json"

    @classmethod
    def create(cls, config: Config) -> Self:
        """Make `config.run.dir` with its folders and the resolved configuration.

        Raises:
            RunDirError: it holds a run already, a file is in the way, or it cannot be written.
        """
        path = Path(config.run.dir)
        run_dir = cls(path)
        if path.is_dir() and any(path.iterdir()):
            what = "holds a run already" if run_dir.config.exists() else "is not empty"
            raise RunDirError(
                f"run directory {path} {what}; nothing was touched. Give another one "
                "(--run.dir NEW), or move it away"
            )
        try:
            for folder in (run_dir.batches, run_dir.weights, run_dir.logs):
                folder.mkdir(parents=True, exist_ok=True)
            run_dir.trainer_ready.parent.mkdir(exist_ok=True)
            content = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
            with atomic_file(run_dir.config) as temporary:
                temporary.write_text(content, encoding="utf-8")
        except OSError as error:
            raise RunDirError(
                f"cannot write run directory {path}: {_reason(error)}; give another one "
                "(--run.dir NEW)"
            ) from error
        return run_dir

    def write_versions(self, versions: Mapping[str, str]) -> None:
        """`versions.json`. Raises OSError."""
        write_json(self.versions, versions)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """`summary.json`. Raises OSError."""
        write_json(self.summary, summary)

    def open_metrics(self) -> "JsonLines":
        """Append to `metrics.jsonl`."""
        return JsonLines(self.metrics)


def _reason(error: OSError) -> str:
    match error.errno:
        case errno.EEXIST | errno.ENOTDIR:
            return f"{error.filename} is a file"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"no permission ({error.filename})"
        case errno.ENOSPC:
            return "the disk is full"
        case _:
            return str(error)


class JsonLines:
    """A MetricsSink that appends one JSON object a line; line-buffered, so that a crash loses at
    most the last row. The first write that fails is kept in `error`; rows after it are lost."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)
        self.error: OSError | None = None

    def emit(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        try:
            self._file.write(json.dumps(row, default=float) + os.linesep)
        except OSError as error:
            self.error = self.error or error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


class FanOut:
    """A MetricsSink that passes rows on to several; None is left out."""

    def __init__(self, *sinks: MetricsSink | None) -> None:
        self._sinks = [sink for sink in sinks if sink is not None]

    def emit(self, row: Mapping[str, Any]) -> None:
        """To each in turn."""
        for sink in self._sinks:
            sink.emit(row)
