"""One run directory: where everything lies, and what may become one."""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from headway.config import Config
from headway.config.file import dump_config
from headway.errors import RunDirError, StoreError
from headway.ports import MetricsSink
from headway.store.atomic import atomic_file, write_json

MIN_FREE_BYTES = 64 << 20
"""A disk with less than this left cannot hold even a short run."""


class RunDir:
    """Paths of a run. `create` makes a new one, `RunDir(path)` looks at one that exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.versions = path / "versions.json"
        self.metrics = path / "metrics.jsonl"
        self.trace = path / "trace.jsonl"
        self.summary = path / "summary.json"
        self.batches = path / "batches"
        self.weights = path / "weights"
        self.logs = path / "logs"
        self.ledger = path / "ledger.db"
        self.start = path / "start"
        """The weights that the engines of a resumed run start with."""
        self.trainer_ready = path / "trainer" / "ready.json"

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse a folder that `create` would refuse, before anything expensive is done.

        Raises:
            RunDirError: see `create`. A folder that cannot be written is found by `create` only.
        """
        path = Path(config.run.dir)
        try:
            if path.is_dir() and any(path.iterdir()):
                holds_run = cls(path).config.exists() or cls(path).batches.exists()
                what = "holds a run already" if holds_run else "is not empty"
                resume = f"go on with it (headway run --resume {path}), " if holds_run else ""
                raise RunDirError(
                    f"run directory {path} {what}; nothing was touched: {resume}give another one "
                    "(--run.dir NEW), or move it away"
                )
            if path.exists() and not path.is_dir():
                raise _unusable(path, "it is a file")
        except OSError as error:
            raise _unusable(path, _reason(error)) from error

    @classmethod
    def create(cls, config: Config) -> Self:
        """Make `config.run.dir` with its folders and the resolved configuration.

        Raises:
            RunDirError: it holds a run already, a file is in the way, or it cannot be written.
        """
        cls.check(config)
        run_dir = cls(path := Path(config.run.dir))
        try:
            path.mkdir(parents=True, exist_ok=True)
            num_free = shutil.disk_usage(path).free
            if num_free < MIN_FREE_BYTES:
                least = MIN_FREE_BYTES >> 20
                raise _unusable(
                    path, f"its disk has {num_free >> 20} MiB left, at least {least} are needed"
                )
            run_dir.batches.mkdir()  # claims the folder: the second of two runs fails here
            for folder in (run_dir.weights, run_dir.logs, run_dir.trainer_ready.parent):
                folder.mkdir()
            run_dir.write_config(config)
        except OSError as error:
            raise _unusable(path, _reason(error)) from error
        return run_dir

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from running this run; ends with the process, however that ends.

        Raises:
            RunDirError: another one has it.
        """
        try:
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _unusable(self.path, _reason(error)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise RunDirError(
                f"{self.path} is being run by another process: wait for it, stop it, or give "
                "another folder (--run.dir NEW)"
            ) from error
        finally:
            os.close(descriptor)

    def write_config(self, config: Config) -> None:
        """`config.yaml`. Raises OSError."""
        with atomic_file(self.config) as temporary:
            temporary.write_text(dump_config(config), encoding="utf-8")

    def write_versions(self, versions: Mapping[str, str]) -> None:
        """`versions.json`. Raises OSError."""
        write_json(self.versions, versions)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """`summary.json`. Raises OSError."""
        write_json(self.summary, summary)

    def open_metrics(self) -> "JsonLines":
        """Append to `metrics.jsonl`."""
        return JsonLines(self.metrics)

    def open_trace(self) -> "JsonLines":
        """Append to `trace.jsonl`: several rows per sample, so they are written in blocks."""
        return JsonLines(self.trace, block_bytes=1 << 16)


def _unusable(path: Path, reason: str) -> RunDirError:
    return RunDirError(
        f"cannot use run directory {path}: {reason}. Give another one (--run.dir NEW)"
    )


def _reason(error: OSError) -> str:
    where = error.filename
    match error.errno:
        case errno.EEXIST:
            return f"{where} exists already (another run, just started?)"
        case errno.ENOTDIR:
            return f"{where} lies below a file"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"no permission to write {where}"
        case errno.ENOSPC | errno.EDQUOT:
            return "the disk is full"
        case _:
            return str(error)


class JsonLines:
    """A MetricsSink that appends one JSON object a line.

    Every row is one unbuffered write of a few hundred bytes, which costs about as much as handing
    it to a thread would, and leaves complete lines behind when the process is killed; with
    `block_bytes`, rows are collected up to that size first, and a kill loses them. What goes
    wrong must not end the run: the first failure is kept, rows after it are counted, and `close`
    raises. As a context manager it logs instead, so that the summary is still written. Numbers
    that JSON lacks (NaN, infinity) become null.
    """

    def __init__(self, path: Path, *, block_bytes: int = 0) -> None:
        self._path = path
        self._block_bytes = block_bytes
        self._block = bytearray()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._failure: Exception | None = None
        self.num_lost = 0
        """Rows that were not written."""

    def emit(self, row: Mapping[str, Any]) -> None:
        """Append a row. Raises nothing."""
        if self._failure is not None:
            self.num_lost += 1
            return
        try:
            self._encoder.encode_into(row, self._block, -1)
            self._block += b"\n"
            if len(self._block) >= self._block_bytes:
                self._flush()
        except Exception as error:  # a row of any content must not end the run; close() reports it
            self._failure = error
            self.num_lost += max(self._block.count(b"\n"), 1)

    def _flush(self) -> None:
        while self._block:  # a nearly full disk takes part of it
            del self._block[: os.write(self._descriptor, self._block)]

    def close(self) -> None:
        """Close the file; twice does no harm.

        Raises:
            StoreError: rows were lost.
        """
        if self._descriptor < 0:
            return
        try:
            if self._failure is None:
                self._flush()
        except OSError as error:
            self._failure = error
            self.num_lost += self._block.count(b"\n")
        os.close(self._descriptor)
        self._descriptor = -1
        if self._failure is not None:
            raise StoreError(
                f"{self.num_lost} rows are missing from {self._path}: {self._failure!r}"
            ) from self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except StoreError as failure:
            logging.getLogger(__name__).error("%s", failure)


def _plain(value: Any) -> Any:
    """What msgspec does not know: numpy's scalars and arrays; anything else as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


class FanOut:
    """A MetricsSink that passes rows on to several; None is left out."""

    def __init__(self, *sinks: MetricsSink | None) -> None:
        self._sinks = [sink for sink in sinks if sink is not None]

    def emit(self, row: Mapping[str, Any]) -> None:
        """To each in turn."""
        for sink in self._sinks:
            sink.emit(row)
