"""Files that are nobody's beside those of a run change nothing, and are left where they are."""

import logging
import shutil
from pathlib import Path

import pytest

from headway.resume import recover
from headway.sim.faults.state import INITIAL, read_state, write_checkpoint, write_model
from headway.store.run_dir import RunDir
from headway.trainer.checkpoints import latest_checkpoint, save_folder
from headway.weights.folder import publish_folder, published_versions
from simulated import sim_config


def test_strays_with_high_numbers_do_not_push_out_a_version_that_engines_load(
    tmp_path: Path,
) -> None:
    for number in (900, 902, 903):
        (tmp_path / f"v000{number}").mkdir()
    for version in range(1, 6):
        publish_folder(tmp_path, version, lambda to: write_model(to, INITIAL), keep_last=3)
    assert [version for version, _ in published_versions(tmp_path)] == [3, 4, 5, 900, 902, 903]
    assert read_state(tmp_path / "v000003") == INITIAL


def test_strays_do_not_push_out_the_checkpoint_that_was_just_saved(tmp_path: Path) -> None:
    for number in (902, 903):
        stray = tmp_path / "checkpoints" / f"step-000{number}"
        stray.mkdir(parents=True)
        (stray / "COMPLETE").write_text("{}")
    for version in (1, 2, 3):
        save_folder(tmp_path, version, lambda to: write_checkpoint(to, INITIAL), keep_last=2)
    found = latest_checkpoint(tmp_path)
    assert found is not None and found[0] == 3
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000002", "step-000003", "step-000902", "step-000903"]


def test_a_copy_of_a_checkpoint_is_not_taken_for_a_later_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_folder(tmp_path, 3, lambda to: write_checkpoint(to, INITIAL), keep_last=2)
    shutil.copytree(path, path.with_name("step-000800"))
    with caplog.at_level(logging.WARNING):
        found = latest_checkpoint(tmp_path)
    assert found is not None and found[0] == 3
    assert "step-000800 is passed over" in caplog.text and "version 3" in caplog.text


def test_a_resume_leaves_strays_among_the_batches_alone(tmp_path: Path) -> None:
    config = sim_config(run={"dir": str(tmp_path / "run")})
    run_dir = RunDir.create(config)
    mine = [run_dir.batches / name for name in ("step-old.shipped", "notes.txt", ".folder.tmp")]
    mine[2].mkdir()
    gone = [run_dir.batches / name for name in ("step-000003.shipped", ".step-000003.7.tmp")]
    for path in (*mine[:2], *gone):
        path.touch()
    recovered = recover(config, run_dir, tmp_path)
    recovered.database.close()
    assert all(path.exists() for path in mine) and not any(path.exists() for path in gone)
