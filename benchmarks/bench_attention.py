"""Paged attention against torch's gather + scaled_dot_product_attention, alternately in one run.

    python benchmarks/bench_attention.py [--threads N] [--rounds N]

Prefill of 256 tokens over 3,000 cached, and decode of 1 and 8 sequences over 3,000, for 9 query and
3 K/V heads of 64, one layer after another of a pool of 30 so that no K/V is warm. The torch side
gathers from the same pool in the same dtype, with bfloat16 converted to float32 first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prefixkv import _core
from prefixkv.model.attention import PagedAttention, StepLayout

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 30, 9, 3, 64, 16


def make_layout(sequences: int, new: int, cached: int, num_blocks: int) -> StepLayout:
    per_sequence = -(-(new + cached) // BLOCK)
    blocks = np.random.default_rng(0).permutation(num_blocks)[: sequences * per_sequence]
    return StepLayout(
        query_start=np.arange(sequences + 1, dtype=np.int32) * np.int32(new),
        num_computed=np.full(sequences, cached, dtype=np.int32),
        table_start=np.arange(sequences + 1, dtype=np.int32) * np.int32(per_sequence),
        block_ids=blocks.astype(np.int32),
    )


def torch_attention(
    attention: PagedAttention, layout: StepLayout, layer: int, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """What is done without a paged kernel: write, gather, SDPA, sequence by sequence."""
    new = len(q) // len(layout.num_computed)
    outs = []
    for i, cached in enumerate(layout.num_computed.tolist()):
        table = torch.from_numpy(
            layout.block_ids[layout.table_start[i] : layout.table_start[i + 1]]
        ).long()
        slots = (table[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: cached + new]
        rows = slice(i * new, (i + 1) * new)
        gathered = []
        for cache, x in ((attention.k_cache, k), (attention.v_cache, v)):
            flat = cache[layer].flatten(0, 1)
            flat[slots[cached:]] = x[rows].to(flat.dtype)
            gathered.append(flat[slots].float().transpose(0, 1)[None])
        mask = torch.ones(new, cached + new, dtype=torch.bool).tril(cached) if new > 1 else None
        out = scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None], *gathered, attn_mask=mask, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outs)


def measure(call: Callable[[int], object]) -> float:
    start = time.perf_counter()
    for layer in range(LAYERS):
        call(layer)
    return (time.perf_counter() - start) / LAYERS


def compare(
    name: str, dtype: torch.dtype, sequences: int, new: int, cached: int, args: argparse.Namespace
) -> None:
    num_blocks = sequences * -(-(new + cached) // BLOCK) + 8
    attention = PagedAttention(
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_blocks=num_blocks,
        block_size=BLOCK,
        dtype=dtype,
        pool=_core.ThreadPool(args.threads),
    )
    for cache in (attention.k_cache, attention.v_cache):
        cache.copy_(torch.randn(cache.shape[1:]))
    layout = make_layout(sequences, new, cached, num_blocks)
    tokens = sequences * new
    q = torch.randn(tokens, HEADS, HEAD_DIM)
    k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM)
    attention.begin(layout)

    def ours(layer: int) -> Tensor:
        return attention(layer, q, k, v)

    def theirs(layer: int) -> Tensor:
        return torch_attention(attention, layout, layer, q, k, v)

    error = (ours(0) - theirs(0)).abs().max().item()
    times = [(measure(ours), measure(theirs)) for _ in range(args.rounds)]
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    keys = new * cached + new * (new + 1) // 2
    flops = 4 * sequences * keys * HEADS * HEAD_DIM
    size = 2 * sequences * (cached + new) * KV_HEADS * HEAD_DIM * attention.k_cache.element_size()
    rate = f"{flops / mine / 1e9:6.1f} GFLOP/s" if new > 1 else f"{size / mine / 1e9:6.1f} GB/s   "
    print(
        f"{name:24} {str(dtype)[6:]:9} {mine * 1e3:8.3f} ms {rate}   torch {other * 1e3:8.3f} ms"
        f"   ratio {other / mine:6.2f}   max difference {error:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{_core.isa()}, {args.threads} threads, one layer, median of {args.rounds} rounds")
    for dtype in (torch.float32, torch.bfloat16):
        compare("prefill 256 over 3000", dtype, 1, 256, 3000, args)
        compare("decode 1 over 3000", dtype, 1, 1, 3000, args)
        compare("decode 8 over 3000", dtype, 8, 1, 3000, args)


if __name__ == "__main__":
    main()
