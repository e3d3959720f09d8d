"""The simulated trainer's state: a hash over every batch that it has trained, in order.

It is the model: published as weights, saved as a checkpoint, loaded by engines. Whoever compares it
with the batch files knows whether each of them was trained exactly once, from the bytes that lie
there, and whether what engines serve is what they say.
"""

import hashlib
import json
import math
from pathlib import Path

import numpy as np

from headway.engines.tensors import read_tensors
from headway.store.atomic import fsync_file
from headway.trainer.checkpoints import OPTIMIZER
from headway.weights.folder import WEIGHTS_FILE

_NAME = "state"
INITIAL = bytes(32)
"""Before the first batch."""


def trained(state: bytes, batch_file: bytes) -> bytes:
    """The state after one more batch."""
    return hashlib.sha256(state + hashlib.sha256(batch_file).digest()).digest()


def write_model(folder: Path, state: bytes, *, is_finite: bool = True) -> None:
    """A Hugging Face folder that holds a state, without torch. Raises OSError."""
    values = np.array([1.0, math.nan if not is_finite else 2.0], "<f4").tobytes()
    header = json.dumps(
        {
            _NAME: {"dtype": "U8", "shape": [len(state)], "data_offsets": [0, len(state)]},
            "values": {
                "dtype": "F32",
                "shape": [2],
                "data_offsets": [len(state), len(state) + len(values)],
            },
        }
    ).encode()
    content = len(header).to_bytes(8, "little") + header + state + values
    config = json.dumps({"model_type": "simulated", "architectures": ["Simulated"]}).encode()
    for name, data in (("config.json", config), (WEIGHTS_FILE, content)):
        (folder / name).write_bytes(data)
        fsync_file(folder / name)


def read_state(folder: Path) -> bytes:
    """What `write_model` wrote. Raises OSError, and WeightsError when it is damaged."""
    info = read_tensors(folder)[_NAME]
    with info.file.open("rb") as file:
        file.seek(info.start)
        return file.read(info.end - info.start)


def write_checkpoint(folder: Path, state: bytes) -> None:
    """A model, and as the optimizer's state the same. Raises OSError."""
    write_model(folder, state)
    (folder / OPTIMIZER).write_bytes(state)
    fsync_file(folder / OPTIMIZER)


def read_checkpoint(folder: Path) -> bytes:
    """The optimizer's state. Raises OSError."""
    return (folder / OPTIMIZER).read_bytes()
