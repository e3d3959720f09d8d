"""A published version is looked at before any engine is told of it.

Engines do not look: one serves on with an old tensor where a new one is missing, one answers with
token 0 where weights are not finite, and one dies of a wrong shape or a file that was cut off.
"""

import asyncio
from pathlib import Path
from typing import Literal

from headway.engines.contract import HEAD, Contract, read_config
from headway.engines.tensors import TensorInfo, is_finite, read_tensors
from headway.errors import WeightsError
from headway.ports import PublishedWeights
from headway.weights.folder import MANIFEST, verify

CheckLevel = Literal["full", "shapes"]
_NUM_NAMES = 4


class CheckpointChecker:
    """Compares every version with the initial model and with the version before it.

    Args:
        model_dir: the initial model, whose names and shapes every version must have.
        level: `full` also reads every byte: checksums of the manifest, and finite values (some
            seconds per GB); `shapes` reads headers only.
    """

    def __init__(self, model_dir: Path, *, level: CheckLevel = "full") -> None:
        self._model_dir = model_dir
        self._level = level
        self._initial: dict[str, TensorInfo] | None = None
        self._previous: tuple[int, dict[str, TensorInfo]] | None = None
        self._contract: tuple[int, str] | None = None

    async def check(self, weights: PublishedWeights) -> None:
        """Read in a thread of its own. Raises WeightsError with tensor and reason; a version that
        passed is what the next one is compared with. One call at a time."""
        await asyncio.to_thread(self._check, weights)

    def _check(self, weights: PublishedWeights) -> None:
        folder, version = weights.path, weights.version
        if folder is None:
            raise WeightsError(f"version {version} has no folder")
        try:
            contract = ""
            if (folder / MANIFEST).is_file():
                contract = verify(folder, checksums=self._level == "full").contract
            found = read_tensors(folder)
            self._compare(found, version)
            self._compare_contract(contract, folder, version)
            if self._level == "full":
                for name, tensor in found.items():
                    if not is_finite(tensor):
                        raise WeightsError(
                            f"tensor {name} holds values that are not finite: the update diverged"
                        )
        except (WeightsError, OSError) as error:
            raise WeightsError(
                f"version {version} in {folder} is refused, no engine was told of it: {error}"
            ) from error
        self._previous = (version, found)
        self._contract = (version, contract)

    def _compare(self, found: dict[str, TensorInfo], version: int) -> None:
        if self._initial is None:
            self._initial = read_tensors(self._model_dir)
        wanted = self._initial
        config = read_config(self._model_dir) or {}
        # Engines need a tied head written out, initial models often leave it out.
        free = {HEAD} if config.get("tie_word_embeddings") else set()
        if missing := wanted.keys() - found.keys() - free:
            raise WeightsError(f"missing tensors: {_list(missing)}")
        if unknown := found.keys() - wanted.keys() - free:
            raise WeightsError(f"tensors that the initial model does not have: {_list(unknown)}")
        for name, tensor in found.items():
            if name in wanted and tensor.shape != wanted[name].shape:
                raise WeightsError(
                    f"tensor {name} has shape {tensor.shape}, in the initial model "
                    f"{wanted[name].shape}"
                )
        if self._previous is None:
            return
        number, before = self._previous
        if gone := before.keys() - found.keys():
            raise WeightsError(f"missing tensors, version {number} had them: {_list(gone)}")
        for name, tensor in found.items():
            if name in before and tensor.dtype != before[name].dtype:
                raise WeightsError(
                    f"tensor {name} is {tensor.dtype}, in version {number} {before[name].dtype}"
                )

    def _compare_contract(self, contract: str, folder: Path, version: int) -> None:
        if self._contract is not None and contract and contract != self._contract[1]:
            raise WeightsError(
                f"its manifest has contract {contract}, that of version {self._contract[0]} "
                f"{self._contract[1]}"
            )
        ours, theirs = Contract.of_folder(self._model_dir), Contract.of_folder(folder)
        if differences := ours.differences(theirs):
            raise WeightsError(
                f"contract {theirs.id} against {ours.id} of the initial model: "
                + ", ".join(differences)
            )


def _list(names: set[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NUM_NAMES
    return ", ".join(ordered[:_NUM_NAMES]) + (f" and {more} more" if more > 0 else "")
