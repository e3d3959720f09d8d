"""How long the batches of a run stay on disk, and how much space a run may come to need."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.trainer.checkpoints import complete_checkpoints

_BATCH = re.compile(r"step-(\d{6,})\.(shipped|parquet)")

# Bytes that things come to at most; tests/test_retention.py compares them with what is written.
_BATCH_TOKEN = 8.5  # token id, log-probability, loss mask
_SPOOL_TOKEN = 8.5
_ROLLOUT = 2048  # everything else of a rollout, its task included
_BATCH_FILE = 16 << 10
_SAMPLE_ROWS = 2048  # in the ledger, the trace and the metrics
_ROLLOUT_ROWS = 512
_STEP_ROWS = 8192
_INTERVAL_ROW = 2048
_LEDGER_FILE = 8 << 20  # its write-ahead log before it is folded in
_REJECTED = 2
"""Samples per trained one that the estimate allows for: filters can reject any number."""
_FLOAT = 4
_TRAINER_COPIES = 3  # the weights and two moments of AdamW


def prune_batches(run_dir: Path, newest: int, *, keep: int, keep_checkpoints: int) -> None:
    """Delete batch files that are neither among the newest nor needed by any resume.

    Args:
        run_dir: the run directory.
        newest: step of the newest batch.
        keep: batches that stay, the newest included.
        keep_checkpoints: how many checkpoints the trainer keeps. As long as there are fewer, a
            resume may have to begin at version 0, and everything stays.

    Raises:
        OSError: the folder cannot be read, or a file not be deleted.
    """
    needed = oldest_needed(run_dir, keep_checkpoints)
    first_kept = min(needed, newest + 1 - keep)
    # Markers first: one says that there is a batch.
    for path in sorted((run_dir / "batches").iterdir(), key=lambda one: one.suffix, reverse=True):
        name = _BATCH.fullmatch(path.name)
        if name is not None and int(name[1]) < first_kept:
            path.unlink(missing_ok=True)


def oldest_needed(run_dir: Path, keep_checkpoints: int) -> int:
    """The oldest step whose batch a resume may need, should all newer checkpoints be damaged."""
    versions = sorted((version for version, _ in complete_checkpoints(run_dir)), reverse=True)
    return versions[keep_checkpoints - 1] if len(versions) >= keep_checkpoints else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEstimate:
    """What a run may come to need on disk, in bytes; each an upper bound.

    The bounds take every rollout for as long as `engine.max_model_len` and as many samples rejected
    as trained; interval rows, which grow with the hours, are apart.

    Attributes:
        batches: batch files kept.
        spool: the ledger's file at its largest.
        rows: trace, metrics, and the ledger's rows.
        weights: published versions, and the one that a resumed run starts its engines from.
        checkpoints: of the trainer.
        per_step: what each step adds, as long as all batches are kept.
        interval_rows_per_day: metric rows of a day.
    """

    batches: int
    spool: int
    rows: int
    weights: int
    checkpoints: int
    per_step: int
    interval_rows_per_day: int

    @property
    def total(self) -> int:
        """Of everything but the interval rows."""
        return self.batches + self.spool + self.rows + self.weights + self.checkpoints

    def as_dict(self) -> dict[str, int]:
        """For the `run` row."""
        return {**asdict(self), "total": self.total}

    def __str__(self) -> str:
        parts = {
            "batches": self.batches,
            "weights": self.weights,
            "checkpoints": self.checkpoints,
            "ledger": self.spool,
            "trace and metrics": self.rows,
        }
        return f"at most {human(self.total)}: " + ", ".join(
            f"{name} {human(size)}" for name, size in parts.items()
        )

    def shortage(self, run_dir: Path) -> str | None:
        """Why the run may not fit on its disk, and what to change; None: it fits."""
        free = shutil.disk_usage(run_dir).free
        held = sum(one.stat().st_size for one in run_dir.rglob("*") if one.is_file())
        if (missing := self.total - held - free) <= 0:
            return None
        settings = {
            "store.keep_batches": self.batches,
            "weights.keep_last": self.weights,
            "actor.keep_checkpoints": self.checkpoints,
            "store.trace": self.rows,
            "rollout.queue_size": self.spool,
        }
        largest = max(settings, key=lambda name: settings[name])
        return (
            f"{run_dir} may come to need {human(self.total)}, {human(missing)} more than its disk "
            f"has: lower {largest}, whose part is the largest ({human(settings[largest])}), or "
            "give another folder (run.dir)"
        )


def estimate(config: Config, model_dir: Path) -> SizeEstimate:
    """What a run of this configuration may come to need. Raises OSError when the model cannot be
    read."""
    rollout, size = config.rollout, config.rollout.consumer_batch_size
    tokens = config.engine.max_model_len
    per_batch = _BATCH_FILE + math.ceil(
        size * rollout.group_size * (_BATCH_TOKEN * tokens + _ROLLOUT)
    )
    per_sample_rows = _SAMPLE_ROWS + rollout.group_size * _ROLLOUT_ROWS
    rows_per_step = _STEP_ROWS + _REJECTED * size * per_sample_rows
    per_sample = rollout.group_size * math.ceil(_SPOOL_TOKEN * tokens + _ROLLOUT)
    weights = _weights_bytes(model_dir)
    kept = config.weights.keep_last + 2  # one while it is written, and the start of a resume
    return SizeEstimate(
        batches=_batches_kept(config) * per_batch,
        # Its pages are used again, and its log holds at most what is in it.
        spool=_LEDGER_FILE + 2 * _most_spooled(config) * per_sample,
        rows=config.run.steps * rows_per_step,
        weights=kept * weights,
        checkpoints=(config.actor.keep_checkpoints + 1) * _TRAINER_COPIES * weights,
        per_step=per_batch + rows_per_step,
        interval_rows_per_day=round(86_400 / config.run.metrics_interval_seconds) * _INTERVAL_ROW,
    )


def human(size: int) -> str:
    """Bytes in words: `1.2 GB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if abs(size) >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1000:.0f} kB"


def _batches_kept(config: Config) -> int:
    keep, every = config.store.keep_batches, config.actor.checkpoint_every
    if keep is None or not every:
        return config.run.steps
    # Up to a checkpoint that is being written, while the trainer has the batches after it.
    needed = (config.actor.keep_checkpoints + 1) * every + config.batches_ahead + 2
    return min(config.run.steps, max(keep, needed))


def _most_spooled(config: Config) -> int:
    """Finished samples that may wait for a batch."""
    rollout, bound = config.rollout, config.bound
    in_buffers = max(rollout.queue_size, rollout.consumer_batch_size + 1)
    if bound.enforcement.bounds_admission:
        return min(bound.admission_limit, in_buffers)
    return in_buffers


def _weights_bytes(model_dir: Path) -> int:
    """Of one published version: 32-bit floats, and an output head even if it is tied."""
    sizes: dict[str, int] = {}
    for path in model_dir.glob("*.safetensors"):
        for name, tensor in _header(path).items():
            sizes[name] = _FLOAT * math.prod(tensor["shape"])
    total = sum(sizes.values())
    if "lm_head.weight" not in sizes:
        total += max(sizes.values(), default=0)
    rest = sum(one.stat().st_size for one in _others(model_dir))
    return total + rest + (1 << 16)


def _others(model_dir: Path) -> Iterator[Path]:
    """Files that go with the weights."""
    for path in model_dir.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            yield path


def _header(path: Path) -> dict[str, Any]:
    """Shapes per tensor: 8 bytes of length, little-endian, then that much JSON."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header
