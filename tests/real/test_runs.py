"""Whole runs of `headway run` on real servers: training in every mode, and servers that fail."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from servers import KIND, MODEL, Servers, engine_settings
from transformers import Qwen3ForCausalLM

from headway.config import UpdateMode
from headway.core.rollout import Rollout
from headway.ports import PublishedWeights
from headway.store.batches import batch_path, read_batch
from headway.weights.folder import publish, version_name
from recompute import recompute_plain

HERE = Path(__file__).parent
STEPS = 24
SAMPLES, GROUP_SIZE = 8, 8
"""As in run.yaml."""
TOLERANCE = 1e-3
"""Nats, as in test_stamps."""
WAIT_SECONDS = 300

torch.set_num_threads(1)


class Run:
    """A running `headway run` with everything under `folder`."""

    def __init__(self, folder: Path, engine: dict[str, Any], **sections: dict[str, Any]) -> None:
        self.dir = folder / "run"
        config = yaml.safe_load((HERE / "run.yaml").read_text())
        for name, section in {"engine": engine, **sections}.items():
            config[name] = {**config.get(name, {}), **section}
        config["run"] |= {"dir": str(self.dir)}
        config["model"] = {"path": str(MODEL)}
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        self.said = (folder / "said.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headway", "run", str(folder / "run.yaml"), "--json"],
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
        )
        self._seen: dict[int, psutil.Process] = {}

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Those of metrics.jsonl so far."""
        try:
            lines = (self.dir / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if row["kind"] == kind]

    def has_event(self, *words: str) -> bool:
        return any(all(word in row["text"] for word in words) for row in self.rows("event"))

    def is_past(self, step: int) -> bool:
        return len(self.rows("step")) > step

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll until it holds; fails when the run ends first, or is late."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert self.process.poll() is None, f"the run ended: {self.tail()}"
            assert time.monotonic() < deadline, f"the run did not come that far: {self.tail()}"
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[child.pid] = child
            time.sleep(0.2)

    def group(self, index: int) -> int:
        """Process group of an engine, by the name of its log, which is its standard output."""
        log = str(self.dir / "logs" / f"engine-{index}.log")
        for child in psutil.Process(self.process.pid).children():
            if os.readlink(f"/proc/{child.pid}/fd/1") == log:
                return child.pid
        raise AssertionError(f"engine-{index} is not running")

    def tail(self) -> str:
        self.said.seek(0)
        return "".join(self.said.readlines()[-30:])

    def server(self, index: int) -> int:
        """Main process of an engine's server: the guard's child, where it has a guard."""
        group = psutil.Process(self.group(index))
        children = group.children() if "headway.guard" in group.cmdline() else [group]
        return min(child.pid for child in children)

    def running(self) -> list[int]:
        """Requests running on each engine, last time it was asked."""
        return [one["num_running"] for one in self.rows("interval")[-1]["engines"].values()]

    def end(self, exit_code: int = 0) -> dict[str, Any]:
        """The summary, once it has ended as it should and left nothing behind."""
        out, _ = self.process.communicate(timeout=WAIT_SECONDS)
        assert self.process.returncode == exit_code, self.tail()
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=10)
        assert not alive, f"processes outlived their run: {alive}"
        return dict(json.loads(out))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs and ends those that a failing test leaves behind."""
    runs: list[Run] = []

    def start(engine: dict[str, Any], **sections: dict[str, Any]) -> Run:
        runs.append(Run(tmp_path, engine, **sections))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        run.said.close()


def reset(servers: Servers, initial: Path) -> None:
    """Make the servers what a new run expects: the initial model, labelled 0."""

    async def scenario() -> None:
        for index in range(len(servers.fleet.urls)):
            client = await servers.client(index, UpdateMode.KEEP, clear_cache=True)
            await client.update_weights(PublishedWeights(version=0, path=initial))
            await client.aclose()

    servers.run(scenario())


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The initial model as it would be published."""
    model = Qwen3ForCausalLM.from_pretrained(MODEL)
    path = publish(tmp_path_factory.mktemp("initial"), 1, model, source=MODEL).path
    assert path is not None
    return path


def check_log_probabilities(run: Run, num_steps: int) -> tuple[int, int, float]:
    """Tokens trained, how many rollouts span versions, and the largest difference in nats between
    what was trained on and a recomputation under the version of every token's stamp."""
    paths = {step + 1: run.dir / "weights" / version_name(step + 1) for step in range(num_steps)}
    models = Models({0: MODEL, **paths})
    num_tokens = num_spanning = 0
    worst = 0.0
    for rollout in rollouts_of(run, num_steps):
        if rollout.num_trimmed:  # what is left does not say where its versions began
            continue
        start = int(np.argmax(rollout.loss_mask))  # one turn: all that follows was sampled
        assert rollout.loss_mask[start:].all()
        prompt, sampled = rollout.token_ids[:start].tolist(), rollout.token_ids[start:].tolist()
        expected = recompute_plain(models, prompt, sampled, rollout.version_runs)
        worst = max(worst, float(np.abs(expected - rollout.logprobs[start:]).max()))
        num_tokens += len(sampled)
        num_spanning += len(rollout.version_runs.runs) > 1
    return num_tokens, num_spanning, worst


