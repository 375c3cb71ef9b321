"""Reads GGUF files (versions 2 and 3, little-endian) one tensor at a time.

The header is parsed here rather than by ``gguf.GGUFReader``, which makes several array objects for
every token of the vocabulary (seconds and hundreds of megabytes) and does not notice a truncated
file; the `gguf` library's dequantisers are used as they are.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from torch import Tensor

from prefixkv.errors import ModelError

_MAGIC = b"GGUF"
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_Q = GGMLQuantizationType
SUPPORTED_TYPES = frozenset(
    {_Q.F32, _Q.F16, _Q.BF16, _Q.Q8_0, _Q.Q4_0, _Q.Q4_1, _Q.Q5_0, _Q.Q5_1}
    | {_Q.Q2_K, _Q.Q3_K, _Q.Q4_K, _Q.Q5_K, _Q.Q6_K}
)
# Rows are dequantised in groups of about this many values, so that temporaries stay small.
_GROUP_VALUES = 1 << 17


@dataclass(frozen=True, slots=True)
class _Entry:
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    row_bytes: int


class GGUFFile:
    """One GGUF file; the header is read and checked at construction, tensors on demand.

    ``metadata`` maps each key to a number, a bool, a string or a list of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        try:
            with path.open("rb") as file:
                header = _Header(path, file)
                self._entries = self._read_header(header)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, rows first (the reverse of GGUF's own order)."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str) -> Tensor:
        """A fresh copy of one tensor, dequantised: bfloat16 if the file stores that, else float32.

        Raises `ModelError` for a tensor type outside `SUPPORTED_TYPES`.
        """
        entry = self._entries[name]
        rows = math.prod(entry.shape[:-1])
        group = max(1, _GROUP_VALUES // max(1, entry.shape[-1]))
        bfloat16 = entry.type == _Q.BF16
        out = np.empty((rows, entry.shape[-1]), dtype=np.uint16 if bfloat16 else np.float32)
        with self.path.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            for start in range(0, rows, group):
                stop = min(rows, start + group)
                data = file.read((stop - start) * entry.row_bytes)
                if len(data) != (stop - start) * entry.row_bytes:
                    raise ModelError(f"{self.path}: the file ends inside tensor {name!r}")
                out[start:stop] = _values(data, entry.type).reshape(stop - start, -1)
        tensor = torch.from_numpy(out).view(entry.shape)
        return tensor.view(torch.bfloat16) if bfloat16 else tensor

    def _read_header(self, header: "_Header") -> dict[str, _Entry]:
        num_tensors, num_keys = header.begin()
        for _ in range(num_keys):
            key = header.string()
            self.metadata[key] = header.value(header.scalar("<I"))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment = {alignment!r} is not a size")
        infos = [header.tensor_info() for _ in range(num_tensors)]
        data_start = -(-header.position // alignment) * alignment
        return {
            name: self._entry(name, shape, kind, data_start + offset, header.size)
            for name, shape, kind, offset in infos
        }

    def _entry(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, size: int
    ) -> _Entry:
        supported = ", ".join(sorted(t.name for t in SUPPORTED_TYPES))
        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError:
            raise ModelError(
                f"{self.path}: tensor {name!r} has unknown type {kind}; supported are {supported}"
            ) from None
        if type_ not in SUPPORTED_TYPES:
            raise ModelError(
                f"{self.path}: tensor {name!r} has type {type_.name}; supported are {supported}"
            )
        block, block_bytes = GGML_QUANT_SIZES[type_]
        if shape[-1] % block:
            raise ModelError(
                f"{self.path}: tensor {name!r}: rows of {shape[-1]} values are not whole "
                f"{type_.name} blocks of {block}"
            )
        row_bytes = shape[-1] // block * block_bytes
        stop = offset + math.prod(shape[:-1]) * row_bytes
        if stop > size:
            raise ModelError(
                f"{self.path}: truncated: tensor {name!r} ends at byte {stop}, "
                f"the file has {size} bytes"
            )
        return _Entry(type_, shape, offset, row_bytes)


def _values(data: bytes, type_: GGMLQuantizationType) -> NDArray[Any]:
    if type_ == _Q.BF16:
        return np.frombuffer(data, dtype=np.uint16)
    # One long row: the dequantisers loop in Python over every 16 rows.
    return dequantize(np.frombuffer(data, dtype=np.uint8).reshape(1, -1), type_)


class _Header:
    """A cursor over the header; every read past the end of the file is a `ModelError`."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0

    def begin(self) -> tuple[int, int]:
        """Checks magic and version; returns the numbers of tensors and of metadata keys."""
        magic = self._file.read(4)
        if magic != _MAGIC:
            raise ModelError(f"{self._path}: not a GGUF file: it begins with {magic!r}")
        self.position = 4
        version = self.scalar("<I")
        if version not in (2, 3):
            raise ModelError(f"{self._path}: GGUF version {version} is not supported; 2 and 3 are")
        return self.scalar("<Q"), self.scalar("<Q")

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (rows first), type and offset of the next tensor."""
        name = self.string()
        dims = self.scalar("<I")
        if not 1 <= dims <= _MAX_DIMS:
            raise ModelError(f"{self._path}: tensor {name!r} has {dims} dimensions; corrupt header")
        shape = tuple(self.scalar("<Q") for _ in range(dims))[::-1]
        return name, shape, self.scalar("<I"), self.scalar("<Q")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("<I"), self.scalar("<Q")
            if item not in _SCALARS and item != _STRING:
                raise ModelError(f"{self._path}: metadata list of type {item} is not supported")
            if item in _SCALARS:
                format_ = _SCALARS[item]
                data = self._bytes(count * struct.calcsize(format_))
                return list(struct.unpack(f"<{count}{format_[1]}", data))
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self._path}: metadata value of unknown type {kind}; corrupt header")
        return self.scalar(_SCALARS[kind])

    def scalar(self, format_: str) -> Any:
        return struct.unpack(format_, self._bytes(struct.calcsize(format_)))[0]

    def string(self) -> str:
        return self._bytes(self.scalar("<Q")).decode("utf-8", errors="replace")

    def _bytes(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise ModelError(
                f"{self._path}: truncated or corrupt: the header needs {count} bytes at "
                f"{self.position}, the file has {self.size}"
            )
        self.position += count
        return self._file.read(count)
