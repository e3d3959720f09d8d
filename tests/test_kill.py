"""Real runs, killed at random moments and resumed: `make test-kill` does it fifty times."""

import os
import random
import shutil
import signal
import threading
from pathlib import Path

import psutil
import pytest

from headway.builtin_model import ensure_model
from headway.config import ModelConfig
from headway.config.file import load_config
from headway.core.ledger import SampleState
from headway.store.audit import audit
from headway.store.batches import batch_path
from headway.store.database import RunDatabase
from headway.store.recovery import read_state
from test_cli import headway
from test_run import Run

NUM_KILLS = int(os.environ.get("HEADWAY_KILLS", "5"))
SEED = int(os.environ.get("HEADWAY_KILL_SEED", "0"))
BATCHES_PER_LIFE = 4
BATCH_SIZE = 4
TRAINER, ENGINE = "headway.trainer", "headway.engines.local"
VICTIMS = (("run",), ("run", TRAINER, ENGINE), (TRAINER,), (ENGINE,))


class Killed:
    """One run with many lives."""

    def __init__(self, folder: Path, *overrides: str, steps: int) -> None:
        self._folder = folder
        self._cache = folder / "cache"
        self._overrides = ("--run.resume", "true", *overrides)
        self._steps = steps
        self.dir = folder / "run"
        model = ModelConfig(cache_dir=str(self._cache), warm_start_steps=2)
        ensure_model(model, seed=0)

    def start(self, steps: int | None = None) -> Run:
        return Run(self._folder, self._cache, *self._overrides, steps=steps or self._steps)

    def num_batches(self) -> int:
        """How many are on disk, shipped or not."""
        return len(list((self.dir / "batches").glob("*.parquet")))

    def batches(self) -> dict[Path, bytes]:
        """Those that the trainer may have seen."""
        markers = (self.dir / "batches").glob("*.shipped")
        return {path: path.read_bytes() for one in markers if (path := one.with_suffix(".parquet"))}

    def finished(self) -> set[int]:
        """Samples that had finished, by what is on disk."""
        database = RunDatabase(self.dir / "ledger.db")
        found = database.rows("SELECT id FROM samples WHERE state IN ('accepted', 'batched')")
        database.close()
        return {one for (one,) in found}


def kill(run: Run, victims: tuple[str, ...]) -> None:
    pids = [run.process.pid if one == "run" else run.child(one) for one in victims]
    children = psutil.Process(run.process.pid).children(recursive=True)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    run.process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, "a process outlived its run"


