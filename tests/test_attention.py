"""Paged attention: right, and the same bits however the work is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkv import _core
from prefixkv.errors import ConfigError
from prefixkv.model.attention import PagedAttention, StepLayout

POOL_TOKENS = 4096
DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Prompt:
    """One sequence's projected tokens and where its K/V goes."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: list[int]

    def __len__(self) -> int:
        return len(self.q)


def make_attention(
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    backend: str = "native",
    threads: int = 2,
) -> PagedAttention:
    attention = PagedAttention(
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_blocks=POOL_TOKENS // block_size,
        block_size=block_size,
        dtype=dtype,
        backend=backend,
        pool=_core.ThreadPool(threads),
    )
    attention.k_cache.fill_(torch.nan)  # as memory that another request left behind may be
    attention.v_cache.fill_(torch.nan)
    return attention


def make_prompts(
    lengths: Sequence[int],
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    *,
    block_size: int = 16,
    seed: int = 0,
) -> list[Prompt]:
    """The same tokens for a seed, in blocks placed at random."""
    generator = torch.Generator().manual_seed(seed)
    blocks = np.random.default_rng(seed + block_size).permutation(POOL_TOKENS // block_size)
    free = blocks.tolist()
    prompts = []
    for n in lengths:
        q = 3 * torch.randn(n, heads, head_dim, generator=generator)
        k, v = torch.randn(2, n, kv_heads, head_dim, generator=generator)
        table = [free.pop() for _ in range(-(-n // block_size))]
        prompts.append(Prompt(q, k, v, table))
    return prompts


def run_step(
    attention: PagedAttention, work: Sequence[tuple[Prompt, int, int]], layer: int = 1
) -> list[Tensor]:
    """One step: of each prompt the tokens [start, stop); returns their outputs."""
    counts = [stop - start for _, start, stop in work]
    tables = [prompt.table for prompt, _, _ in work]
    attention.begin(
        StepLayout(
            query_start=np.cumsum([0, *counts]).astype(np.int32),
            num_computed=np.array([start for _, start, _ in work], dtype=np.int32),
            table_start=np.cumsum([0, *map(len, tables)]).astype(np.int32),
            block_ids=np.array([block for table in tables for block in table], dtype=np.int32),
        )
    )
    q, k, v = (
        torch.cat([getattr(prompt, name)[start:stop] for prompt, start, stop in work])
        for name in ("q", "k", "v")
    )
    return list(attention(layer, q, k, v).split(counts))


def run_whole(attention: PagedAttention, prompts: Sequence[Prompt]) -> list[Tensor]:
    return run_step(attention, [(prompt, 0, len(prompt)) for prompt in prompts])


def run_random(attention: PagedAttention, prompts: Sequence[Prompt], seed: int) -> list[Tensor]:
    """The prompts in random chunks and company."""
    rng = np.random.default_rng(seed)
    done = [0] * len(prompts)
    outs: list[list[Tensor]] = [[] for _ in prompts]
    while open_ := [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]:
        chosen = rng.permutation(open_)[: rng.integers(1, len(open_) + 1)].tolist()
        work = []
        for i in chosen:
            chunk = int(rng.choice([1, 1, 2, 5, 16, 63, 200]))
            work.append((prompts[i], done[i], min(done[i] + chunk, len(prompts[i]))))
        for i, (_, _, stop), out in zip(chosen, work, run_step(attention, work), strict=True):
            outs[i].append(out)
            done[i] = stop
    return [torch.cat(parts) for parts in outs]


def plain_attention(prompt: Prompt, dtype: torch.dtype) -> Tensor:
    """Softmax written out, in float64, over K/V rounded as they are stored."""
    group = prompt.q.shape[1] // prompt.k.shape[1]
    k, v = (x.to(dtype).double().repeat_interleave(group, dim=1) for x in (prompt.k, prompt.v))
    scores = torch.einsum("thd,nhd->htn", prompt.q.double(), k) * prompt.q.shape[2] ** -0.5
    hidden = torch.ones(len(prompt), len(prompt), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("htn,nhd->thd", weights, v).flatten(1).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 2, 8), (3, 1, 16), (9, 3, 64), (8, 2, 80), (8, 1, 128), (4, 2, 20), (2, 1, 256)],
)
def test_equals_plain_softmax(
    heads: int, kv_heads: int, head_dim: int, backend: str, dtype: torch.dtype
) -> None:
    shape = (heads, kv_heads, head_dim)
    prompts = make_prompts([1, 17, 300], *shape)
    outs = run_whole(make_attention(*shape, dtype=dtype, backend=backend), prompts)
    for out, prompt in zip(outs, prompts, strict=True):
        torch.testing.assert_close(out, plain_attention(prompt, dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_chunks_over_a_cached_prefix_equal_plain_softmax(backend: str, dtype: torch.dtype) -> None:
    prompts = make_prompts([700, 64, 257])
    outs = run_random(make_attention(dtype=dtype, backend=backend), prompts, seed=3)
    for out, prompt in zip(outs, prompts, strict=True):
        torch.testing.assert_close(out, plain_attention(prompt, dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("seed", range(2))
def test_bits_do_not_depend_on_how_the_work_is_cut(
    seed: int, threads: int, block_size: int, dtype: torch.dtype
) -> None:
    lengths = [600, 1, 64, 65, 255, 257, 30]
    expected = [
        run_whole(make_attention(dtype=dtype, threads=1), [prompt])[0]
        for prompt in make_prompts(lengths, seed=seed)
    ]
    attention = make_attention(dtype=dtype, threads=threads, block_size=block_size)
    outs = run_random(attention, make_prompts(lengths, seed=seed, block_size=block_size), seed)
    for out, same in zip(outs, expected, strict=True):
        assert torch.equal(out, same)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(1, 1, 8), (4, 4, 64), (9, 3, 64), (8, 2, 80), (8, 1, 128), (7, 1, 20)],
)
def test_bits_do_not_depend_on_chunks_for_any_head_shape(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    shape = (heads, kv_heads, head_dim)
    prompts = make_prompts([530, 129], *shape)
    whole = run_whole(make_attention(*shape), prompts)
    for out, same in zip(run_random(make_attention(*shape), prompts, seed=1), whole, strict=True):
        assert torch.equal(out, same)


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_every_instruction_set_passes(isa: str) -> None:
    """The tests of arithmetic once more, in a process that may use `isa` at most."""
    environment = {**os.environ, "PREFIXKV_ISA": isa}
    probe = [sys.executable, "-c", "from prefixkv import _core; print(_core.isa())"]
    found = subprocess.run(probe, env=environment, capture_output=True, text=True, check=True)
    if found.stdout.strip() != isa or isa == _core.isa():
        pytest.skip(f"this CPU lacks {isa}, or it is what the other tests ran")
    names = "(plain_softmax and native) or head_shape or (work_is_cut and 2-16-dtype)"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__, "-k", names],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_unused_slots_do_not_leak(backend: str) -> None:
    """The pool is full of NaN (make_attention); a table may be longer than its tokens."""
    (prompt,) = make_prompts([70])
    prompt.table.append(200)
    (out,) = run_whole(make_attention(backend=backend), [prompt])
    assert torch.isfinite(out).all()


def test_a_later_token_does_not_leak() -> None:
    (prompt,) = make_prompts([300])
    (clean,) = run_whole(make_attention(), [prompt])
    prompt.k[77] = torch.nan
    prompt.v[77] = torch.inf
    (out,) = run_whole(make_attention(), [prompt])
    assert torch.equal(out[:77], clean[:77])
    assert torch.isnan(out[77:]).all()


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_a_corrupt_block_changes_the_answer(cache: str, backend: str) -> None:
    (prompt,) = make_prompts([100])
    attention = make_attention(backend=backend)
    run_step(attention, [(prompt, 0, 99)])
    (before,) = run_step(attention, [(prompt, 99, 100)])
    getattr(attention, cache)[1, prompt.table[2], 5] += 1
    (after,) = run_step(attention, [(prompt, 99, 100)])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_layers_are_apart(backend: str) -> None:
    first, second = make_prompts([40, 40])
    second.table = first.table
    attention = make_attention(backend=backend)
    run_step(attention, [(first, 0, 39)], layer=0)
    run_step(attention, [(second, 0, 39)], layer=1)
    (out,) = run_step(attention, [(first, 39, 40)], layer=0)
    alone = make_attention(backend=backend)
    run_step(alone, [(first, 0, 39)], layer=0)
    (expected,) = run_step(alone, [(first, 39, 40)], layer=0)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_copied_blocks_serve_another_table(backend: str) -> None:
    (prompt,) = make_prompts([40])
    attention = make_attention(backend=backend)
    run_step(attention, [(prompt, 0, 39)])
    free = [block for block in range(256) if block not in prompt.table][:3]
    attention.copy_blocks(list(zip(prompt.table, free, strict=True)))
    (expected,) = run_step(attention, [(prompt, 39, 40)])
    attention.k_cache[:, prompt.table] = 0
    prompt.table = free
    (out,) = run_step(attention, [(prompt, 39, 40)])
    assert torch.equal(out, expected)


def test_copies_run_one_after_another() -> None:
    attention = make_attention()
    attention.k_cache[:, 0] = 7
    attention.copy_blocks([(0, 1), (1, 2)])
    assert (attention.k_cache[:, 2] == 7).all()


def test_views_into_wider_rows() -> None:
    """The model passes q, k and v as parts of one projection's output."""
    (prompt,) = make_prompts([50])
    (expected,) = run_whole(make_attention(), [prompt])
    qkv = torch.cat([prompt.q, prompt.k, prompt.v], dim=1)
    prompt.q, prompt.k, prompt.v = qkv.split([6, 2, 2], dim=1)
    (out,) = run_whole(make_attention(), [prompt])
    assert torch.equal(out, expected)


def test_torch_backend_returns_the_dtype_of_q() -> None:
    (prompt,) = make_prompts([5])
    prompt.q, prompt.k, prompt.v = prompt.q.bfloat16(), prompt.k.bfloat16(), prompt.v.bfloat16()
    (out,) = run_whole(make_attention(backend="torch", dtype=torch.bfloat16), [prompt])
    assert out.dtype == torch.bfloat16


def test_scale() -> None:
    (prompt,) = make_prompts([50])
    (expected,) = run_whole(make_attention(), [prompt])
    options = {"num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
    attention = PagedAttention(
        **options, num_blocks=256, block_size=16, dtype=torch.float32, scale=0.5
    )
    prompt.q = prompt.q / 2  # 16 ** -0.5 / 0.5
    torch.testing.assert_close(run_whole(attention, [prompt])[0], expected)


def test_calls_are_counted() -> None:
    attention = make_attention()
    run_whole(attention, make_prompts([3]))
    assert (attention.backend, attention.num_calls) == ("native", 1)


def test_an_empty_step() -> None:
    attention = make_attention()
    empty = np.zeros(0, dtype=np.int32)
    attention.begin(StepLayout(np.zeros(1, np.int32), empty, np.zeros(1, np.int32), empty))
    out = attention(0, torch.empty(0, 6, 16), torch.empty(0, 2, 16), torch.empty(0, 2, 16))
    assert out.shape == (0, 96)


def layout(**changes: list[int]) -> StepLayout:
    """Two sequences of 3 and 1 new tokens, the second after 20 computed ones, with some change."""
    fields = {
        "query_start": [0, 3, 4],
        "num_computed": [0, 20],
        "table_start": [0, 1, 3],
        "block_ids": [7, 8, 9],
    }
    return StepLayout(**{k: np.array(v, np.int32) for k, v in {**fields, **changes}.items()})


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start": [0, 4]}, "query_start has 2 entries; 2 sequences"),
        ({"query_start": []}, "query_start is empty"),
        ({"query_start": [1, 3, 4]}, "query_start begins with 1"),
        ({"query_start": [0, 5, 4]}, "query_start decreases"),
        ({"table_start": [0, 1, 2]}, "table_start ends with 2, not 3"),
        ({"num_computed": [-1, 20]}, "num_computed of sequence 0 is -1"),
        ({"num_computed": [14, 20]}, "table of sequence 0 has 1 blocks .* 17 tokens"),
        ({"block_ids": [7, 8, 256]}, "block id 256 is outside the pool of 256 blocks"),
        ({"block_ids": [-1, 8, 9]}, "block id -1 is outside"),
        ({"num_computed": [3, 20], "block_ids": [9, 8, 9]}, "slot 4 of block 9 .* twice"),
    ],
)
def test_a_wrong_layout_is_refused(
    changes: dict[str, list[int]], message: str, backend: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_attention(backend=backend).begin(layout(**changes))


def test_a_layout_takes_int32() -> None:
    good = layout()
    wrong = StepLayout(good.query_start, good.num_computed, good.table_start, np.array([7, 8, 9]))
    with pytest.raises(ConfigError, match="int32 vectors, not int64"):
        make_attention().begin(wrong)


def test_nothing_runs_after_a_refused_layout() -> None:
    attention = make_attention()
    attention.begin(layout())
    with pytest.raises(ConfigError):
        attention.begin(layout(block_ids=[7, 8, 256]))
    with pytest.raises(ConfigError, match="the step needs"):
        attention(0, torch.zeros(4, 6, 16), torch.zeros(4, 2, 16), torch.zeros(4, 2, 16))


def swap(tensors: list[Tensor], index: int, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [change(x) if i == index else x for i, x in enumerate(tensors)]


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[:3], "q is"),
        (1, lambda x: x[:, :1], "k is"),
        (2, lambda x: x[..., :8], "v"),
        (1, lambda x: x.bfloat16(), "k is torch.bfloat16"),
        (0, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "q has strides"),
    ],
)
def test_wrong_tensors_are_refused(
    index: int, change: Callable[[Tensor], Tensor], message: str
) -> None:
    attention = make_attention()
    attention.begin(layout())
    good = [torch.zeros(4, 6, 16), torch.zeros(4, 2, 16), torch.zeros(4, 2, 16)]
    with pytest.raises(ConfigError, match=message):
        attention(0, *swap(good, index, change))


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_wrong_layer_is_refused(layer: int) -> None:
    attention = make_attention()
    attention.begin(layout())
    with pytest.raises(ConfigError, match=f"layer {layer} is outside the 2"):
        attention(layer, torch.zeros(4, 6, 16), torch.zeros(4, 2, 16), torch.zeros(4, 2, 16))


def test_a_copy_outside_the_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="outside the pool of 256 blocks"):
        make_attention().copy_blocks([(0, 256)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 4}, "6 query heads cannot share 4 K/V heads"),
        ({"head_dim": 0}, "every size must be at least 1"),
        ({"dtype": torch.float16}, "not torch.float16 on cpu; use backend 'torch'"),
        ({"backend": "fast"}, "'fast' is unknown"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_attention(**options)  # type: ignore[arg-type]
