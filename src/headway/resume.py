"""Resuming a run: what may change in its configuration, and what its folder is brought back to.

The trainer's newest sound checkpoint says at which version the run goes on. Everything later that
was said about the run is taken back: published versions above it, hand-over markers, the marker of
its end. Batches stay, and are trained again from it as they are.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.config.file import load_config
from headway.core.records import RunState, Served
from headway.errors import ConfigError, RunDirError, StoreError
from headway.store.atomic import remove_folder
from headway.store.batches import batch_path, finished_path, read_batch
from headway.store.database import RunDatabase
from headway.store.recovery import adopt_batch, read_state
from headway.store.run_dir import RunDir
from headway.trainer.checkpoints import OPTIMIZER, complete_checkpoints, latest_checkpoint
from headway.weights.canary import CANARY
from headway.weights.folder import COMPLETE, published_versions

FIXED = (
    "run.seed",
    "rollout.max_head_offpolicyness",
    "rollout.preset",
    "rollout.enforcement",
    "rollout.order",
    "rollout.window",
    "rollout.over_bound",
    "rollout.wait_seconds",
    "rollout.after_wait",
    "rollout.consumer_batch_size",
    "rollout.group_size",
    "rollout.temperature",
    "actor.advantage",
    "model.path",
    "model.warm_start_steps",
    "envs",
)
"""What the data on disk was made with: changing it would mix two runs under one name."""

_TAIL_BYTES = 1 << 16
_SHIPPED = re.compile(r"step-(\d{6,})\.shipped")
_LEFTOVER = re.compile(r"\..*\.(tmp|old)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A field that is not what it was."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.now!r}"

    @property
    def breaks_data(self) -> bool:
        """Whether the run's data was made with the old value."""
        return any(self.key == fixed or self.key.startswith(f"{fixed}.") for fixed in FIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a resumed run begins from."""

    state: RunState
    database: RunDatabase
    model_dir: Path
    """Weights of `state.version`, for the engines."""
    changes: tuple[Change, ...]
    seconds: float
    """How long the run had been going on, by its last metric row."""


def config_to_resume(run_dir: Path, path: Path | None, overrides: Sequence[str]) -> Config:
    """The configuration of a resumed run: that of `path`, or the run's own, and overrides.

    Raises:
        ConfigError: it is none, or another folder is named. RunDirError: there is no run.
    """
    own = RunDir(run_dir).config
    if not own.is_file():
        raise RunDirError(f"{run_dir} holds no run to resume: there is no {own.name} in it")
    _require_ledger(RunDir(run_dir))
    config = load_config(path or own, [*overrides, "--run.dir", str(run_dir)])
    refuse_changes(run_dir, config)
    return config


def _require_ledger(run_dir: RunDir) -> None:
    """Raises RunDirError when a run has begun and its ledger is not there."""
    if not run_dir.metrics.is_file() or not run_dir.metrics.stat().st_size:
        return  # cut off before it began
    if run_dir.ledger.is_file() and run_dir.ledger.stat().st_size:
        return
    with run_dir.metrics.open("rb") as lines:
        is_simulated = b'"simulated":true' in lines.readline()
    if is_simulated:
        raise RunDirError(
            f"{run_dir.path} is a simulated run, which cannot be resumed: simulate it again with "
            "more steps (--run.dir NEW)"
        )
    raise RunDirError(
        f"{run_dir.ledger} is missing or empty, and nothing else says what became of the run's "
        "samples: restore it from a copy, or start a new run (--run.dir NEW)"
    )


def refuse_changes(run_dir: Path, config: Config) -> tuple[Change, ...]:
    """What differs from the run's own configuration. Raises ConfigError when it may not."""
    recorded = load_config(RunDir(run_dir).config)
    changes = tuple(_changes("", recorded.model_dump(mode="json"), config.model_dump(mode="json")))
    if broken := [change for change in changes if change.breaks_data]:
        raise ConfigError(
            f"{run_dir} cannot be resumed with another configuration where its data was made with "
            "the old one:\n" + "\n".join(f"  {change}" for change in broken) + "\n"
            "Leave these as they were, or start a new run (--run.dir NEW)"
        )
    return tuple(change for change in changes if change.key != "run.dir")


def _changes(prefix: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for name in sorted({*before, *now}):
        old, new, key = before.get(name), now.get(name), f"{prefix}{name}"
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(f"{key}.", old, new)
        elif old != new:
            yield Change(key=key, before=old, now=new)


def recover(config: Config, run_dir: RunDir, model_dir: Path) -> Recovered:
    """Bring a run's folder back to the trainer's newest sound checkpoint. Call it under the run's
    lock, with none of its processes alive.

    Args:
        config: as `config_to_resume` made it.
        model_dir: folder of the initial model, which is version 0.

    Raises:
        RunDirError: nothing is left to do, or the folder cannot be used.
        StoreError: what is on disk contradicts itself.
        ConfigError: the configuration may not change like that.
    """
    changes = refuse_changes(run_dir.path, config)
    version, checkpoint = latest_checkpoint(run_dir.path) or (0, None)
    steps = config.run.steps
    if version >= steps:
        raise RunDirError(
            f"{run_dir.path} has trained {version} of {steps} steps: nothing is left to do; to go "
            f"on: headway run --resume {run_dir.path} --run.steps N"
        )
    _require_ledger(run_dir)
    database = RunDatabase(run_dir.ledger)
    adopt_batch(database, run_dir.path)
    state = read_state(database, version)
    state.check(config.rollout.consumer_batch_size)
    if state.num_batches > steps:
        raise RunDirError(
            f"{run_dir.path} has {state.num_batches} batches already: run.steps = {steps} is less"
        )
    for step in range(version, state.num_batches):
        if not (path := batch_path(run_dir.path, step)).exists():
            raise RunDirError(
                f"{run_dir.path} cannot go on from version {version}, which is the newest that is "
                f"undamaged: batch {step} is gone (deleted by store.keep_batches, or by hand)"
            )
        try:
            read_batch(path)
        except StoreError as error:
            raise RunDirError(
                f"{run_dir.path} cannot go on from version {version}: the trainer needs batch "
                f"{step} again, and what it was made of is not kept: {error}, or start a new run "
                "(--run.dir NEW)"
            ) from error
    try:
        _take_back(run_dir, version)
        if checkpoint is not None:
            model_dir = _kept(checkpoint, run_dir.start)
        seconds = _last_time(run_dir.metrics)
    except OSError as error:
        raise StoreError(f"cannot prepare {run_dir.path} for a resume: {error}") from error
    database.apply([Served(version=version)])
    return Recovered(
        state=state, database=database, model_dir=model_dir, changes=changes, seconds=seconds
    )


def _take_back(run_dir: RunDir, version: int) -> None:
    """Remove what was said of the run after `version`, or by the process that is gone."""
    for number, folder in published_versions(run_dir.weights):
        if number > version:
            remove_folder(folder)
    for number, folder in complete_checkpoints(run_dir.path):
        if number > version:  # damaged, and would count among those that are kept
            _set_aside(folder)
    for entry in [*run_dir.batches.iterdir()]:
        marked = _SHIPPED.fullmatch(entry.name)
        is_later = marked is not None and int(marked[1]) >= version
        if is_later or (_LEFTOVER.fullmatch(entry.name) and entry.is_file()):
            entry.unlink()
    for said in (
        finished_path(run_dir.path),
        run_dir.batches / "leftovers.parquet",
        run_dir.trainer_ready,
        run_dir.summary,
        run_dir.path / CANARY,
    ):
        said.unlink(missing_ok=True)
    for lines in (run_dir.metrics, run_dir.trace):
        _cut_last_line(lines)


def _set_aside(folder: Path) -> None:
    """Under another name: what cannot be read today need not be lost."""
    aside = folder.with_name(f"damaged-{folder.name}")
    if aside.exists():
        remove_folder(aside)
    folder.rename(aside)


def _kept(checkpoint: Path, start: Path) -> Path:
    """The checkpoint's model under a name of its own: engines are started from it, also later, when
    the trainer has deleted the checkpoint. Files are linked where the disk can do that."""
    if start.exists():
        remove_folder(start)
    start.mkdir()
    for file in checkpoint.iterdir():
        if file.name in (OPTIMIZER, COMPLETE):
            continue
        try:
            os.link(file, start / file.name)
        except OSError:
            shutil.copyfile(file, start / file.name)
    return start


def _cut_last_line(path: Path) -> None:
    """Drop the half of a line that a kill left: more will be appended."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL_BYTES, 0))
        tail = file.read()
        file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)


def _last_time(metrics: Path) -> float:
    """The time of the last whole row, 0 without one."""
    if not metrics.is_file():
        return 0.0
    with metrics.open("rb") as file:
        file.seek(max(metrics.stat().st_size - _TAIL_BYTES, 0))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            return float(json.loads(line)["time"])
        except (ValueError, KeyError, TypeError):  # cut off by the kill
            continue
    return 0.0
