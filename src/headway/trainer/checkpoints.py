"""Checkpoints of the trainer: weights and optimizer, complete or not there.

`RUN/checkpoints/step-000050/` is the state after 50 updates: a Hugging Face folder, plus
`optimizer.pt` and the marker `COMPLETE`, written last, under a temporary name until then. The
marker holds size and checksum of every other file, so that a checkpoint that went bad later is
found out, and the one before is used.
"""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import StoreError
from headway.store.atomic import atomic_folder, fsync_file, remove_folder
from headway.weights.folder import COMPLETE, checksums, write_model

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

OPTIMIZER = "optimizer.pt"

_NAME = re.compile(r"step-(\d{6,})")


def save_checkpoint(
    run_dir: Path,
    version: int,
    model: "nn.Module",
    optimizer: dict[str, Any],
    *,
    source: Path,
    keep_last: int = 2,
) -> Path:
    """Save the state after `version` updates, and delete old checkpoints.

    Args:
        run_dir: the run directory.
        version: number of updates applied.
        model: the model.
        optimizer: `PolicyUpdater.state_dict()`.
        source: folder of the initial model (`config.json`, tokenizer).
        keep_last: checkpoints that stay, this one included.

    Raises:
        StoreError: nothing was saved. WeightsError: as `write_model`.
    """
    import torch

    def fill(folder: Path) -> None:
        write_model(folder, model, source=source)
        torch.save(optimizer, folder / OPTIMIZER)
        fsync_file(folder / OPTIMIZER)

    return save_folder(run_dir, version, fill, keep_last=keep_last)


def save_folder(
    run_dir: Path, version: int, fill: Callable[[Path], None], *, keep_last: int
) -> Path:
    """`save_checkpoint` for a state that is no torch model here: `fill` writes it, `optimizer.pt`
    included, into the folder that it is given, and flushes it. Needs no torch. Raises StoreError,
    and whatever else `fill` raises.
    """
    path = run_dir / "checkpoints" / f"step-{version:06d}"
    try:
        path.parent.mkdir(exist_ok=True)
        with atomic_folder(path) as temporary:
            fill(temporary)
            marker = {"version": version, "files": checksums(temporary)}
            (temporary / COMPLETE).write_text(json.dumps(marker, indent=1) + "\n")
            fsync_file(temporary / COMPLETE)
        # What lies above is not this trainer's: it must not push out what was just saved.
        own = [one for one in complete_checkpoints(run_dir) if one[0] <= version]
        for _, old in sorted(own, reverse=True)[keep_last:]:
            remove_folder(old)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise StoreError(
            f"cannot save checkpoint {path}: {error}; check that there is space left"
        ) from error
    return path


def latest_checkpoint(run_dir: Path) -> tuple[int, Path] | None:
    """The newest complete, undamaged checkpoint and the number of updates in it, or None.

    Reads all of it (some seconds per GB). One that is passed over is named in a warning.
    """
    for version, path in sorted(complete_checkpoints(run_dir), reverse=True):
        if (damage := _damage(version, path)) is None:
            return version, path
        logger.warning("checkpoint %s is passed over: %s", path, damage)
    return None


def load_optimizer(path: Path) -> dict[str, Any]:
    """The optimizer's state from a checkpoint's folder. Raises StoreError."""
    import pickle

    import torch

    try:
        state: dict[str, Any] = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise StoreError(
            f"{path / OPTIMIZER} cannot be read ({error}); remove {path} to use an older one"
        ) from error
    return state


def _damage(version: int, path: Path) -> str | None:
    """What is wrong with a complete checkpoint, or None."""
    try:
        marker = json.loads((path / COMPLETE).read_bytes())
        if marker["version"] != version:
            return f"its marker says that it is version {marker['version']}: a copy, or renamed"
        wanted = marker["files"]
        found = checksums(path)
        for name, file in wanted.items():
            if found.get(name) != file:
                return f"{name} is {'not what was written' if name in found else 'missing'}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def complete_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Version and folder of those that are all there, damaged or not, in any order. Raises
    OSError."""
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return []
    found = []
    for entry in folder.iterdir():
        match = _NAME.fullmatch(entry.name)
        if match is not None and (entry / COMPLETE).is_file():
            found.append((int(match[1]), entry))
    return found
