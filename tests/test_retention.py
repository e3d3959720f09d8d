"""What is deleted is needed by nobody, and a run takes no more space than was said at its start."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from durable import Life, live
from headway.config import Config
from headway.errors import RunDirError
from headway.resume import recover
from headway.retention import SizeEstimate, estimate, oldest_needed, prune_batches
from headway.store.batches import batch_path, shipped_path
from headway.store.run_dir import RunDir
from headway.trainer.checkpoints import complete_checkpoints
from simulated_disk import SimulatedDisk
from test_durable import durable_config

KEEP_CHECKPOINTS = 2


def checkpoint(folder: Path, version: int, *, is_whole: bool = True) -> None:
    path = folder / "checkpoints" / f"step-{version:06d}"
    path.mkdir(parents=True, exist_ok=True)
    if is_whole:
        (path / "COMPLETE").write_text(json.dumps({"version": version, "files": {}}))


def batch_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in (folder / "batches").glob("step-*.parquet"))


@pytest.mark.parametrize("seed", range(100))
def test_pruning_leaves_every_batch_that_a_resume_can_need(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    (tmp_path / "batches").mkdir()
    newest = int(rng.integers(0, 30))
    for step in range(newest + 1):
        batch_path(tmp_path, step).touch()
        shipped_path(tmp_path, step).touch()
    (tmp_path / "batches" / "step-copy.parquet").touch()
    versions = sorted({int(one) for one in rng.integers(0, newest + 2, int(rng.integers(0, 6)))})
    broken = {version for version in versions if rng.random() < 0.3}
    for version in versions:
        checkpoint(tmp_path, int(version), is_whole=version not in broken)
    keep, keep_checkpoints = int(rng.integers(1, 12)), int(rng.integers(1, 4))
    prune_batches(tmp_path, newest, keep=keep, keep_checkpoints=keep_checkpoints)
    (tmp_path / "batches" / "step-copy.parquet").unlink()  # not the run's, and left alone
    kept = batch_steps(tmp_path)
    whole = [version for version in versions if version not in broken][-keep_checkpoints:]
    oldest = whole[0] if len(whole) == keep_checkpoints else 0
    assert oldest_needed(tmp_path, keep_checkpoints) == oldest
    assert kept == list(range(max(min(oldest, newest + 1 - keep), 0), newest + 1))
    assert {path.stem for path in (tmp_path / "batches").glob("*.shipped")} == {
        path.stem for path in (tmp_path / "batches").glob("*.parquet")
    }


def retaining(
    folder: Path, keep: int, every: int, lag: int
) -> Callable[[str, SimulatedDisk], None]:
    """After each batch, a trainer that saves now and then, and a store that deletes."""

    def at_write(what: str, disk: SimulatedDisk) -> None:
        if what == "batch written":
            newest = batch_steps(folder)[-1]
            version = max(newest - lag, 0) // every * every  # batches below it are trained
            if version:
                checkpoint(folder, version)
            prune_batches(folder, newest, keep=keep, keep_checkpoints=KEEP_CHECKPOINTS)

    return at_write


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keep", [1, 4])
def test_a_run_that_deletes_its_batches_can_be_resumed_from_every_kept_checkpoint(
    keep: int, seed: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    config = durable_config("recommended", 40, seed)
    at_write = retaining(tmp_path, keep, every=int(rng.integers(1, 6)), lag=int(rng.integers(1, 3)))
    life = live(config, tmp_path, killed_at=30.0, at_write=at_write)
    for kill in itertools.count():
        if life.outcome is not None:
            break
        found = sorted(complete_checkpoints(tmp_path))
        # The newest may be damaged, and then it is the one before that a resume begins from.
        usable = [number for number, _ in found][-KEEP_CHECKPOINTS:]
        version = int(rng.choice(usable if len(usable) == KEEP_CHECKPOINTS else [0, *usable]))
        for number, path in found:
            if number > version:
                shutil.rmtree(path)
        life = live(
            config,
            tmp_path,
            version=version,
            killed_at=rng.uniform(5, 40) if kill < 5 else None,
            at_write=at_write,
        )
    assert life.outcome is not None and life.outcome.exit_reason == "completed"
    life.orchestrator.ledger.check()
    assert len(batch_steps(tmp_path)) < 40


def test_a_run_whose_batches_are_gone_is_refused_in_words(tmp_path: Path) -> None:
    config = durable_config("recommended", 10)
    live(config, tmp_path, killed_at=15.0)
    run_dir = RunDir(tmp_path)
    run_dir.write_config(config)
    batch_path(tmp_path, 0).unlink()
    with pytest.raises(RunDirError, match=r"cannot go on from version 0.*batch 0 is gone"):
        recover(config, run_dir, tmp_path)


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    config = durable_config("recommended", 20)
    live(config, tmp_path, killed_at=50.0)
    run_dir = RunDir(tmp_path)
    run_dir.write_config(config)
    for version in (2, 3, 4):
        checkpoint(tmp_path, version)
    marker = {"version": 4, "files": {"gone": {}}}
    (tmp_path / "checkpoints" / "step-000004" / "COMPLETE").write_text(json.dumps(marker))
    recovered = recover(config, run_dir, tmp_path)
    recovered.database.close()
    assert recovered.state.version == 3
    assert sorted(version for version, _ in complete_checkpoints(tmp_path)) == [2, 3]
    assert oldest_needed(tmp_path, KEEP_CHECKPOINTS) == 2


def model_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def bytes_of(folder: Path, *patterns: str) -> int:
    return sum(p.stat().st_size for pattern in patterns for p in folder.rglob(pattern))


@pytest.mark.parametrize("policy", ["recommended", "ship", "wait"])
def test_the_estimate_bounds_a_simulated_run(policy: str, tmp_path: Path) -> None:
    stated = durable_config(policy, 30).model_dump(mode="json")
    stated["simulate"]["rollout_seconds"] |= {"max": 80.0}  # 800 tokens
    config = Config.model_validate(stated)
    size = estimate(config, model_folder(tmp_path / "model"))
    folder = tmp_path / "run"
    folder.mkdir()
    life: Life = live(config, folder)
    assert life.outcome is not None and life.outcome.exit_reason == "completed"
    batches = bytes_of(folder, "*.parquet")
    assert 0.02 * size.batches < batches < size.batches
    assert bytes_of(folder, "ledger.db*") < size.spool + size.rows
    assert bytes_of(folder, "*") < size.total


def test_what_does_not_fit_is_told_with_the_setting_to_change(tmp_path: Path) -> None:
    names = [field.name for field in dataclasses.fields(SizeEstimate)]
    small = SizeEstimate(**dict.fromkeys(names, 1))
    assert small.shortage(tmp_path) is None
    for part, setting in (("batches", "store.keep_batches"), ("weights", "weights.keep_last")):
        large = dataclasses.replace(small, **{part: 10**18})
        assert setting in str(large.shortage(tmp_path))


def test_fewer_batches_and_checkpoints_take_less(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    stated = durable_config("recommended", 1000).model_dump(mode="json")
    every = estimate(Config.model_validate(stated), model)
    stated["store"] = {"keep_batches": 10}
    few = estimate(Config.model_validate(stated), model)
    assert few.batches < 0.2 * every.batches and few.per_step == every.per_step
