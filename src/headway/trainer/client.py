"""The trainer's end of the hand-off: batches in step order, and new versions out.

Enough for a training loop of your own (needs no torch itself; `examples/own_trainer.py` runs):

    client = TrainerClient(run_dir, model_dir=model_dir)
    model = ...                              # from client.start_dir
    client.ready(model)
    for batch in client.batches():
        ...                                  # your update
        client.publish(batch.step, model, {"loss": loss})
        client.save(model, optimizer.state_dict())     # now and then: where a resume begins

Batch `k` is trained at version `k` and published as version `k + 1`. The trainer is a process of
its own, so everything here is synchronous and runs on the wall clock.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from headway.config import BUILTIN_MODEL, Config
from headway.core.rollout import Batch
from headway.errors import RunDirError, TrainerError
from headway.ports import PublishedWeights
from headway.store.atomic import atomic_file, write_json
from headway.store.batches import batch_path, finished_path, read_batch, shipped_path
from headway.trainer.checkpoints import latest_checkpoint, load_optimizer, save_checkpoint
from headway.weights.canary import CANARY, Canary
from headway.weights.folder import publish, read_manifest

if TYPE_CHECKING:
    from torch import Tensor, nn


class TrainerClient:
    """One trainer's connection to a run directory.

    Args:
        run_dir: the run directory; it must hold `config.yaml`.
        model_dir: folder of the initial model (version 0), whose `config.json` and tokenizer go
            with every version; `model.path` of the configuration when not given.
        poll_seconds: between two looks for a batch.
        parent_pid: the process that wants the batches trained. When it is gone, waiting for a
            batch ends with an error, so that no trainer outlives its run. None: wait for ever.

    Raises:
        RunDirError: no usable configuration in `run_dir`.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        model_dir: Path | None = None,
        poll_seconds: float = 0.01,
        parent_pid: int | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.config = _read_config(run_dir / "config.yaml")
        if model_dir is None and self.config.model.path != BUILTIN_MODEL:
            model_dir = Path(self.config.model.path)
        self._model_dir = model_dir
        self._poll_seconds = poll_seconds
        self._parent_pid = parent_pid
        self._contract: str | None = None
        self._version: int | None = None
        self._metrics_path = run_dir / "trainer" / "metrics.jsonl"
        self._metrics_path.parent.mkdir(exist_ok=True)
        self._yielded_at = time.monotonic()
        self.idle_seconds = 0.0
        """Time spent waiting for the batch at hand."""
        self.idle_seconds_total = 0.0

    @property
    def model_dir(self) -> Path:
        """Folder of the initial model. Raises TrainerError when nobody gave one."""
        if self._model_dir is None:
            raise TrainerError(
                f"model.path is {self.config.model.path!r}, which is not a folder: give "
                "TrainerClient the folder of the initial model (model_dir)"
            )
        return self._model_dir

    @cached_property
    def _checkpoint(self) -> tuple[int, Path] | None:
        return latest_checkpoint(self.run_dir)

    @property
    def start_version(self) -> int:
        """Updates that were applied before this process: 0, or as many as the newest sound
        checkpoint of a resumed run holds."""
        return self._checkpoint[0] if self._checkpoint else 0

    @property
    def start_dir(self) -> Path:
        """Folder of the weights to begin with: that of the checkpoint, or of the initial model."""
        return self._checkpoint[1] if self._checkpoint else self.model_dir

    def start_state(self) -> dict[str, Any] | None:
        """What `save` was given beside the model; None at version 0. Raises StoreError."""
        return load_optimizer(self._checkpoint[1]) if self._checkpoint else None

    def save(self, model: "nn.Module", state: dict[str, Any]) -> Path:
        """Save a checkpoint of what was published last, for a resume to begin at.

        Batches from there on are trained again by a resume; one at the end spares it all of them.
        Older checkpoints than the newest `actor.keep_checkpoints` are deleted.

        Args:
            model: at the version that was published last.
            state: of the optimizer, or anything that `torch.load(weights_only=True)` takes.

        Raises:
            StoreError: nothing was saved. WeightsError: the model cannot be written.
        """
        return save_checkpoint(
            self.run_dir,
            self.start_version if self._version is None else self._version,
            model,
            state,
            source=self.model_dir,
            keep_last=self.config.actor.keep_checkpoints,
        )

    def ready(self, model: "nn.Module | None" = None) -> None:
        """Say that batches will be read from now on; the run waits for this before it starts.

        Given the model that training begins with, its canary is left in `RUN/canary.json`, and the
        run begins only when every engine answers like it (`engine.canary`).
        """
        if model is not None and (canary := self._canary(self.start_version, model)) is not None:
            with atomic_file(self.run_dir / CANARY) as temporary:
                temporary.write_text(canary.to_json(), encoding="utf-8")
        write_json(self.run_dir / "trainer" / "ready.json", {"pid": os.getpid()})

    def batches(self, start: int | None = None) -> Iterator[Batch]:
        """Batches `start` (default: `start_version`), `start + 1`, ... as they are shipped; ends
        when the run has no more.

        Waits without a deadline of its own: how long a batch may take is known to the run, whose
        watchdog ends a stalled run and with it this process (see `parent_pid`).

        Raises:
            StoreError: a batch file is damaged.
            TrainerError: a batch out of order, or the run's process is gone.
        """
        step = self.start_version if start is None else start
        while self._wait_for(step):
            batch = read_batch(batch_path(self.run_dir, step))
            if batch.step != step:
                raise TrainerError(
                    f"{batch_path(self.run_dir, step)} holds batch {batch.step}, not {step}: the "
                    "file was moved or overwritten"
                )
            self._yielded_at = time.monotonic()
            yield batch
            step += 1

    def publish(
        self,
        step: int,
        weights: "nn.Module | Mapping[str, Tensor]",
        stats: Mapping[str, float] | None = None,
    ) -> PublishedWeights:
        """Publish what training on batch `step` gave, as version `step + 1`.

        `train_seconds` (since the batch was yielded) and `idle_seconds` (waiting for it) are added
        to `stats` unless given. A model is also asked for its canary (`engine.canary`), which a
        state dict cannot answer. Raises WeightsError; nothing was published then.
        """
        published = publish(
            self.run_dir / "weights",
            step + 1,
            weights,
            source=self.model_dir,
            stats={
                "train_seconds": time.monotonic() - self._yielded_at,
                "idle_seconds": self.idle_seconds,
                **(stats or {}),
            },
            contract=self._contract,
            keep_last=self.config.weights.keep_last,
            canary=self._canary(step + 1, weights),
        )
        if self._contract is None and published.path is not None:
            self._contract = read_manifest(published.path).contract
        self._version = published.version
        return published

    def _canary(self, version: int, weights: "nn.Module | Mapping[str, Tensor]") -> Canary | None:
        if self.config.engine.canary == "off" or not hasattr(weights, "config"):
            return None
        from headway.trainer.canary import make_canary

        return make_canary(weights, version)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a row of plain values to `RUN/trainer/metrics.jsonl`."""
        with self._metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")

    def _wait_for(self, step: int) -> bool:
        """Wait until a batch is shipped. Returns False when there will be none."""
        started_at = time.monotonic()
        looks = 0
        while (is_shipped := look_for(self.run_dir, step)) is None:
            if looks % 100 == 0 and self._parent_pid is not None:
                _require_alive(self._parent_pid)
            looks += 1
            time.sleep(self._poll_seconds)
        self.idle_seconds = time.monotonic() - started_at
        self.idle_seconds_total += self.idle_seconds
        return is_shipped


def look_for(run_dir: Path, step: int) -> bool | None:
    """Whether a batch has been shipped; False: it never will be; None: not yet. Raises TrainerError
    when what the run says of its end cannot be read."""
    shipped, finished = shipped_path(run_dir, step), finished_path(run_dir)
    if shipped.exists():
        return True
    if finished.exists() and step >= _num_steps(finished):
        # Shipped first, finished after: only now is a missing marker final.
        return shipped.exists()
    return None


def _read_config(path: Path) -> Config:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Config.model_validate(content)
    except FileNotFoundError as error:
        raise RunDirError(f"{path} is missing: {path.parent} is not a run directory") from error
    except (OSError, ValueError, yaml.YAMLError, ValidationError) as error:
        raise RunDirError(f"{path} cannot be used: {error}") from error


def _num_steps(finished: Path) -> int:
    try:
        return int(json.loads(finished.read_bytes())["num_steps"])
    except (ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"{finished} must say {{'num_steps': N}}: {error}") from error


def _require_alive(pid: int) -> None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError as error:
        raise TrainerError(f"the run's process {pid} is gone; there will be no batches") from error
    except PermissionError:
        return  # it lives, under another user
