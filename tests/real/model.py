"""The built-in arithmetic policy in a shape that vLLM's CPU attention takes.

`python model.py FOLDER [STEPS]` builds it, warm start included, in about a minute. vLLM's CPU build
has attention kernels for heads of 32, 64, 96, 128, ... dimensions only.
"""

import sys
from pathlib import Path

from headway.store.atomic import atomic_folder
from headway.trainer import warm_start

HEAD_DIM = 32
SEED = 0
STEPS = 640


def build(folder: Path, steps: int = STEPS) -> Path:
    """Build it in `folder`, which appears when it is whole, unless it is there already."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        warm_start.MODEL["head_dim"] = HEAD_DIM
        with atomic_folder(folder) as temporary:
            warm_start.build(temporary, seed=SEED, steps=steps)
    return folder


if __name__ == "__main__":
    build(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