class Models(Mapping[int, Any]):
    """Models by version, read when they are needed; all are small."""

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self._paths = paths
        self._models: dict[int, Any] = {}

    def __getitem__(self, version: int) -> Any:
        if version not in self._models:
            model = Qwen3ForCausalLM.from_pretrained(self._paths[version])
            self._models[version] = model.float().eval()
        return self._models[version]

    def __iter__(self) -> Iterator[int]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def rollouts_of(run: Run, num_steps: int) -> Iterator[Rollout]:
    """All that were trained on."""
    for step in range(num_steps):
        for group in read_batch(batch_path(run.dir, step)).groups:
            yield from group.group.rollouts


def check_conserved(run: Run, summary: dict[str, Any], num_steps: int) -> None:
    """Nothing is lost, and nothing is trained on twice."""
    samples = summary["samples"]
    states = set(samples) - {"admitted", "reasons"}
    assert samples["admitted"] == sum(samples[state] for state in states)
    assert samples["trained"] == num_steps * SAMPLES
    trained = [(one.group_id, one.episode) for one in rollouts_of(run, num_steps)]
    assert len(trained) == len(set(trained)) == num_steps * SAMPLES * GROUP_SIZE


@pytest.mark.parametrize("mode", ["keep", "interrupt", "finish"])
def test_a_run_on_running_servers_learns(
    servers: Servers, start: Callable[..., Run], mode: str, initial: Path
) -> None:
    reset(servers, initial)
    run = start({"kind": KIND, "urls": servers.fleet.urls, "update_mode": mode})
    summary = run.end()
    rewards = [row["reward_mean"] for row in run.rows("step")]
    assert len(rewards) == STEPS
    first, last = np.mean(rewards[:6]), np.mean(rewards[-6:])
    num_tokens, num_spanning, worst = check_log_probabilities(run, STEPS)
    print(
        f"{KIND}, {mode}: reward {first:.2f} -> {last:.2f} in {summary['loop_seconds']:.0f} s; "
        f"{num_tokens} tokens, {num_spanning} rollouts span versions, largest difference "
        f"{worst:.1e} nats, age {summary['age']}"
    )
    assert last > first + 0.1
    assert worst < TOLERANCE
    check_conserved(run, summary, STEPS)
    assert all(process.returncode is None for process in servers.fleet.processes)


def test_a_run_goes_on_while_servers_die_freeze_and_return(start: Callable[..., Run]) -> None:
    engine = engine_settings() | {"health_seconds": 1.0, "health_deadline_seconds": 5.0}
    # Hardly any learning: a policy that answers all would leave little to train on.
    run = start(engine, run={"steps": 2000}, actor={"optimizer": {"lr": 1e-6, "warmup_steps": 0}})
    run.until(lambda: run.is_past(2))

    os.kill(run.server(0), signal.SIGKILL)
    run.until(lambda: run.has_event("engine-0 ejected"))
    died_at = len(run.rows("step"))
    run.until(lambda: run.is_past(died_at + 2))  # on the other one alone
    run.until(lambda: run.has_event("engine-0", "back after"))

    frozen = run.group(1)
    os.killpg(frozen, signal.SIGSTOP)
    run.until(lambda: run.has_event("engine-1 ejected"))
    frozen_at = len(run.rows("step"))
    run.until(lambda: run.is_past(frozen_at + 2))
    os.killpg(frozen, signal.SIGCONT)
    run.until(lambda: run.has_event("engine-1", "back after"))
    run.until(lambda: all(one > 0 for one in run.running()))  # both are used again
    returned_at = len(run.rows("step"))
    run.until(lambda: run.is_past(returned_at + 2))

    run.process.send_signal(signal.SIGINT)
    summary = run.end(exit_code=130)
    num_steps = len(run.rows("step"))
    for row in run.rows("event"):
        print(f"{row['time']:7.1f} {row['level']} {row['text'][:160]}")
    num_tokens, _, worst = check_log_probabilities(run, num_steps)
    print(f"{KIND}: {num_steps} steps, {num_tokens} tokens, largest difference {worst:.1e} nats")
    assert worst < TOLERANCE
    assert summary["age"]["max"] <= 2 + 1
    check_conserved(run, summary, num_steps)
