"""From options to the parts of an engine: everything that needs the machine is decided here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from prefixkv import _core
from prefixkv.cache import CacheManager, make_cache
from prefixkv.config import (
    DEFAULT_KV_CACHE_MEMORY,
    EngineOptions,
    SchedulerConfig,
    parse_memory,
)
from prefixkv.engine.runner import Runner
from prefixkv.errors import ConfigError
from prefixkv.model.attention import PagedAttention
from prefixkv.model.loader import LoadedModel, load_model
from prefixkv.model.tokenizer import Tokenizer

MAX_BLOCKS = 2**31 - 2


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of."""

    model_name: str
    tokenizer: Tokenizer
    vocab_size: int
    cache: CacheManager
    runner: Runner
    scheduler_config: SchedulerConfig
    summary: str


def build_parts(
    options: EngineOptions, progress: Callable[[str, int, int], None] | None
) -> EngineParts:
    """Load the model, size the pool and make the parts.

    Raises:
        ModelError: the model cannot be found, read or served.
        ConfigError: the options do not fit the model or the machine.
    """
    _check_device(options)
    pool = _core.ThreadPool(options.threads or len(os.sched_getaffinity(0)))
    loaded = load_model(
        options.model, dtype=options.dtype, device=options.device, pool=pool, progress=progress
    )
    config = loaded.config
    dtype = loaded.dtype
    block_bytes = (
        2 * config.num_layers * config.num_kv_heads * config.head_dim * options.block_size
    ) * dtype.itemsize
    num_blocks = options.num_blocks or _blocks_that_fit(options, block_bytes)
    max_model_len = _max_model_len(options, config.max_position_embeddings, num_blocks)
    attention = PagedAttention(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=num_blocks,
        block_size=options.block_size,
        dtype=dtype,
        device=options.device,
        backend=_backend(options),
        pool=pool,
    )
    cache = make_cache(
        options.prefix_cache,
        num_blocks=num_blocks,
        block_size=options.block_size,
        hash_algorithm=options.hash_algorithm,
    )
    scheduler_config = SchedulerConfig(
        block_size=options.block_size,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        token_budget=options.token_budget,
    )
    return EngineParts(
        model_name=loaded.name,
        tokenizer=loaded.tokenizer,
        vocab_size=config.vocab_size,
        cache=cache,
        runner=Runner(loaded.model, attention),
        scheduler_config=scheduler_config,
        summary=_summary(
            options, loaded, num_blocks, block_bytes, max_model_len, attention.backend
        ),
    )


def _check_device(options: EngineOptions) -> None:
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device is {options.device!r}, which torch cannot use here "
            f"({str(error).splitlines()[0]}); cpu always works"
        ) from error
    if options.attention == "native" and torch.device(options.device).type != "cpu":
        raise ConfigError(
            f"attention is 'native', which runs on the CPU, and device is {options.device!r}; "
            "use attention 'torch' or 'auto'"
        )


def _backend(options: EngineOptions) -> str:
    if options.attention != "auto":
        return options.attention
    return "native" if torch.device(options.device).type == "cpu" else "torch"


def _free_memory(device: str) -> int:
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    # In a container the limit is the control group's, not the machine's.
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(free, max(0, int(limit.read_text()) - int(used.read_text())))
    except (OSError, ValueError):  # no control group, or "max": no limit
        return free


def _blocks_that_fit(options: EngineOptions, block_bytes: int) -> int:
    asked = options.kv_cache_memory or DEFAULT_KV_CACHE_MEMORY
    free = _free_memory(options.device)
    size = parse_memory(asked, free=free)
    if size < block_bytes:
        raise ConfigError(
            f"kv_cache_memory is {asked!r}, {size} bytes of {free} free, and one block of "
            f"{options.block_size} tokens takes {block_bytes}; give more, or a smaller block_size"
        )
    if size > free:
        raise ConfigError(
            f"kv_cache_memory is {asked!r}, {size} bytes, and only {free} are free; give less"
        )
    return min(size // block_bytes, MAX_BLOCKS)


def _max_model_len(options: EngineOptions, context: int, num_blocks: int) -> int:
    pool = num_blocks * options.block_size
    asked = options.max_model_len
    if asked is None:
        length = min(context, pool)
    elif asked > context:
        raise ConfigError(f"max_model_len is {asked}; the model's context is {context} tokens")
    elif asked > pool:
        raise ConfigError(
            f"max_model_len is {asked}, and the pool holds {pool} tokens ({num_blocks} blocks of "
            f"{options.block_size}); give it more memory or blocks, or lower max_model_len"
        )
    else:
        length = asked
    if length < 2:
        raise ConfigError(
            f"a request needs 2 tokens or more, and {length} fit: the context is {context}, the "
            f"pool {pool} tokens; give more blocks"
        )
    return length


def _summary(
    options: EngineOptions,
    loaded: LoadedModel,
    num_blocks: int,
    block_bytes: int,
    max_model_len: int,
    backend: str,
) -> str:
    dtype = str(loaded.dtype).removeprefix("torch.")
    size = num_blocks * block_bytes
    memory = f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
    return (
        f"{loaded.name} in {dtype} on {options.device}, prefix cache {options.prefix_cache}, "
        f"{num_blocks} blocks of {options.block_size} tokens ({memory}), context "
        f"{max_model_len} tokens, {backend} attention"
    )
