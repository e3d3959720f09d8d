"""`headway run` as a user runs it: real engine and trainer processes, and what breaks them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.builtin_model import ensure_model
from headway.config import ModelConfig
from headway.store.batches import batch_path, read_batch

ENVIRONMENT = """
import asyncio

from headway.core.rollout import Task
from headway.ports import Score

class Environment:
    def __init__(self, name, tokenizer, reward):
        self.name, self.tokenizer, self.reward = name, tokenizer, reward

    async def run(self, transcript):
        transcript.observe(self.tokenizer.encode("1+2="))
        while self.reward == "stubborn":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
        await transcript.act()

    def score(self, task, completions):
        if self.reward == "raises":
            raise KeyError("answer")
        if self.reward == "constant":
            return Score(reward=0.0)
        return Score(reward=float(sum(completions[-1].token_ids.tolist()) % 2))

class Tasks:
    def __init__(self, name):
        self.name, self.position = name, 0

    async def next_task(self):
        self.position += 1
        return Task(env=self.name, key=str(self.position), position=self.position - 1, data={})

    def restore(self, position):
        self.position = position

def create(*, name, tokenizer, seed, split, reward="parity"):
    return Environment(name, tokenizer, reward), Tasks(name)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the built-in model after two warm-start steps."""
    cache = tmp_path_factory.mktemp("cache")
    ensure_model(ModelConfig(cache_dir=str(cache), warm_start_steps=2), seed=0)
    return cache


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended, or is only about to become what it will be
        return ""


class Run:
    """A running `headway run`; every file of it lies under `folder`."""

    def __init__(self, folder: Path, cache: Path, *overrides: str, steps: int = 1000) -> None:
        self.dir = folder / "run"
        environment = folder / "environment.py"
        environment.write_text(ENVIRONMENT)
        words = [
            *("--run.dir", str(self.dir), "--run.steps", str(steps)),
            *("--run.shutdown_seconds", "15", "--run.metrics_interval_seconds", "0.1"),
            *("--model.cache_dir", str(cache), "--model.warm_start_steps", "2"),
            *("--envs.0.id", f"{environment}:create", "--envs.0.name", "parity"),
            *("--rollout.consumer_batch_size", "4", "--rollout.group_size", "4"),
            *("--rollout.max_concurrent_rollouts", "12", "--rollout.max_new_tokens", "12"),
            *("--eval.every", "0"),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headway", "run", *words, *overrides, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._children: list[psutil.Process] = []

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll until it holds; fails when the run ends first, or after two minutes."""
        deadline = time.monotonic() + 120
        pause = threading.Event()
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the run did not come that far"
            pause.wait(0.05)
        self._children = psutil.Process(self.process.pid).children(recursive=True)

    def has_shipped(self, step: int) -> bool:
        return (self.dir / "batches" / f"step-{step:06d}.shipped").exists()

    def child(self, module: str) -> int:
        """Process id of the child that runs this module, as soon as there is one."""
        found: list[int] = []

        def is_there() -> bool:
            children = psutil.Process(self.process.pid).children(recursive=True)
            found[:] = [one.pid for one in children if module in _command_line(one)]
            return bool(found)

        self.until(is_there)
        return found[0]

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Exit code, summary and what it said, once it has ended; no child may be left."""
        out, err = self.process.communicate(timeout=120)
        _, alive = psutil.wait_procs(self._children, timeout=5)
        assert not alive, "a process outlived its run"
        summary = json.loads(out) if out.strip() else {}
        if summary:
            assert summary == json.loads((self.dir / "summary.json").read_text())
            assert (self.dir / "report.html").is_file()
        return self.process.returncode, summary, err


@pytest.fixture
def start(tmp_path: Path, cache: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs and ends those that a failing test leaves behind."""
    runs: list[Run] = []

    def start(*overrides: str, steps: int = 1000) -> Run:
        runs.append(Run(tmp_path, cache, *overrides, steps=steps))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def assert_conserved(samples: dict[str, Any]) -> None:
    states = set(samples) - {"admitted", "reasons"}
    assert samples["admitted"] == sum(samples[state] for state in states)


@pytest.mark.parametrize("mode", ["keep", "interrupt", "finish"])
def test_a_run_completes_and_every_file_agrees(start: Callable[..., Run], mode: str) -> None:
    run = start("--engine.update_mode", mode, "--rollout.temperature", "0.8", steps=6)
    code, summary, said = run.end()
    assert code == 0, said
    assert summary["exit_reason"] == "completed" and summary["steps"] == 6
    assert_conserved(summary["samples"])
    assert summary["samples"]["trained"] == 24
    batches = [read_batch(batch_path(run.dir, step)) for step in range(6)]
    heads = [b.step - r.version_runs.head for b in batches for r in b.rollouts if r.num_trainable]
    assert summary["age"]["head_max"] == max(heads)
    rows = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(6))
    size = next(row for row in rows if row["kind"] == "run")["size"]
    written = sum(path.stat().st_size for path in run.dir.rglob("*") if path.is_file())
    assert written < size["total"] < 100e6
    # The trainer recomputes what the engine reported: batch 0 was sampled by the initial weights.
    assert steps[0]["trainer"]["behaviour_weight_mean"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("module", "reason", "named"),
    [
        ("headway.engines.local", "engine_failed", "engine-0"),
        ("headway.trainer", "trainer_failed", "trainer"),
    ],
)
def test_a_killed_part_ends_the_run_and_is_named(
    start: Callable[..., Run], module: str, reason: str, named: str
) -> None:
    run = start()
    run.until(lambda: run.has_shipped(2))
    os.kill(run.child(module), signal.SIGKILL)
    code, summary, said = run.end()
    assert code == 1, said
    assert summary["exit_reason"] == reason
    assert named in summary["message"] and "SIGKILL" in summary["message"]
    assert summary["steps"] >= 1
    assert_conserved(summary["samples"])


