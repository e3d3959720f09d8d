"""The orchestrator's end of the hand-off: markers in the run directory."""

import asyncio
from pathlib import Path

from headway.core.rollout import Batch
from headway.errors import StoreError
from headway.store.atomic import write_json
from headway.store.batches import batch_path, finished_path, shipped_path


class FolderTrainerLink:
    """`ports.TrainerLink` for trainers that read the run directory (`TrainerClient`).

    Args:
        run_dir: holds `batches/`, into which each batch was written before it is shipped.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    async def ship(self, batch: Batch) -> None:
        """Let the trainer read a persisted batch: an empty marker file appears beside it.

        Shipping a batch again changes nothing. Raises StoreError when the batch was not persisted,
        or the marker cannot be made.
        """
        await asyncio.to_thread(self._ship, batch.step)

    async def finish(self, num_steps: int) -> None:
        """No batches from `num_steps` on. Raises StoreError."""
        path = finished_path(self._run_dir)
        try:
            await asyncio.to_thread(write_json, path, {"num_steps": num_steps})
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error}") from error

    def _ship(self, step: int) -> None:
        path = batch_path(self._run_dir, step)
        if not path.is_file():
            raise StoreError(
                f"batch {step} was shipped before it was persisted: {path} does not exist"
            )
        try:
            # Not flushed: a marker lost in a crash is made again when the batch is shipped again.
            shipped_path(self._run_dir, step).touch()
        except OSError as error:
            raise StoreError(f"cannot ship batch {step} from {path}: {error}") from error
