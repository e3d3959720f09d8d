"""Weights as folders on a shared file system: `publish` on one side, `FolderWeightChannel` on the
other.

A version is a Hugging Face safetensors folder `v000013` with two more files: `manifest.json`
(`Manifest`) and the marker `COMPLETE`, written last. It is filled under a temporary name and
renamed, so nobody ever sees half of it under its own name; the marker and the file sizes guard
against copies that other tools make.

Needs torch and safetensors only where tensors are written, not to watch.
"""

import asyncio
import hashlib
import json
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import WeightsError
from headway.ports import PublishedWeights
from headway.store.atomic import atomic_folder, fsync_file, remove_folder
from headway.weights.canary import CANARY, Canary

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"
WEIGHTS_FILE = "model.safetensors"

_VERSION_NAME = re.compile(r"v(\d{6,})")
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.py",
)
"""What an engine needs beside the weights, copied from the initial model's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a published version says of itself.

    `contract` is equal for weights that fit the same model: a hash over model type and every
    parameter's name, shape and dtype. `num_parameters` counts what is stored, a tied head twice.
    `files` gives size in bytes and SHA-256 of every file. `stats` is the trainer's report
    (`PublishedWeights.stats`).
    """

    version: int
    contract: str
    model_type: str
    num_parameters: int
    files: Mapping[str, Mapping[str, Any]]
    stats: Mapping[str, float]


def version_name(version: int) -> str:
    """Folder name of a version: `v000013`."""
    return f"v{version:06d}"


def publish(
    directory: Path,
    version: int,
    weights: "nn.Module | Mapping[str, Tensor]",
    *,
    source: Path,
    stats: Mapping[str, float] | None = None,
    contract: str | None = None,
    keep_last: int = 4,
    canary: Canary | None = None,
) -> PublishedWeights:
    """Publish a version in one step; when this returns, watchers see it and it survives a crash.

    `lm_head.weight` is always written, also when it is tied to the embeddings: an engine that
    reloads in place may keep the old head otherwise, and answer as if nothing were wrong.

    One publisher per directory. A version that lies there already is replaced (a resumed trainer
    makes it again); all but the newest `keep_last` are deleted, and so are leftovers of a crash.

    Args:
        directory: where versions appear, made when absent.
        version: at least 1; 0 is the initial model, which is not published.
        weights: the model, or its state dict under Hugging Face names.
        source: folder with the model's `config.json` and tokenizer, which are copied.
        stats: the trainer's report; `publish_seconds` (until all files are safe) is added.
        contract: refuse weights of another contract than this one (`Manifest.contract`).
        keep_last: versions that stay on disk, this one included.
        canary: what these weights say to fixed prompts, for engines to be checked against.

    Raises:
        WeightsError: nothing was published; the message says why.
    """
    return publish_folder(
        directory,
        version,
        lambda folder: write_model(folder, weights, source=source),
        stats=stats,
        contract=contract,
        keep_last=keep_last,
        canary=canary,
    )


