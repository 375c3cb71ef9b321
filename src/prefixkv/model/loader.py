"""Loads a model: weights, tokenizer and chat template, from one directory or file."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from prefixkv import _core
from prefixkv.errors import ConfigError, ModelError
from prefixkv.model.config import ModelConfig, parse_config
from prefixkv.model.default_model import DEFAULT_MODEL, wheel_model_directory
from prefixkv.model.gguf_file import GGUFFile
from prefixkv.model.gguf_tokenizer import gguf_tokenizer
from prefixkv.model.gguf_weights import GGUFWeights, gguf_config
from prefixkv.model.llama import Llama
from prefixkv.model.ops import NativeOps, Ops, TorchOps
from prefixkv.model.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from prefixkv.model.weights import (
    HuggingFaceWeights,
    Progress,
    WeightReader,
    Weights,
    read_json,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run; ``name`` is what clients call it unless told otherwise.

    ``dtype`` is the type that weights and K/V are stored in.
    """

    name: str
    config: ModelConfig
    model: Llama
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: str


def load_model(
    model: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    pool: Any = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads a Hugging Face directory or a GGUF file; None means the default model.

    ``dtype`` is ``float32``, ``bfloat16`` or ``auto`` (bfloat16 where the device multiplies it in
    hardware). ``pool`` is the `_core.ThreadPool` of the CPU kernels; one is made for all CPUs if it
    is None. ``progress(stage, done, total)`` is told about fetch, convert and load.

    Raises `ConfigError` for an unknown dtype and `ModelError`, naming the file and what is wrong
    with it, for a model that cannot be read or served.
    """
    stored = resolve_dtype(dtype, device)
    path = wheel_model_directory(progress=progress) if model is None else Path(model).expanduser()
    if (path / "config.json").is_file():
        raw = read_json(path / "config.json")
        config = parse_config(raw, str(path / "config.json"))
        weights: Weights = HuggingFaceWeights(path)
        tokenizer = load_tokenizer(path, raw)
    elif path.is_file():
        file = GGUFFile(path)
        config = parse_config(gguf_config(file), str(path))
        weights = GGUFWeights(file)
        tokenizer = make_tokenizer(*gguf_tokenizer(file.metadata, str(path)), str(path))
    else:
        raise ModelError(_no_model(path))
    llama = Llama(config, _make_ops(stored, device, pool), WeightReader(weights, progress), device)
    name = DEFAULT_MODEL.name if model is None else (path.stem if path.is_file() else path.name)
    return LoadedModel(name, config, llama, tokenizer, stored, device)


def _no_model(path: Path) -> str:
    what = "a directory without config.json" if path.is_dir() else "nothing is there"
    hint = "give a Hugging Face directory (config.json, safetensors, tokenizer.json) or a GGUF file"
    if not path.is_absolute() and len(path.parts) == 2 and not path.parent.exists():
        hint += "; if this names a model of a hub, download it first and give its directory"
    return f"{path}: {what}; {hint}"


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """The torch type for a ``dtype`` option on a device."""
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype != "auto":
        raise ConfigError(f"dtype = {dtype!r}; expected auto, {' or '.join(_DTYPES)}")
    if device == "cpu":
        fast = _core.cpu_has_bfloat16()
    else:
        fast = device.startswith("cuda") and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def _make_ops(dtype: torch.dtype, device: str, pool: Any) -> Ops:
    if device != "cpu":
        return TorchOps(device, dtype)
    return NativeOps(pool or _core.ThreadPool(len(os.sched_getaffinity(0))), dtype)
