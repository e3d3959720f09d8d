"""The folder of the policy: a user's own, checked, or the built-in one, built at first use.

The built-in model (`headway.trainer.warm_start` says what it is) lives in `model.cache_dir` under a
name that hashes everything that determines it, so that a second use takes no time and a changed
recipe never meets an old model. Building happens in a temporary folder that is renamed when it is
whole, under a file lock, so that of several processes one builds and the others use its result.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headway import envs, trainer
from headway.config import BUILTIN_MODEL, ModelConfig
from headway.envs.text import did_you_mean
from headway.errors import ConfigError, HeadwayError
from headway.store.atomic import atomic_folder, fsync_file

DEFAULT_STEPS = 640
"""Supervised steps of the built-in model when `model.warm_start_steps` is -1: about a minute on
one free core."""

Say = Callable[[str], None]
"""Prints a line."""

RECIPE = (
    Path(trainer.__path__[0]) / "warm_start.py",
    Path(envs.__path__[0]) / "arithmetic.py",
    Path(envs.__path__[0]) / "characters.py",
)
LIBRARIES = ("torch", "transformers", "tokenizers", "reasoning-gym")
NUM_ERROR_LINES = 15


def ensure_model(config: ModelConfig, *, seed: int, progress: Say | None = None) -> Path:
    """The folder with the policy's initial weights and tokenizer; may build for about a minute.

    Args:
        config: `path` names a folder, or `builtin:arithmetic`.
        seed: of the built-in model: its initial weights and what it is shown.
        progress: prints a line that says how far the build is; called some ten times.

    Raises:
        ConfigError: a folder that does not exist or lacks something, an unknown built-in name, a
            cache folder that cannot be written, libraries that are not installed.
        HeadwayError: the build failed; the message ends with what it said last.
    """
    if not config.path.startswith("builtin:"):
        folder = Path(config.path)
        check_model_folder(folder)
        return folder
    if config.path != BUILTIN_MODEL:
        hint = did_you_mean(config.path, [BUILTIN_MODEL])
        raise ConfigError(f"model.path: there is no built-in model {config.path!r}{hint}")
    steps = DEFAULT_STEPS if config.warm_start_steps < 0 else config.warm_start_steps
    name = f"arithmetic-{_key(seed, steps)}"
    cache = Path(config.cache_dir)
    folder = cache / name
    if folder.is_dir():
        check_model_folder(folder)
        return folder
    say = progress or _silent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{name}.lock", say):
            if not folder.is_dir():
                with atomic_folder(folder) as temporary:
                    _build(temporary, seed=seed, steps=steps, say=say)
    except OSError as error:
        raise ConfigError(f"model.cache_dir: cannot build the model in {cache}: {error}") from error
    return folder


def check_model_folder(folder: Path) -> None:
    """Raise ConfigError, saying what is missing, unless a model could be loaded from here."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(
            f"model.path: {folder} {what}; give a Hugging Face model folder, or {BUILTIN_MODEL!r} "
            "for the small built-in model (nothing is downloaded)"
        )
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        missing.append("weights (*.safetensors)")
    tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in tokenizers):
        missing.append("a tokenizer (tokenizer.json)")
    if missing:
        raise ConfigError(
            f"model.path: {folder} lacks {' and '.join(missing)}; it must be a folder as "
            "save_pretrained writes it, tokenizer included"
        )


def _key(seed: int, steps: int) -> str:
    """Hash of all that determines the model: recipe, seed, steps, and the libraries it runs on."""
    digest = hashlib.sha256(f"{seed}/{steps}".encode())
    for path in RECIPE:
        digest.update(path.read_bytes())
    for library in LIBRARIES:
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(
                f"model.path: {BUILTIN_MODEL!r} needs {library}: pip install "
                "'headway-rl[local,train,tasks]'"
            ) from error
        digest.update(f"{library}={version}\n".encode())
    return digest.hexdigest()[:16]


def _silent(line: str) -> None:
    """Says nothing."""


@contextmanager
def _lock(path: Path, say: Say) -> Iterator[None]:
    """Hold the lock. The wait has no deadline: the holder is a build that ends by itself, and the
    system frees the lock of a process that died."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the built-in model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path, *, seed: int, steps: int, say: Say) -> None:
    """Run the warm start in a process of its own. The wait has no deadline: the child reports its
    progress, and ends when this process does, since it then has nobody to report to."""
    say(f"building the built-in model, once, for later runs too ({steps} supervised steps)")
    command = [sys.executable, "-m", "headway.trainer.warm_start", "--folder", str(folder)]
    command += ["--seed", str(seed), "--steps", str(steps)]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    row = json.loads(line)
                    say(f"  warm start: step {row['step']} of {steps}, loss {row['loss']:.2f}")
            status = child.wait()
        except BaseException:  # an interrupt, too, must not leave the child behind; re-raised
            child.kill()
            child.wait()
            raise
        if status != 0:
            errors.seek(0)
            last = "".join(errors.readlines()[-NUM_ERROR_LINES:])
            raise HeadwayError(f"building the built-in model failed (status {status}):\n{last}")
    for path in folder.iterdir():
        fsync_file(path)
