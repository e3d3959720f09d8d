"""Kills: at a call of Headway's own code, and what they must leave as it was."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[2])


class Killed(BaseException):
    """The process is no more. Out of reach of every handler: raised between two callbacks."""


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file."""
    found = [(path, path.stat()) for path in folder.rglob("*")]
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found}


@contextlib.contextmanager
def killed_at(call: int | None) -> Iterator[None]:
    """Raise Killed at this call of a function, counted from here; None: never."""
    if call is None:
        yield
        return
    count = 0

    def count_calls(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        # Calls that Headway's own code makes: its functions, and those of the system and SQLite.
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(_PACKAGE):
            return
        count += 1
        if count == call:
            sys.setprofile(None)
            raise Killed

    sys.setprofile(count_calls)
    try:
        yield
    finally:
        sys.setprofile(None)