def publish_folder(
    directory: Path,
    version: int,
    fill: Callable[[Path], None],
    *,
    stats: Mapping[str, float] | None = None,
    contract: str | None = None,
    keep_last: int = 4,
    canary: Canary | None = None,
) -> PublishedWeights:
    """`publish` for weights that are no torch tensors here: `fill` writes `config.json`,
    `model.safetensors` and what else engines need into the folder that it is given, and flushes
    them. Needs no torch. Raises WeightsError, and whatever else `fill` raises.
    """
    started_at = time.monotonic()
    if version < 1 or keep_last < 1:
        raise WeightsError(f"version {version} and keep_last {keep_last} must be at least 1")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".v*"):
            shutil.rmtree(leftover, ignore_errors=True)
        path = directory / version_name(version)
        with atomic_folder(path) as temporary:
            fill(temporary)
            if canary is not None:
                _write(temporary / CANARY, canary.to_json())
            manifest = _describe(temporary, version, dict(stats or {}), started_at)
            if contract is not None and manifest.contract != contract:
                raise WeightsError(
                    f"version {version} has contract {manifest.contract}, not {contract}: names, "
                    "shapes or dtypes of its parameters changed, and engines could not load it"
                )
            _write(temporary / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")
            _write(temporary / COMPLETE, f"{version}\n")
        _prune(directory, keep_last, newest=version)
    except OSError as error:
        raise WeightsError(
            f"cannot publish version {version} to {directory}: {error}; check that it is writable "
            "and has space left"
        ) from error
    return PublishedWeights(version=version, path=path, stats=manifest.stats)


def write_model(folder: Path, weights: "nn.Module | Mapping[str, Tensor]", *, source: Path) -> None:
    """Write weights, configuration and tokenizer files into an existing folder, and flush them.

    Raises:
        WeightsError: no `config.json` in `source`, or the output head cannot be found.
        OSError: writing failed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if not (source / "config.json").is_file():
        raise WeightsError(f"{source} has no config.json: give the folder of the initial model")
    names = sorted({p.name for pattern in _COPIED for p in source.glob(pattern) if p.is_file()})
    for name in names:
        shutil.copyfile(source / name, folder / name)
        fsync_file(folder / name)
    try:
        save_file(_tensors(weights, source), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    except (SafetensorError, ValueError) as error:
        raise WeightsError(f"cannot write the weights to {folder}: {error}") from error
    fsync_file(folder / WEIGHTS_FILE)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a version. Raises WeightsError when it does not parse."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        manifest = Manifest(**content)
        numbers = [manifest.version, *(file["size"] for file in manifest.files.values())]
        reals = manifest.stats.values()
        if (
            not manifest.files
            or not all(isinstance(number, int) for number in numbers)
            or not all(isinstance(real, int | float) for real in reals)
        ):
            raise ValueError("sizes, version and stats must be numbers, and files listed")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(f"{folder / MANIFEST} cannot be used: {error}") from error
    return manifest


def verify(folder: Path, *, checksums: bool = True) -> Manifest:
    """Check a published version against its manifest: marker, name, sizes and checksums.

    Args:
        folder: `.../v000013`.
        checksums: also read every file (some seconds per GB); sizes alone are a few calls.

    Raises:
        WeightsError: it is incomplete or damaged; the message says how.
    """
    match = _VERSION_NAME.fullmatch(folder.name)
    if match is None or not folder.is_dir():
        raise WeightsError(f"{folder} is not the folder of a version (v000013)")
    if not (folder / COMPLETE).is_file():
        raise WeightsError(f"{folder} is incomplete: it has no {COMPLETE} marker")
    manifest = read_manifest(folder)
    if manifest.version != int(match[1]):
        raise WeightsError(f"{folder} says in its {MANIFEST} that it is version {manifest.version}")
    for name, file in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != file["size"]:
            raise WeightsError(
                f"{path} has {'no file' if size is None else f'{size} bytes'}, the {MANIFEST} says "
                f"{file['size']}: it was damaged or copied in part"
            )
        if checksums and _sha256(path) != file.get("sha256"):
            raise WeightsError(f"{path} does not have the checksum of its {MANIFEST}: it changed")
    return manifest


def published_versions(directory: Path) -> list[tuple[int, Path]]:
    """Folders that are named like a version, sound or not, by number. Raises OSError."""
    found = []
    for entry in directory.iterdir() if directory.is_dir() else ():
        match = _VERSION_NAME.fullmatch(entry.name)
        if match is not None and entry.is_dir():
            found.append((int(match[1]), entry))
    return sorted(found)


def checksums(folder: Path) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of every file in a folder, by name. Raises OSError."""
    return {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }


class FolderWeightChannel:
    """`ports.WeightChannel` on a directory that `publish` fills.

    Each poll lists the directory and looks into the newest folders only, so its cost does not
    grow with the number of versions published. Whatever is not a sound version is passed over,
    with one logged warning per name; names that start with a dot are temporary, and pass silently.

    Args:
        directory: need not exist yet.
        poll_seconds: between two looks, in loop time.
    """

    def __init__(self, directory: Path, poll_seconds: float) -> None:
        self._directory = directory
        self._poll_seconds = poll_seconds
        self._passed_over: set[str] = set()

    async def wait_newer(self, version: int) -> PublishedWeights:
        """The newest sound version above `version`, waiting until there is one.

        Has no deadline of its own: the caller sets one, or watches the trainer. Raises
        WeightsError when the directory cannot be listed.
        """
        while True:
            # In a thread: a network file system may take its time, and the loop must not.
            found = await asyncio.to_thread(self._newest, version)
            if found is not None:
                return found
            await asyncio.sleep(self._poll_seconds)

    def _newest(self, version: int) -> PublishedWeights | None:
        try:
            names = {entry.name for entry in self._directory.iterdir()}
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WeightsError(f"cannot list {self._directory}: {error}") from error
        self._passed_over &= names
        candidates: list[tuple[int, str]] = []
        for name in names:
            match = _VERSION_NAME.fullmatch(name)
            if match is not None:
                candidates.append((int(match[1]), name))
            elif not name.startswith("."):
                self._pass_over(name, "it is not named like a version (v000013)")
        for number, name in sorted(candidates, reverse=True):
            if number <= version:
                break
            folder = self._directory / name
            try:
                manifest = verify(folder, checksums=False)
            except (WeightsError, OSError) as error:
                # Deleted between listing and looking is no fault of anybody.
                if folder.exists():
                    self._pass_over(name, str(error))
                continue
            return PublishedWeights(version=number, path=folder, stats=manifest.stats)
        return None

    def _pass_over(self, name: str, why: str) -> None:
        if name not in self._passed_over:
            self._passed_over.add(name)
            logger.warning("passed over %s among the weights: %s", self._directory / name, why)


def _tensors(weights: "nn.Module | Mapping[str, Tensor]", source: Path) -> "dict[str, Tensor]":
    """Contiguous CPU tensors with storage of their own, output head included."""
    state = weights if isinstance(weights, Mapping) else weights.state_dict()
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        own = tensor.detach().cpu().contiguous()
        # safetensors refuses two names for one storage, which is what tied weights are.
        if own.untyped_storage().data_ptr() in storages:
            own = own.clone()
        storages.add(own.untyped_storage().data_ptr())
        tensors[name] = own
    config = json.loads((source / "config.json").read_bytes())
    if _HEAD not in tensors and config.get("tie_word_embeddings"):
        tied = [name for name in tensors if name.endswith(_EMBEDDINGS)]
        if len(tied) != 1:
            raise WeightsError(
                f"the state dict has no {_HEAD}, and its tied embeddings were not found among "
                f"{sorted(tensors)[:4]}...: pass the model, or add {_HEAD}"
            )
        tensors[_HEAD] = tensors[tied[0]].clone()
    return tensors


def _describe(folder: Path, version: int, stats: dict[str, float], started_at: float) -> Manifest:
    header = _safetensors_header(folder / WEIGHTS_FILE)
    model_type = str(json.loads((folder / "config.json").read_bytes()).get("model_type", ""))
    shapes = sorted((name, entry["dtype"], entry["shape"]) for name, entry in header.items())
    contract = hashlib.sha256(json.dumps([model_type, shapes]).encode()).hexdigest()[:16]
    num_parameters = sum(math.prod(shape) for _, _, shape in shapes)
    files = checksums(folder)
    stats["publish_seconds"] = time.monotonic() - started_at
    return Manifest(
        version=version,
        contract=contract,
        model_type=model_type,
        num_parameters=num_parameters,
        files=files,
        stats=stats,
    )


def _safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Dtype and shape per tensor: 8 bytes of length, little-endian, then that much JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, dict[str, Any]] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    fsync_file(path)


def _prune(directory: Path, keep_last: int, newest: int) -> None:
    """Delete all but the newest versions up to the one just published. What lies above is not this
    trainer's: it must not push out a version that engines may be loading."""
    found = [one for one in published_versions(directory) if one[0] < newest]
    for _, folder in sorted(found, reverse=True)[keep_last - 1 :]:
        remove_folder(folder)
