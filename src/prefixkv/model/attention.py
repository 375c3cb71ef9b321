"""Paged attention: causal attention over K/V that lie in the blocks of a pool.

One call serves any mix of sequences: a whole prompt, a chunk after a cached prefix, one token.
The native backend gives a token the same bits whatever the chunks, company, block size, placement
and number of threads (native/attention_kernels.h says how); the torch backend is its plain
reference and runs on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkv import _core
from prefixkv.errors import ConfigError

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """What one step computes: S sequences with T new tokens in all, one after another (int32).

    A sequence's new tokens have the positions ``num_computed, num_computed + 1, ...``; position p
    has its K/V in slot ``p % block_size`` of block ``p // block_size`` of its table.
    """

    query_start: Int32Array
    """[S + 1] first row of each sequence in q; the last entry is T."""
    num_computed: Int32Array
    """[S] tokens whose K/V is in the cache already."""
    table_start: Int32Array
    """[S + 1] where each sequence's table begins in block_ids."""
    block_ids: Int32Array
    """Block tables end to end; each covers its sequence's computed and new tokens at least."""


class PagedAttention:
    """K/V pool of every layer, and attention over it.

    Args:
        num_layers, num_blocks, block_size: shape of the pool; a block holds ``block_size`` tokens.
        num_heads, num_kv_heads, head_dim: query heads share K/V heads evenly (grouped-query).
        dtype: of the stored K/V; the native backend knows float32 and bfloat16.
        scale: of the scores; ``head_dim ** -0.5`` unless given.
        backend: ``"native"`` (CPU) or ``"torch"`` (any device).
        pool: threads of the native backend; as many as torch's unless given.

    Raises ConfigError for options that contradict each other.
    """

    backend: str
    num_calls: int
    """Layer calls served so far."""
    k_cache: Tensor
    """[num_layers, num_blocks, block_size, num_kv_heads, head_dim]; untouched until used."""
    v_cache: Tensor
    """As k_cache."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        scale: float | None = None,
        device: str | torch.device = "cpu",
        backend: str = "native",
        pool: _core.ThreadPool | None = None,
    ) -> None:
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ConfigError(
                f"{num_heads} query heads cannot share {num_kv_heads} K/V heads evenly"
            )
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        if min(shape) < 1:
            raise ConfigError(f"K/V pool of shape {shape}: every size must be at least 1")
        self.k_cache = torch.empty(shape, dtype=dtype, device=device)
        self.v_cache = torch.empty(shape, dtype=dtype, device=device)
        self.backend = backend
        self.num_calls = 0
        self._q_shape = (num_heads, head_dim)
        self._kv_shape = (num_kv_heads, head_dim)
        self._num_tokens = 0
        factor = head_dim**-0.5 if scale is None else scale
        self._backend: _Native | _Torch
        if backend == "native":
            threads = pool or _core.ThreadPool(torch.get_num_threads())
            self._backend = _Native(self.k_cache, self.v_cache, num_heads, factor, threads)
        elif backend == "torch":
            self._backend = _Torch(self.k_cache, self.v_cache, factor)
        else:
            raise ConfigError(f"attention backend {backend!r} is unknown; use 'native' or 'torch'")

    def begin(self, layout: StepLayout) -> None:
        """Set what the calls up to the next ``begin`` work on.

        Raises ConfigError that names the first fault: array lengths, a block id outside the pool, a
        table too short for its tokens, a slot that two tokens would write. No step is set then.
        """
        self._num_tokens = 0
        arrays = (layout.query_start, layout.num_computed, layout.table_start, layout.block_ids)
        for array in arrays:
            if array.dtype != np.int32 or array.ndim != 1:
                raise ConfigError(
                    f"StepLayout takes int32 vectors, not {array.dtype} of shape {array.shape}"
                )
        try:
            self._backend.begin(layout)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._num_tokens = int(layout.query_start[-1])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new K/V of ``layer``, then attend from each token to all up to itself.

        q is [T, heads, head_dim], k and v [T, kv_heads, head_dim], float32 on the native backend;
        they may be views into wider rows. Returns [T, heads * head_dim] in q's dtype. Raises
        ConfigError for a tensor that does not fit the step that ``begin`` set.
        """
        if not 0 <= layer < self.k_cache.shape[0]:
            raise ConfigError(
                f"layer {layer} is outside the {self.k_cache.shape[0]} of the K/V pool"
            )
        tokens = self._num_tokens
        if q.shape != (tokens, *self._q_shape):
            raise ConfigError(f"q is {tuple(q.shape)}; the step needs {(tokens, *self._q_shape)}")
        if not k.shape == v.shape == (tokens, *self._kv_shape):
            raise ConfigError(
                f"k is {tuple(k.shape)} and v {tuple(v.shape)}; "
                f"the step needs {(tokens, *self._kv_shape)}"
            )
        self.num_calls += 1
        return self._backend.attend(layer, q, k, v)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer: (source, target) pairs, one after another."""
        num_blocks = self.k_cache.shape[1]
        for pair in copies:
            if not all(0 <= block < num_blocks for block in pair):
                raise ConfigError(f"block copy {pair} is outside the pool of {num_blocks} blocks")
        for source, target in copies:
            self.k_cache[:, target] = self.k_cache[:, source]
            self.v_cache[:, target] = self.v_cache[:, source]


class _Native:
    def __init__(
        self, k_cache: Tensor, v_cache: Tensor, num_heads: int, scale: float, pool: _core.ThreadPool
    ) -> None:
        dtype = k_cache.dtype
        if k_cache.device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"the native attention backend keeps float32 or bfloat16 on the cpu, not {dtype} "
                f"on {k_cache.device}; use backend 'torch'"
            )
        _, num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
        self._core = _core.PagedAttention(
            pool=pool,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            bfloat16=dtype == torch.bfloat16,
            scale=scale,
        )
        self._head_dim = head_dim
        self._k_layers = [layer.data_ptr() for layer in k_cache]
        self._v_layers = [layer.data_ptr() for layer in v_cache]

    def begin(self, layout: StepLayout) -> None:
        self._core.begin(
            layout.query_start, layout.num_computed, layout.table_start, layout.block_ids
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=torch.float32)
        self._core.run(
            self._k_layers[layer],
            self._v_layers[layer],
            q.data_ptr(),
            self._row_stride("q", q),
            k.data_ptr(),
            self._row_stride("k", k),
            v.data_ptr(),
            self._row_stride("v", v),
            out.data_ptr(),
        )
        return out

    def _row_stride(self, name: str, x: Tensor) -> int:
        row, head, element = x.stride()
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise ConfigError(
                f"{name} is {x.dtype} on {x.device}; native attention takes float32 on cpu"
            )
        if element != 1 or (head != self._head_dim and x.shape[1] > 1):
            raise ConfigError(f"{name} has strides {x.stride()}; only its rows may lie apart")
        return row


class _Torch:
    def __init__(self, k_cache: Tensor, v_cache: Tensor, scale: float) -> None:
        # [layers, slots, kv_heads, head_dim]
        self._k_slots = k_cache.flatten(1, 2)
        self._v_slots = v_cache.flatten(1, 2)
        self._num_blocks, self._block_size = k_cache.shape[1:3]
        self._scale = scale
        self._new_slots = torch.empty(0, dtype=torch.int64)
        self._sequences: list[tuple[slice, Tensor, Tensor]] = []

    def begin(self, layout: StepLayout) -> None:
        arrays = (layout.query_start, layout.num_computed, layout.table_start, layout.block_ids)
        _core.check_layout(*arrays, num_blocks=self._num_blocks, block_size=self._block_size)
        device = self._k_slots.device
        offsets = np.arange(self._block_size)
        self._sequences = []
        new_slots = [np.empty(0, dtype=np.int64)]
        for i, computed in enumerate(layout.num_computed.tolist()):
            start, stop = layout.query_start[i : i + 2].tolist()
            table = layout.block_ids[layout.table_start[i] : layout.table_start[i + 1]]
            slots = (table.astype(np.int64)[:, None] * self._block_size + offsets).reshape(-1)
            slots = slots[: computed + stop - start]
            new_slots.append(slots[computed:])
            # [new tokens, tokens]: what the causal mask hides
            hidden = torch.ones(stop - start, len(slots), dtype=torch.bool, device=device)
            self._sequences.append(
                (slice(start, stop), torch.from_numpy(slots).to(device), hidden.triu(computed + 1))
            )
        self._new_slots = torch.from_numpy(np.concatenate(new_slots)).to(device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._k_slots[layer], self._v_slots[layer]
        keys[self._new_slots] = k.to(keys.dtype)
        values[self._new_slots] = v.to(values.dtype)
        out = torch.empty_like(q)
        for rows, slots, hidden in self._sequences:
            out[rows] = self._attend_one(
                q[rows].float(), keys[slots].float(), values[slots].float(), hidden
            )
        return out.flatten(1)

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        """q [t, heads, d], k and v [n, kv_heads, d], hidden [t, n]; returns [t, heads, d]."""
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[2])
        scores = torch.einsum("tkgd,nkd->kgtn", grouped, k) * self._scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("kgtn,nkd->tkgd", weights, v).flatten(1, 2)
