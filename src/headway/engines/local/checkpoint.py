"""Reading a weights folder: everything is checked before anything is changed."""

import copy
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

Tensor = torch.Tensor
_NUM_NAMES = 5


class CheckpointError(Exception):
    """The folder cannot be loaded into this model; the message says why, the model is as before."""


def read_checkpoint(model: Any, folder: Path) -> dict[str, Tensor]:
    """Read a Hugging Face safetensors folder and check it against the model.

    Returns the model's own parameter and buffer names with new values, on the CPU. Every tensor
    must be there, in its shape, finite, and nothing else. A tied output head may be left out, or
    be given with the same values as the embeddings. Folders whose names differ from the model's
    own (transformers converts some architectures when it loads them) go through transformers.

    Raises:
        CheckpointError: the folder does not hold these weights.
    """
    wanted = _unique_tensors(model)
    found = _read_files(folder)
    aliases = _aliases(model)
    for name in aliases.keys() & found.keys():
        _check_tied(name, found.pop(name), aliases[name], found)
    _drop_ignored(model, found, wanted)
    if found.keys() != wanted.keys():
        found = _read_through_transformers(model, folder, wanted, found)
    _check_tensors(wanted, found)
    return found


@torch.no_grad()
def apply_checkpoint(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy checked values into the model in place; generation must be frozen."""
    for name, target in _unique_tensors(model).items():
        target.copy_(tensors[name])
    if model.device.type == "cuda":
        # Generation runs on a stream of its own and would not wait for these copies.
        torch.cuda.synchronize(model.device)


def checksums(model: Any) -> dict[str, str]:
    """SHA-256 of every parameter's bytes, by name, tied ones under each of their names."""
    return {
        name: hashlib.sha256(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in sorted(model.state_dict().items())
    }


def _unique_tensors(model: Any) -> dict[str, Tensor]:
    """The model's state, each storage once, under its first name."""
    aliases = _aliases(model)
    return {name: t for name, t in model.state_dict().items() if name not in aliases}


def _aliases(model: Any) -> dict[str, str]:
    """Second names of tied tensors, and the first name of each."""
    first_names: dict[int, str] = {}
    aliases = {}
    for name, tensor in model.state_dict().items():
        first = first_names.setdefault(tensor.data_ptr(), name)
        if first != name and tensor.numel():
            aliases[name] = first
    return aliases


def _read_files(folder: Path) -> dict[str, Tensor]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return tensors


def _check_tied(name: str, value: Tensor, first: str, found: Mapping[str, Tensor]) -> None:
    if first in found and not torch.equal(value, found[first]):
        raise CheckpointError(
            f"{name} differs from {first}, but this model ties them: publish equal values, or use "
            "a model with tie_word_embeddings: false"
        )


def _drop_ignored(model: Any, found: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Leave out what the architecture says may lie in its checkpoints without being loaded."""
    patterns = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    for name in found.keys() - wanted.keys():
        if any(pattern.search(name) for pattern in patterns):
            del found[name]


def _read_through_transformers(
    model: Any, folder: Path, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    difference = _difference(wanted, found)
    try:
        loaded, report = type(model).from_pretrained(
            folder,
            config=copy.deepcopy(model.config),
            dtype=model.dtype,
            output_loading_info=True,
            local_files_only=True,
        )
    except Exception as error:  # every architecture has its own ways to refuse a folder
        raise CheckpointError(f"{folder}: {difference}; {error}") from error
    if report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]:
        raise CheckpointError(f"{folder}: {difference}")
    return _unique_tensors(loaded)


def _difference(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    parts = []
    if missing := wanted.keys() - found.keys():
        parts.append(f"missing tensors: {_list(missing)}")
    if unknown := found.keys() - wanted.keys():
        parts.append(f"tensors that the model does not have: {_list(unknown)}")
    return ", ".join(parts)


def _check_tensors(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    if difference := _difference(wanted, found):
        raise CheckpointError(difference)
    for name, target in wanted.items():
        value = found[name]
        if value.shape != target.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(value.shape)}, the model wants {tuple(target.shape)}"
            )
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{name} holds values that are not finite")


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NUM_NAMES
    return ", ".join(ordered[:_NUM_NAMES]) + (f" and {more} more" if more > 0 else "")