def test_a_run_killed_again_and_again_trains_every_finished_sample_once(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    # Hardly any learning: a policy that answers all would leave little to train on.
    options = "--actor.checkpoint_every 3 --actor.optimizer.lr 1e-6 --run.max_empty_batches 1000"
    killed = Killed(tmp_path, *options.split(), steps=1_000_000)
    shipped: dict[Path, bytes] = {}
    finished: set[int] = set()
    for number in range(NUM_KILLS):
        run = killed.start()
        target = killed.num_batches() + chance.randrange(BATCHES_PER_LIFE)
        try:
            run.until(lambda: killed.num_batches() > target)  # noqa: B023
            threading.Event().wait(chance.uniform(0, 0.3))
            kill(run, VICTIMS[number % len(VICTIMS)])
        finally:
            run.process.kill()
        now = killed.batches()
        known = {path: path.read_bytes() for path in shipped}
        assert known == shipped, f"a batch changed (HEADWAY_KILL_SEED={SEED}, kill {number})"
        shipped |= now
        finished |= killed.finished()
    steps = killed.num_batches() + BATCHES_PER_LIFE
    code, summary, said = killed.start(steps).end()
    assert code == 0, said
    assert summary["exit_reason"] == "completed"
    assert {path: path.read_bytes() for path in shipped} == shipped
    config = load_config(killed.dir / "config.yaml")
    assert config.bound.guaranteed_age == 2
    assert not audit(config, killed.dir, steps)
    database = RunDatabase(killed.dir / "ledger.db")
    state = read_state(database, steps)
    state.check(BATCH_SIZE)
    names = database.rows("SELECT id, state FROM lives")
    fates = dict(names)
    assert sorted(fates) == list(range(state.num_admitted))
    kept = {SampleState.ACCEPTED, SampleState.DROPPED, "trained"}
    assert {fates[one] for one in finished} <= kept
    assert summary["samples"]["admitted"] == state.num_admitted
    assert summary["samples"]["trained"] == BATCH_SIZE * steps


def test_sigterm_leaves_a_run_that_skips_no_prompt(tmp_path: Path) -> None:
    killed = Killed(tmp_path, steps=1000)
    run = killed.start()
    run.until(lambda: run.has_shipped(2))
    run.process.send_signal(signal.SIGTERM)
    code, first, said = run.end()
    assert code == 143, said
    killed = Killed(tmp_path, steps=first["steps"] + 3)
    code, second, said = killed.start().end()
    assert code == 0, said
    # The summary is of the whole run, and the trainer saved what it had when it was told that there
    # are no more batches: of the steps before, none was trained again.
    assert second["steps"] == first["steps"] + 3
    assert second["tokens"]["trained"] > first["tokens"]["trained"]
    updates = (killed.dir / "trainer" / "metrics.jsonl").read_text().splitlines()
    assert len(updates) == second["steps"]
    assert second["samples"]["trained"] == BATCH_SIZE * (first["steps"] + 3)
    database = RunDatabase(killed.dir / "ledger.db")
    positions = sorted(one for (one,) in database.rows("SELECT position FROM samples"))
    assert positions == list(range(len(positions)))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("--rollout.group_size", "2"), "rollout.group_size: 4 -> 2"),
        (("--envs.0.name", "other"), "envs"),
        (("--run.steps", "1"), "nothing is left to do"),
    ],
)
def test_what_would_break_the_data_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], words: str, done: Path
) -> None:
    killed = Killed(done, steps=2)
    before = {path: path.stat().st_mtime_ns for path in killed.dir.rglob("*") if path.is_file()}
    again = Run(done, done / "cache", "--run.resume", "true", *overrides, steps=2)
    code, _, said = again.end()
    assert code == 2 and words in said, said
    after = {path: path.stat().st_mtime_ns for path in killed.dir.rglob("*") if path.is_file()}
    assert {path.name for path in before if before[path] != after.get(path)} <= {".lock"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that has ended."""
    folder = tmp_path_factory.mktemp("done")
    code, _, said = Killed(folder, steps=2).start().end()
    assert code == 0, said
    return folder


def test_a_run_goes_on_before_a_checkpoint_that_is_damaged(tmp_path: Path, done: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(done / "run", run_dir)
    weights = run_dir / "checkpoints" / "step-000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\1\2\3")
    batches = {path: path.read_bytes() for path in (run_dir / "batches").glob("step-*.parquet")}
    resumed = headway("run", "--resume", str(run_dir), "--run.steps", "3", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "step-000002 is passed over: model.safetensors" in resumed.stderr
    assert {path: path.read_bytes() for path in batches} == batches
    assert not audit(load_config(run_dir / "config.yaml"), run_dir, 3)
    kept = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert kept == {"damaged-step-000002", "step-000003"}


@pytest.mark.parametrize("damage", ["ledger", "batch"])
def test_a_run_that_cannot_go_on_says_why_and_stays_as_it_is(
    damage: str, tmp_path: Path, done: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(done / "run", run_dir)
    if damage == "ledger":
        (run_dir / "ledger.db").unlink()
    else:
        shutil.rmtree(run_dir / "checkpoints")  # so that both batches are needed again
        path = batch_path(run_dir, 1)
        path.write_bytes(path.read_bytes()[:-100])
    before = {*run_dir.rglob("*")}
    tried = headway("run", "--resume", str(run_dir), "--run.steps", "3", cwd=tmp_path)
    words = "ledger.db is missing" if damage == "ledger" else "the trainer needs batch 1 again"
    assert tried.returncode == 2 and words in tried.stderr, tried.stderr
    assert {*run_dir.rglob("*")} - before <= {run_dir / ".lock"}
