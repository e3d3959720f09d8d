"""Files that appear whole or not at all: temporary name, fsync, rename, fsync of the folder.

The temporary name starts with a dot and lies in the same folder, so that the rename stays within
one file system and every reader can tell leftovers of a crash by their name.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def fsync_file(path: Path) -> None:
    """Flush a file's, or a folder's, content to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Write to the temporary path that this yields; `path` appears when the block ends well.

    An older file of that name is replaced. If the block raises, nothing is left. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        fsync_file(temporary)
        temporary.rename(path)
    except BaseException:  # an interrupt, too, must leave no half-written file; re-raised
        temporary.unlink(missing_ok=True)
        raise
    fsync_file(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Fill the temporary folder that this yields; `path` appears when the block ends well.

    An older folder of that name is replaced. If the block raises, nothing is left. The files must
    be flushed by whoever writes them. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        fsync_file(temporary)
        if path.exists():
            remove_folder(path)
        temporary.rename(path)
    except BaseException:  # an interrupt, too, must leave no half-written folder; re-raised
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_file(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder so that no reader ever sees part of it under its name. Raises OSError."""
    doomed = path.with_name(f".{path.name}.{os.getpid()}.old")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON file in one piece. Raises OSError."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
