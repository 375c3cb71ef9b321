"""Options as a user gives them, and the configuration that they resolve to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from prefixkv.errors import ConfigError

CacheSystem = Literal["hash", "radix", "paged", "off"]
HashAlgorithm = Literal["xxh3", "sha256_cbor", "sha256"]

CACHE_SYSTEMS = ("hash", "radix", "paged", "off")
HASH_ALGORITHMS = ("xxh3", "sha256_cbor", "sha256")
DTYPES = ("auto", "float32", "bfloat16")
ATTENTION_BACKENDS = ("auto", "native", "torch")

MAX_BLOCK_SIZE = 1024
MAX_THREADS = 1024
DEFAULT_KV_CACHE_MEMORY = "40%"


def _option(default: Any, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user may choose: the flags of the command line and the keywords of ``LLM``.

    One list serves both: a field's ``help`` is the flag's help. None means: decided from the model
    and the machine when the engine starts.

    Raises:
        ConfigError: a value is out of its limits.
    """

    model: str | Path | None = _option(
        None, "Model: a Hugging Face directory or a GGUF file [default: SmolLM2-135M-Instruct]"
    )
    dtype: str = _option(
        "auto",
        "Type of weights and K/V; auto is bfloat16 where the CPU multiplies it, else float32",
        choices=DTYPES,
    )
    device: str = _option("cpu", "Device, as torch names it")
    attention: str = _option(
        "auto",
        "Attention backend; auto is native on the CPU, torch elsewhere",
        choices=ATTENTION_BACKENDS,
    )
    threads: int | None = _option(None, "CPU threads [default: the cores this process may use]")
    prefix_cache: str = _option(
        "hash",
        "What finds shared prefixes. hash: hashes of blocks, as vLLM does; radix: a radix tree, as "
        "SGLang does; paged: only what is reserved is shared; off: nothing is",
        choices=CACHE_SYSTEMS,
    )
    hash_algorithm: str = _option("xxh3", "Hash of a block's content", choices=HASH_ALGORITHMS)
    block_size: int = _option(16, "Tokens a block, 1 to 1024")
    num_blocks: int | None = _option(
        None,
        "Blocks in the pool (instead of --kv-cache-memory); a request never gets more tokens than "
        "the pool holds",
    )
    kv_cache_memory: str | int | None = _option(
        None,
        "Memory for K/V: bytes, a size such as 4GiB, or a share of free memory such as 40% "
        f"[default: {DEFAULT_KV_CACHE_MEMORY}]",
    )
    max_model_len: int | None = _option(
        None, "Longest prompt plus output, in tokens [default: the model's context]"
    )
    max_num_seqs: int = _option(256, "Most requests running at once")
    token_budget: int = _option(512, "Most tokens computed in one step")

    def __post_init__(self) -> None:
        for item in fields(self):
            choices = item.metadata.get("choices")
            value = getattr(self, item.name)
            if choices and value not in choices:
                raise ConfigError(
                    f"{item.name} is {value!r}; it must be one of {', '.join(choices)}"
                )
        self._whole("block_size", MAX_BLOCK_SIZE)
        if self.threads is not None:
            self._whole("threads", MAX_THREADS)
        for name in ("num_blocks", "max_model_len", "max_num_seqs", "token_budget"):
            if getattr(self, name) is not None:
                self._whole(name)
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("num_blocks and kv_cache_memory both size the pool; give one of them")
        if self.kv_cache_memory is not None:
            parse_memory(self.kv_cache_memory, free=1)

    def _whole(self, name: str, most: int | None = None) -> None:
        value = getattr(self, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and value >= 1 and (most is None or value <= most)):
            limit = "1 or more" if most is None else f"from 1 to {most}"
            raise ConfigError(f"{name} is {value!r}; it must be a whole number, {limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs, resolved: no field depends on the machine any more."""

    block_size: int
    max_model_len: int
    max_num_seqs: int = 256
    token_budget: int = 512
    # A request waits this many steps at most for blocks that another one is computing.
    max_hold_steps: int = 1024


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens fill, the last maybe in part."""
    return -(-num_tokens // block_size)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_memory(value: str | int, *, free: int) -> int:
    """Bytes meant by ``4294967296``, ``"4GiB"``, ``"500MB"`` or ``"40%"`` (of ``free`` bytes).

    Raises:
        ConfigError: it reads as none of these, or as nothing at all.
    """
    text = str(value).strip().lower()
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:(%)|([kmgt]?i?)b?)", text)
    if match is None or match[3] == "i":
        raise ConfigError(
            f"kv_cache_memory is {value!r}; write bytes, a size such as 4GiB or 500MB, "
            "or a share of free memory such as 40%"
        )
    number = float(match[1])
    if match[2] and number > 100:
        raise ConfigError(f"kv_cache_memory is {value!r}; a share is at most 100%")
    size = number * free / 100 if match[2] else number * _UNITS[match[3] or ""]
    if number == 0:
        raise ConfigError(f"kv_cache_memory is {value!r}; it must be more than nothing")
    return int(size)
