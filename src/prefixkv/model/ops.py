"""The arithmetic of a forward pass: linear layers, norms, rotary embedding, gated activation.

``NativeOps`` runs on the CPU in float32, with weights stored as float32 or bfloat16. Each row of
its results is a function of that row alone, to the bit: the number of rows, their order and the
number of threads do not matter. ``TorchOps`` is the same in plain torch, in the model's dtype, on
any device; whether its rows depend on their company is up to torch.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixkv import _core

Weights = Tensor | Sequence[Tensor]
Biases = Tensor | Sequence[Tensor | None] | None

_WEIGHT_TYPES = {
    torch.float32: _core.WeightType.float32,
    torch.bfloat16: _core.WeightType.bfloat16,
    torch.float16: _core.WeightType.float16,
}


class Linear(Protocol):
    """A weight [n, k] with an optional bias [n], ready to multiply; made by ``Ops.linear``."""

    @property
    def n(self) -> int:
        """Features out."""

    @property
    def k(self) -> int:
        """Features in."""

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``: [m, k] -> [m, n]."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, exact: int64 [t] -> [t, k]. IndexError names an id outside [0, n)."""


class Ops(Protocol):
    """What a model computes with, apart from attention."""

    def linear(self, weight: Weights, bias: Biases = None) -> Linear:
        """Takes a weight [n, k], or several with one k that are stacked along n.

        ``bias`` matches ``weight``: None, one [n], or one or None for each of several weights. The
        caller may drop its tensors at once. ValueError tells which shape or dtype does not fit.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension of [m, k] or [m, h, k]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += x`` in place, then the norm of ``residual``; all [m, k]."""

    def rope_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Rotates q [t, heads, d] and k [t, kv_heads, d] in place (Su et al. 2021, RoFormer).

        The pairs are (i, i + d/2), as in GPT-NeoX and Hugging Face's Llama. ``cos`` and ``sin`` are
        float32 [max_positions, d/2], ``positions`` int64 [t]; IndexError names one outside.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(first half) * second half`` (Shazeer 2020, SwiGLU): [m, 2i] -> [m, i]."""


def _stack(weight: Weights, bias: Biases) -> tuple[list[Tensor], list[Tensor | None]]:
    """The weights and biases as lists of one length, their shapes checked."""
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    if bias is None:
        biases: list[Tensor | None] = [None] * len(weights)
    else:
        biases = [bias] if isinstance(bias, Tensor) else list(bias)
    if not weights or len(biases) != len(weights):
        raise ValueError(f"{len(weights)} weights with {len(biases)} biases: give one for each")
    for w, b in zip(weights, biases, strict=True):
        if w.dim() != 2 or w.shape[1] != weights[0].shape[1]:
            shapes = ", ".join(str(list(each.shape)) for each in weights)
            raise ValueError(f"weights must be [n, k] with one k, not {shapes}")
        if w.dtype not in _WEIGHT_TYPES:
            raise ValueError(f"a weight must be float32, bfloat16 or float16, not {w.dtype}")
        if b is not None and b.shape != (w.shape[0],):
            raise ValueError(f"the bias of a weight {list(w.shape)} has shape {list(b.shape)}")
    return weights, biases


def _describe(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} with strides {list(x.stride())} on {x.device}"


def _check(name: str, x: Tensor, dim: int, last: int) -> None:
    """float32 on the CPU, ``dim`` dimensions, the last one contiguous and of that size."""
    if (
        x.dtype is torch.float32
        and x.is_cpu
        and x.dim() == dim
        and x.shape[-1] == last
        and (x.stride(-1) == 1 or last == 1)
    ):
        return
    raise ValueError(
        f"{name} must be a float32 CPU tensor of {dim} dimensions, the last one {last} long and "
        f"contiguous; it is {_describe(x)}"
    )


def _check_ids(name: str, ids: Tensor) -> None:
    if ids.dtype is torch.int64 and ids.is_cpu and ids.dim() == 1 and ids.is_contiguous():
        return
    raise ValueError(f"{name} must be a contiguous int64 [t] CPU tensor; it is {_describe(ids)}")


class NativeLinear:
    """A weight packed for the CPU kernels (``native/linear.h``), the only copy that is kept."""

    def __init__(
        self,
        weight: Weights,
        bias: Biases,
        dtype: torch.dtype,
        scratch: _core.Scratch,
        pool: _core.ThreadPool,
    ) -> None:
        weights, biases = _stack(weight, bias)
        self.n = sum(w.shape[0] for w in weights)
        self.k = weights[0].shape[1]
        has_bias = any(b is not None for b in biases)
        self._packed = _core.PackedLinear(
            self.n, self.k, dtype is torch.bfloat16, has_bias, scratch, pool
        )
        first = 0
        for w, b in zip(weights, biases, strict=True):
            self._pack(first, w, b)
            first += w.shape[0]

    def _pack(self, first: int, weight: Tensor, bias: Tensor | None) -> None:
        rows = weight.shape[0]
        if not weight.is_cpu or (weight.stride(1) != 1 and self.k != 1):
            raise ValueError(
                f"a weight must be on the CPU with contiguous rows; it is {_describe(weight)}"
            )
        self._packed.pack(
            first, rows, weight.data_ptr(), weight.stride(0), _WEIGHT_TYPES[weight.dtype]
        )
        if bias is not None:
            wide = bias.to("cpu", torch.float32).contiguous()
            self._packed.set_bias(first, rows, wide.data_ptr())

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight and bias."""
        return self._packed.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [m, k], rows contiguous -> float32 [m, n]."""
        _check("x", x, 2, self.k)
        rows = x.shape[0]
        y = torch.empty((rows, self.n), dtype=torch.float32)
        self._packed.multiply(x.data_ptr(), x.stride(0), rows, y.data_ptr())
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """int64 [t] -> float32 [t, k]."""
        _check_ids("ids", ids)
        out = torch.empty((len(ids), self.k), dtype=torch.float32)
        self._packed.read_rows(ids.data_ptr(), len(ids), out.data_ptr())
        return out


class NativeOps:
    """The CPU's operations: float32 activations, weights stored as ``dtype``.

    One caller at a time, since the thread pool and the scratch memory are shared.
    """

    def __init__(self, pool: _core.ThreadPool, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"weights are stored as float32 or bfloat16, not {dtype}")
        self._pool = pool
        self._dtype = dtype
        self._scratch = _core.Scratch()

    def linear(self, weight: Weights, bias: Biases = None) -> NativeLinear:
        return NativeLinear(weight, bias, self._dtype, self._scratch, self._pool)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        k = weight.shape[0]
        _check("weight", weight, 1, k)
        if x.dim() == 2:
            _check("x", x, 2, k)
            inner, inner_stride = 1, 0
        else:
            _check("x", x, 3, k)
            inner, inner_stride = x.shape[1], x.stride(1)
        out = torch.empty(x.shape, dtype=torch.float32)
        _core.rms_norm(
            x.data_ptr(),
            x.shape[0],
            inner,
            x.stride(0),
            inner_stride,
            k,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            self._pool,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        k = weight.shape[0]
        _check("weight", weight, 1, k)
        _check("x", x, 2, k)
        _check("residual", residual, 2, k)
        rows = x.shape[0]
        if residual.shape[0] != rows:
            raise ValueError(f"x has {rows} rows, the residual {residual.shape[0]}")
        out = torch.empty((rows, k), dtype=torch.float32)
        _core.add_rms_norm(
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            rows,
            k,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            self._pool,
        )
        return out

    def rope_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        max_positions, half = cos.shape
        _check("q", q, 3, 2 * half)
        _check("k", k, 3, 2 * half)
        _check_ids("positions", positions)
        count = len(positions)
        if q.shape[0] != count or k.shape[0] != count:
            raise ValueError(f"{count} positions for {q.shape[0]} rows of q, {k.shape[0]} of k")
        for name, table in (("cos", cos), ("sin", sin)):
            _check(name, table, 2, half)
            if table.shape != cos.shape or not table.is_contiguous():
                raise ValueError(f"{name} must be contiguous, like cos; it is {_describe(table)}")
        _core.rope(
            q.data_ptr(),
            q.shape[1],
            q.stride(0),
            q.stride(1),
            k.data_ptr(),
            k.shape[1],
            k.stride(0),
            k.stride(1),
            count,
            cos.data_ptr(),
            sin.data_ptr(),
            max_positions,
            half,
            positions.data_ptr(),
            self._pool,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1]
        _check("gate_up", gate_up, 2, width)
        if width % 2 != 0:
            raise ValueError(f"gate_up holds two halves, but has {width} columns")
        rows = gate_up.shape[0]
        out = torch.empty((rows, width // 2), dtype=torch.float32)
        _core.silu_mul(
            gate_up.data_ptr(), gate_up.stride(0), rows, width // 2, out.data_ptr(), self._pool
        )
        return out


class TorchLinear:
    """A weight on a torch device."""

    def __init__(
        self, weight: Weights, bias: Biases, device: torch.device, dtype: torch.dtype
    ) -> None:
        weights, biases = _stack(weight, bias)
        self.n = sum(w.shape[0] for w in weights)
        self.k = weights[0].shape[1]
        self._weight = torch.cat([w.to(device, dtype) for w in weights])
        self._bias: Tensor | None = None
        if any(b is not None for b in biases):
            filled = [
                torch.zeros(w.shape[0]) if b is None else b
                for w, b in zip(weights, biases, strict=True)
            ]
            self._bias = torch.cat([b.to(device, dtype) for b in filled])

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._weight)


class TorchOps:
    """The same operations in plain torch, in ``dtype`` on ``device``; norms and rope in float32."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self._device = torch.device(device)
        self._dtype = dtype

    def linear(self, weight: Weights, bias: Biases = None) -> TorchLinear:
        return TorchLinear(weight, bias, self._device, self._dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        for heads in (q, k):
            a, b = heads.float().chunk(2, dim=-1)
            heads.copy_(torch.cat((a * c - b * s, b * c + a * s), dim=-1))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
