"""A `headway run` as a process, what it has written so far, and whether that is right."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import yaml
from servers import MODEL
from transformers import Qwen3ForCausalLM

from headway.core.rollout import Rollout
from headway.store.batches import batch_path, read_batch
from headway.weights.folder import version_name
from recompute import recompute_plain

HERE = Path(__file__).parent
STEPS = 24
SAMPLES, GROUP_SIZE = 8, 8
"""As in run.yaml."""
TOLERANCE = 1e-3
"""Nats between a server and transformers, both in float32; some 1e-5 is usual."""
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
