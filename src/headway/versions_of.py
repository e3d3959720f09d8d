"""Versions of everything that a run depends on."""

import platform
from importlib.metadata import PackageNotFoundError, version

from headway import __version__

LIBRARIES = ("numpy", "pyarrow", "aiohttp", "torch", "transformers", "safetensors", "reasoning-gym")


def versions_of(*, engine: str, trainer: str) -> dict[str, str]:
    """Headway, engine, trainer, Python and the installed libraries among `LIBRARIES`."""
    found = {
        "headway": __version__,
        "engine": engine,
        "trainer": trainer,
        "python": platform.python_version(),
    }
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
