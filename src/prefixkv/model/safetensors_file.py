"""Reads and writes safetensors files one tensor at a time.

The file is read, not mapped: mapped pages would stay resident beside the packed weights and double
the memory of loading. Format: an 8-byte little-endian length, a JSON header of that length with
``dtype``, ``shape`` and ``data_offsets`` of each tensor, then the tensors.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prefixkv.errors import ModelError

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One safetensors file; the header is read and checked at construction, tensors on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._entries = _read_header(path, file.read(8), file)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor in the file."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str) -> Tensor:
        """A fresh copy of one tensor, in the type that the file stores."""
        entry = self._entries[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelError(
                f"{self.path}: tensor {name!r} has type {entry.dtype}; "
                f"supported are {', '.join(_DTYPES)}"
            )
        data = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
        expected = math.prod(entry.shape) * dtype.itemsize
        if len(data) != expected:
            raise ModelError(
                f"{self.path}: tensor {name!r} of shape {list(entry.shape)} and type {entry.dtype} "
                f"needs {expected} bytes, its offsets hold {len(data)}"
            )
        with self.path.open("rb", buffering=0) as file:
            file.seek(entry.start)
            view = data.numpy().data
            while view:
                count = file.readinto(view)
                if not count:
                    raise ModelError(f"{self.path}: the file ends inside tensor {name!r}")
                view = view[count:]
        return data.view(dtype).reshape(entry.shape)


def _read_header(path: Path, prefix: bytes, file: Any) -> dict[str, _Entry]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
        raise ModelError(
            f"{path}: not a safetensors file, or truncated: the file has {size} bytes, "
            f"its header claims {length}"
        )
    try:
        header = json.loads(file.read(length))
        entries = {
            name: _entry(value, 8 + length)
            for name, value in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path}: the safetensors header is corrupt: {error}") from error
    for name, entry in entries.items():
        if entry.stop > size:
            raise ModelError(
                f"{path}: truncated: tensor {name!r} ends at byte {entry.stop}, "
                f"the file has {size} bytes"
            )
    return entries


def _entry(value: Mapping[str, Any], base: int) -> _Entry:
    start, stop = value["data_offsets"]
    shape = tuple(int(n) for n in value["shape"])
    if not 0 <= start <= stop or min(shape, default=0) < 0:
        raise ValueError(f"offsets {start}..{stop}, shape {list(shape)}")
    return _Entry(str(value["dtype"]), shape, base + start, base + stop)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
) -> None:
    """Writes ``read(name)`` as float32 for each name in ``shapes``, one tensor in memory at a time.

    The data reach the disk before this returns.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        stop = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = read(name)
            if tuple(tensor.shape) != tuple(shape):
                raise ModelError(f"{path}: {name!r} is {list(tensor.shape)}, not {list(shape)}")
            file.write(tensor.to(torch.float32).contiguous().numpy().data)
        file.flush()
        os.fsync(file.fileno())
