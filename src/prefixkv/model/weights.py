"""Where the tensors of a model come from, and the checks on the way into it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from prefixkv.errors import ModelError
from prefixkv.model.safetensors_file import SafetensorsFile

Progress = Callable[[str, int, int], None]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Tables that old checkpoints store though they follow from the config.
_HARMLESS = (".rotary_emb.inv_freq",)


class Weights(Protocol):
    """Tensors by their Hugging Face names."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor: ...

    def where(self, name: str | None = None) -> str: ...


class HuggingFaceWeights:
    """The safetensors files of a model directory, one or several with an index."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, SafetensorsFile] = {}
        for path in _files(directory):
            file = SafetensorsFile(path)
            self._files.update(dict.fromkeys(file.shapes, file))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor."""
        files = {id(file): file for file in self._files.values()}
        return {name: shape for file in files.values() for name, shape in file.shapes.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, in the type that the file stores."""
        return self._files[name].read(name)

    def where(self, name: str | None = None) -> str:
        """The file (or the directory, if no file holds the tensor) and the name, for errors."""
        if name is None:
            return str(self._directory)
        path = self._files[name].path if name in self._files else self._directory
        return f"{path}: tensor {name!r}"


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: has no weight_map")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        files = [directory / _SINGLE]
    for file in files:
        if not file.is_file():
            raise ModelError(
                f"{file}: not found; a model directory holds {_SINGLE}, or {_INDEX} and its files"
            )
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `ModelError` if it is missing or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class WeightReader:
    """Hands out tensors by name and expected shape, and knows which ones nobody asked for."""

    def __init__(self, weights: Weights, progress: Progress | None = None) -> None:
        self._weights = weights
        self._shapes = weights.shapes
        self._left = set(self._shapes)
        self._progress = progress
        self._total = len(self._shapes)

    def take(self, name: str, *shape: int) -> Tensor:
        """One tensor (float32, float16 or bfloat16); `ModelError` unless it has that shape."""
        if name not in self._shapes:
            raise ModelError(
                f"{self._weights.where(name)} is missing; expected shape {list(shape)}"
            )
        found = self._shapes[name]
        if found != shape:
            raise ModelError(
                f"{self._weights.where(name)} has shape {list(found)}; expected {list(shape)}"
            )
        tensor = self._weights.read(name)
        self._left.discard(name)
        if self._progress:
            self._progress("load", self._total - len(self._left), self._total)
        return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor

    def skip(self, name: str) -> None:
        """Lets a tensor be that the model does not use."""
        self._left.discard(name)

    def finish(self) -> None:
        """Raises `ModelError` if a tensor was left over: the model would be computed wrongly."""
        unknown = sorted(name for name in self._left if not name.endswith(_HARMLESS))
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ModelError(f"{self._weights.where(unknown[0])}{more}: not part of this model")
