"""The command line as a script sees it: exit codes, and what goes to stdout and to stderr."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from headway import __version__
from headway.config import Config
from headway.config.file import dump_config, load_config
from headway.errors import RunDirError, StoreError
from headway.store.run_dir import JsonLines, RunDir

WORKLOAD = """
run: {steps: 4}
rollout: {consumer_batch_size: 4, max_concurrent_rollouts: 12, group_size: 2}
eval: {every: 0}
"""


def headway(
    *words: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "headway", *words],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_simulated_run_is_not_resumed_as_a_real_one(workload: Path) -> None:
    headway("simulate", "w.yaml", "--quiet", "--run.dir=out", cwd=workload)
    before = {path: path.read_bytes() for path in (workload / "out").rglob("*.*")}
    done = headway("run", "--resume", "out", "--run.steps", "5", cwd=workload)
    assert done.returncode == 2 and "is a simulated run" in done.stderr
    assert {path: path.read_bytes() for path in (workload / "out").rglob("*.*")} == before


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """A folder with a workload `w.yaml`."""
    (tmp_path / "w.yaml").write_text(WORKLOAD, encoding="utf-8")
    return tmp_path


def test_simulate_prints_only_json_and_leaves_a_run_directory(workload: Path) -> None:
    done = headway("simulate", "w.yaml", "--json", "--run.dir=out", cwd=workload)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["exit_reason"], summary["steps"]) == ("completed", 4)
    assert "step 4/4" in done.stderr
    assert json.loads((workload / "out" / "summary.json").read_text()) == summary
    config = load_config(workload / "out" / "config.yaml")
    overrides = ["--run.dir", "out", "--run.metrics_interval_seconds", "60"]
    assert config == load_config(workload / "w.yaml", overrides)
    rows = [json.loads(line) for line in (workload / "out" / "metrics.jsonl").open()]
    assert [rows[0]["kind"], rows[-1]["kind"]] == ["run", "summary"]


def test_a_failed_run_prints_its_summary_and_exits_with_its_code(workload: Path) -> None:
    options = ["--quiet", "--simulate.reward_probability", "0"]
    done = headway("simulate", "w.yaml", *options, "--json", cwd=workload)
    assert done.returncode == 1
    assert json.loads(done.stdout)["exit_reason"] == "empty_batches"


def test_quiet_prints_the_summary_alone(workload: Path) -> None:
    done = headway("simulate", "w.yaml", "--quiet", cwd=workload)
    assert done.returncode == 0
    assert done.stdout.startswith("completed") and "step 4/4" not in done.stdout + done.stderr


def test_a_second_run_in_the_same_directory_is_refused_and_touches_nothing(workload: Path) -> None:
    assert headway("simulate", "w.yaml", "--quiet", cwd=workload).returncode == 0
    before = (workload / "runs" / "run" / "metrics.jsonl").read_bytes()
    done = headway("simulate", "w.yaml", cwd=workload)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: run directory runs/run holds a run")
    assert (workload / "runs" / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rn"], 'Did you mean "run"?'),
        (["--versio"], "did you mean --version?"),
        (["run", "--jsn"], "did you mean --json?"),
        (["simulate", "--steps", "4"], "did you mean run.steps?"),
        (["run", "none.yaml"], "there is no configuration file none.yaml"),
        (["run", "w.yaml", "--rollout.queue_size", "1"], "queue_size: 1 is smaller"),
        (["run", "w.yaml", "other.yaml"], "'other.yaml' is no override"),
        (["run", "w.yaml", "--run.dir", "w.yaml"], "cannot use run directory w.yaml"),
        (["report"], "requires an argument"),
        (["report", "none"], "none holds no run"),
    ],
)
def test_bad_usage_is_one_error_without_traceback(
    workload: Path, words: Sequence[str], told: str
) -> None:
    done = headway(*words, cwd=workload)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: " in done.stderr and told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (workload / "runs").exists()


def test_the_traceback_is_there_when_asked_for(workload: Path) -> None:
    done = headway("run", "none.yaml", cwd=workload, env={"HEADWAY_DEBUG": "1"})
    assert done.returncode == 2
    assert "Traceback" in done.stderr and "error: " in done.stderr


def test_help_and_version(tmp_path: Path) -> None:
    assert headway("--version", cwd=tmp_path).stdout.strip() == __version__
    for words in ([], ["--help"], ["run", "--help"], ["simulate", "--help"], ["report", "--help"]):
        done = headway(*words, cwd=tmp_path)
        assert done.returncode == 0 and "Usage: headway" in done.stdout, words


# --- the run directory ------------------------------------------------------------------------


def config_in(path: Path) -> Config:
    return Config.model_validate({"run": {"dir": str(path)}})


def test_a_new_run_directory_holds_the_resolved_configuration(tmp_path: Path) -> None:
    config = config_in(tmp_path / "a" / "b")
    run_dir = RunDir.create(config)
    assert run_dir.config.read_text() == dump_config(config)
    assert run_dir.batches.is_dir() and run_dir.weights.is_dir() and run_dir.logs.is_dir()


@pytest.mark.parametrize("where", ["file", "file/below", "x" * 300])
def test_a_place_that_cannot_hold_a_run_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunDirError, match="cannot use run directory"):
        RunDir.create(config_in(tmp_path / where))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_of_two_runs_that_start_together_one_is_refused(tmp_path: Path) -> None:
    for attempt in range(20):
        config = config_in(tmp_path / str(attempt))
        together = Barrier(2)

        def create(config: Config = config, together: Barrier = together) -> bool:
            together.wait(timeout=60)
            try:
                RunDir.create(config)
            except RunDirError:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            made = [task.result() for task in [pool.submit(create), pool.submit(create)]]
        assert sorted(made) == [False, True]


def test_json_lines_are_whole_and_hold_what_json_can(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as sink:
        sink.emit({"a": float("nan"), "b": numpy.float32(0.5), "c": tmp_path, "d": "\n\u2028"})
        lines = path.read_text(encoding="utf-8").split("\n")
    assert json.loads(lines[0]) == {"a": None, "b": 0.5, "c": str(tmp_path), "d": "\n\u2028"}
    assert lines[1:] == [""]


def test_rows_that_cannot_be_written_are_counted_and_told_at_the_end(tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["itself"] = loop
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.emit({"a": 1})
    sink.emit(loop)
    sink.emit({"a": 2})
    with pytest.raises(StoreError, match=r"2 rows are missing from .*m\.jsonl"):
        sink.close()
    sink.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"a":1}\n'


def test_ctrl_c_in_a_simulation_leaves_a_summary(workload: Path) -> None:
    command = [sys.executable, "-m", "headway", "simulate", "w.yaml", "--json", "--run.dir=out"]
    steps = ["--run.steps", "1000000"]
    with subprocess.Popen(
        [*command, *steps], cwd=workload, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        while " a step " not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    summary = json.loads(out)
    assert (summary["exit_reason"], summary["exit_code"]) == ("interrupted", 130)
    assert summary["steps"] >= 1
    assert json.loads((workload / "out" / "summary.json").read_text()) == summary
    assert headway("replay", "out", cwd=workload).returncode == 0