def test_sigterm_drains_and_loses_nothing(start: Callable[..., Run]) -> None:
    run = start()
    run.until(lambda: run.has_shipped(2))
    run.process.send_signal(signal.SIGTERM)
    code, summary, said = run.end()
    assert code == 143, said
    assert summary["exit_reason"] == "interrupted"
    assert_conserved(summary["samples"])
    assert summary["samples"]["dropped"] == 0
    left = summary["samples"]["accepted"]
    saved = run.dir / "batches" / "leftovers.parquet"
    assert left == (len(read_batch(saved).groups) if saved.exists() else 0)


def test_a_preempted_run_says_that_it_should_be_started_again(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start("--run.resume", "true")
    run.until(lambda: run.has_shipped(2))
    run.process.send_signal(signal.SIGUSR1)
    code, first, said = run.end()
    assert code == 75, said
    assert first["exit_reason"] == "preempted" and first["exit_code"] == 75
    assert first["samples"]["dropped"] == 0
    assert_conserved(first["samples"])
    again = start(
        "--run.resume", "true", "--run.max_seconds", "17", "--run.preempt_signal", "SIGTERM"
    )
    code, second, said = again.end()
    assert code == 75, said
    assert second["exit_reason"] == "preempted"
    assert second["samples"]["admitted"] >= first["samples"]["admitted"]
    assert_conserved(second["samples"])


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [(signal.SIGTERM, 143, "interrupted"), (signal.SIGUSR1, 75, "preempted")],
)
def test_a_signal_before_the_run_is_up_ends_its_start(
    start: Callable[..., Run], number: signal.Signals, code: int, reason: str
) -> None:
    run = start()
    run.until(lambda: (run.dir / "logs" / "trainer.log").exists())
    run.process.send_signal(number)
    found, summary, said = run.end()
    assert found == code, said
    assert (summary["exit_reason"], summary["exit_code"]) == (reason, code)
    assert summary["steps"] == 0 == summary["samples"]["admitted"]


def test_a_start_that_takes_long_says_what_it_waits_for(start: Callable[..., Run]) -> None:
    run = start("--engine.urls", '["http://127.0.0.1:9"]', "--run.start_seconds", "13")
    code, summary, said = run.end()
    assert code == 1 and summary["exit_reason"] == "engine_failed", said
    rows = (run.dir / "metrics.jsonl").read_text()
    assert re.search(r"engines at http://127.0.0.1:9( and trainer)? not ready after \d+ s", rows)


def test_an_environment_that_ignores_its_cancellation_cannot_hold_up_the_end(
    start: Callable[..., Run],
) -> None:
    run = start("--envs.0.args.reward", "stubborn", "--run.shutdown_seconds", "6")
    rows = run.dir / "metrics.jsonl"
    run.until(lambda: rows.exists() and '"num_running":12' in rows.read_text())
    run.process.send_signal(signal.SIGTERM)
    code, summary, said = run.end()
    assert code == 143, said
    assert summary["exit_reason"] == "interrupted"
    assert summary["samples"]["interrupted"] == summary["samples"]["admitted"] == 12
    assert "did not end when they were cancelled" in rows.read_text()


@pytest.mark.parametrize(
    ("reward", "reason", "said"),
    [
        ("raises", "environment_failed", "the reward of environment 'parity' raised KeyError"),
        ("constant", "empty_batches", "every reward was 0"),
    ],
)
def test_a_broken_reward_ends_the_run_with_its_cause(
    start: Callable[..., Run], reward: str, reason: str, said: str
) -> None:
    code, summary, _ = start("--envs.0.args.reward", reward).end()
    assert (code, summary["exit_reason"]) == (1, reason)
    assert said in summary["message"]
    assert_conserved(summary["samples"])


def test_a_port_in_use_is_told_and_nothing_is_left_running(start: Callable[..., Run]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, summary, _ = start("--engine.port", str(port)).end()
    assert code == 1 and summary["exit_reason"] == "engine_failed"
    assert f"port {port} of 127.0.0.1 cannot be used" in summary["message"]


def test_what_cannot_work_is_refused_before_anything_starts(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    for overrides, words in (
        (["--rollout.max_head_offpolicynes", "4"], "did you mean"),
        (["--model.path", str(tmp_path / "none")], "model.path"),
        (["--run.dir", "/proc/none/run"], "cannot use run directory"),
    ):
        code, summary, said = start(*overrides).end()
        assert (code, summary) == (2, {}) and words in said, said
        assert "Traceback" not in said
    existing = tmp_path / "run"
    existing.mkdir()
    (existing / "notes.txt").write_text("mine")
    code, _, said = start().end()
    assert code == 2 and "is not empty; nothing was touched" in said
    assert (existing / "notes.txt").read_text() == "mine"
