"""What safetensors files say of their tensors, read without torch: headers, bytes in slices."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import WeightsError

_MAX_HEADER_BYTES = 256 * 1024**2
_SLICE = 1 << 22
"""Values looked at at a time, so that no tensor need fit into memory."""
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor: `dtype` as safetensors names it (`F32`, `BF16`), and where its bytes lie."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    end: int


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a Hugging Face folder by name; only headers are read.

    Raises WeightsError when there is none, when a file is damaged or cut off, or when a tensor
    comes twice.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, info in _read_header(file):
            if name in tensors:
                raise WeightsError(f"{folder}: tensor {name} lies in two files")
            tensors[name] = info
    if not tensors:
        raise WeightsError(f"{folder} holds no *.safetensors file with tensors")
    return tensors


def is_finite(tensor: TensorInfo) -> bool:
    """Whether all values are finite; reads all its bytes. Integers and 8-bit floats always are."""
    for values in _slices(tensor):
        if tensor.dtype == "BF16":
            # Exponent all ones: infinite or not a number.
            if bool(((values & 0x7F80) == 0x7F80).any()):
                return False
        elif not bool(np.isfinite(values).all()):
            return False
    return True


def _slices(tensor: TensorInfo) -> Iterator[NDArray[Any]]:
    kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(tensor.dtype)
    if kind is None or tensor.end == tensor.start:
        return
    count = (tensor.end - tensor.start) // np.dtype(kind).itemsize
    values = np.memmap(tensor.file, kind, "r", tensor.start, (count,))
    for start in range(0, count, _SLICE):
        yield values[start : start + _SLICE]


def _read_header(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    """Eight bytes of length, little-endian, that much JSON, then the tensors' bytes."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = (8 + length + int(offset) for offset in entry["data_offsets"])
            shape, dtype = tuple(map(int, entry["shape"])), str(entry["dtype"])
            if last > size:
                raise ValueError(f"{name} ends at byte {last}, the file at {size}: it was cut off")
            num_bytes = int(np.prod(shape, dtype=np.int64)) * _BYTES.get(dtype, 0)
            if first > last or (dtype in _BYTES and num_bytes != last - first):
                raise ValueError(f"{name} {dtype} {shape} does not fill its {last - first} bytes")
            yield (
                name,
                TensorInfo(shape=shape, dtype=dtype, file=file, start=first, end=last),
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} cannot be used: {error}") from error
