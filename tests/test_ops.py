"""Linear layers and row operations: right, and every row on its own to the bit."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkv import _core
from prefixkv.model.ops import NativeOps, TorchOps

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(96, 64), (1, 1), (7, 3), (77, 601), (193, 130)]  # n, k; one has several blocks of k
EPS = 1e-5


@pytest.fixture(scope="module")
def pool() -> _core.ThreadPool:
    return _core.ThreadPool(2)


@pytest.fixture(scope="module")
def ops(pool: _core.ThreadPool) -> NativeOps:
    return NativeOps(pool)


@pytest.fixture
def exact() -> TorchOps:
    return TorchOps("cpu", torch.float64)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


# ---- linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 13, 70])
def test_linear_is_the_product_with_the_stored_weight(
    pool: _core.ThreadPool, dtype: torch.dtype, n: int, k: int, m: int
) -> None:
    weight, bias, x = torch.randn(n, k), torch.randn(n), torch.randn(m, k)
    y = NativeOps(pool, dtype).linear(weight, bias)(x)
    expected = x.double() @ weight.to(dtype).double().T + bias.double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=2e-6 * k**0.5 + 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_in_any_company(
    pool: _core.ThreadPool, dtype: torch.dtype, n: int, k: int
) -> None:
    linear = NativeOps(pool, dtype).linear(torch.randn(n, k), torch.randn(n))
    x = torch.randn(300, k)
    alone = torch.cat([linear(row[None]) for row in x])
    for m in [*range(1, 71), 127, 211, 300]:
        first = int(torch.randint(0, 301 - m, ()))
        assert same_bits(linear(x[first : first + m]), alone[first : first + m]), (m, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 4, 6, 40, 700])
def test_the_number_of_threads_does_not_change_a_bit(dtype: torch.dtype, m: int) -> None:
    weight, x = torch.randn(555, 300), torch.randn(m, 300)
    one, two, many = (
        NativeOps(_core.ThreadPool(threads), dtype).linear(weight)(x) for threads in (1, 2, 23)
    )
    assert same_bits(one, two)
    assert same_bits(one, many)


@pytest.mark.parametrize("m", [1, 2, 3, 4, *range(5, 27)])
def test_an_element_is_one_chain_of_fused_multiply_adds(ops: NativeOps, m: int) -> None:
    """Integers below 2**20: a product does not fit float32, a product and a sum fit float64."""
    rng = np.random.default_rng(m)
    x = rng.integers(0, 2**20, (m, 300)).astype(np.float32)
    weight = rng.integers(0, 2**20, (50, 300)).astype(np.float32)
    fused = _core.isa() != "base" or platform.machine() in ("aarch64", "arm64")
    acc = np.zeros((m, 50), np.float32)
    for k in range(300):
        product = x[:, k, None].astype(np.float64) * weight[:, k].astype(np.float64)
        acc = (acc + (product if fused else product.astype(np.float32))).astype(np.float32)
    y = ops.linear(torch.from_numpy(weight))(torch.from_numpy(x))
    assert np.array_equal(y.numpy(), acc)


def test_rows_of_x_may_have_a_stride(ops: NativeOps) -> None:
    linear, x = ops.linear(torch.randn(33, 20)), torch.randn(17, 50)
    for m in (3, 17):
        assert same_bits(linear(x[:m, 10:30]), linear(x[:m, 10:30].contiguous()))


def test_no_rows_give_no_rows(ops: NativeOps) -> None:
    assert ops.linear(torch.randn(33, 20))(torch.empty(0, 20)).shape == (0, 33)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_read_the_stored_weight_back(
    pool: _core.ThreadPool, dtype: torch.dtype, source: torch.dtype
) -> None:
    weight = torch.randn(101, 37).to(source)
    ids = torch.tensor([100, 0, 31, 32, 32, 7])
    rows = NativeOps(pool, dtype).linear(weight).rows(ids)
    assert same_bits(rows, weight[ids].to(dtype).float())


def test_every_float16_is_widened_exactly(ops: NativeOps) -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    weight = bits[bits.isfinite()].reshape(1, -1)
    assert same_bits(ops.linear(weight).rows(torch.tensor([0])), weight.float())


def test_a_source_weight_may_have_a_row_stride(ops: NativeOps) -> None:
    weight = torch.randn(40, 64)
    ids = torch.arange(40)
    assert same_bits(ops.linear(weight[:, 8:40]).rows(ids), weight[:, 8:40].contiguous())
    assert same_bits(ops.linear(weight[:1].expand(40, 64)).rows(ids), weight[:1].expand(40, 64))


@pytest.mark.parametrize("bad", [-1, 101, 2**40])
def test_rows_name_an_id_outside_the_weight(ops: NativeOps, bad: int) -> None:
    linear = ops.linear(torch.randn(101, 8))
    with pytest.raises(IndexError, match=f"id {bad} is outside a table of 101 rows"):
        linear.rows(torch.tensor([0, bad]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_stacked_weights_equal_separate_ones(pool: _core.ThreadPool, dtype: torch.dtype) -> None:
    ops = NativeOps(pool, dtype)
    weights = [torch.randn(n, 40) for n in (36, 12, 13)]
    biases = [torch.randn(36), None, torch.randn(13)]
    stacked = ops.linear(weights, biases)
    separate = [ops.linear(w, b) for w, b in zip(weights, biases, strict=True)]
    for m in (1, 9):
        x = torch.randn(m, 40)
        assert same_bits(stacked(x), torch.cat([linear(x) for linear in separate], dim=1))


def test_the_packed_copy_is_as_large_as_its_elements(pool: _core.ThreadPool) -> None:
    weight = torch.randn(640, 100)
    assert NativeOps(pool).linear(weight).num_bytes == weight.nbytes
    assert NativeOps(pool, torch.bfloat16).linear(weight).num_bytes == weight.nbytes // 2


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        ([], None, "0 weights with 0 biases"),
        (torch.ones(4), None, r"\[n, k\] with one k, not \[4\]"),
        ([torch.ones(4, 3), torch.ones(4, 5)], None, r"one k, not \[4, 3\], \[4, 5\]"),
        (torch.ones(4, 3, dtype=torch.int32), None, "not torch.int32"),
        (torch.ones(4, 3), torch.ones(3), r"weight \[4, 3\] has shape \[3\]"),
        ([torch.ones(4, 3)] * 2, [torch.ones(4)], "2 weights with 1 biases"),
        (torch.ones(3, 4).T, None, "contiguous rows"),
        (torch.ones(0, 4), None, r"at least one row and one column, not \[0, 4\]"),
    ],
)
def test_a_weight_that_does_not_fit_is_refused(
    ops: NativeOps, weight: Tensor, bias: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ops.linear(weight, bias)


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 5),
        torch.ones(4),
        torch.ones(2, 4, dtype=torch.float64),
        torch.ones(4, 2).T,
        torch.ones(2, 4, device="meta"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(ops: NativeOps, x: Tensor) -> None:
    with pytest.raises(ValueError, match="x must be a float32 CPU tensor of 2 dimensions"):
        ops.linear(torch.ones(3, 4))(x)


def test_a_weight_type_that_cannot_be_stored_is_refused(pool: _core.ThreadPool) -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        NativeOps(pool, torch.float16)


# ---- row operations


@pytest.mark.parametrize("k", [1, 7, 64, 576, 1000])
def test_rms_norm(ops: NativeOps, exact: TorchOps, k: int) -> None:
    x, weight = torch.randn(9, k) * 3, torch.randn(k)
    torch.testing.assert_close(ops.rms_norm(x, weight, EPS), exact.rms_norm(x, weight, EPS))


def test_rms_norm_of_strided_heads(ops: NativeOps) -> None:
    qkv, weight = torch.randn(5, 320), torch.randn(32)
    heads = qkv[:, 64:192].view(5, 4, 32)
    expected = ops.rms_norm(heads.reshape(20, 32), weight, EPS).view(5, 4, 32)
    assert same_bits(ops.rms_norm(heads, weight, EPS), expected)


def test_add_rms_norm_updates_the_residual(ops: NativeOps) -> None:
    x, residual, weight = torch.randn(6, 50), torch.randn(6, 50), torch.randn(50)
    total = residual + x
    out = ops.add_rms_norm(x, residual, weight, EPS)
    assert same_bits(residual, total)
    assert same_bits(out, ops.rms_norm(total, weight, EPS))


@pytest.mark.parametrize("d", [2, 10, 64])
def test_rope_turns_the_heads_in_place(ops: NativeOps, exact: TorchOps, d: int) -> None:
    cos, sin = torch.randn(50, d // 2), torch.randn(50, d // 2)
    positions = torch.randint(0, 50, (7,))
    qkv = torch.randn(7, 6 * d)
    expected = qkv.clone()

    def heads(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, : 3 * d].view(7, 3, d), x[:, 3 * d : 5 * d].view(7, 2, d)

    ops.rope_(*heads(qkv), cos, sin, positions)
    exact.rope_(*heads(expected), cos, sin, positions)
    torch.testing.assert_close(qkv, expected)


def test_rope_keeps_the_length_of_every_pair(ops: NativeOps) -> None:
    # Not torch's cos: its first call in a process is, rarely, good to 12 bits only.
    angle = np.arange(100.0)[:, None] * np.linspace(0.01, 1, 32)
    cos, sin = (torch.from_numpy(f(angle)).float() for f in (np.cos, np.sin))
    q, k = torch.randn(4, 2, 64), torch.randn(4, 1, 64)
    before = q.clone(), k.clone()
    ops.rope_(q, k, cos, sin, torch.tensor([0, 3, 99, 50]))
    for was, now in zip(before, (q, k), strict=True):
        lengths = [x.unflatten(2, (2, 32)).norm(dim=2) for x in (was, now)]
        torch.testing.assert_close(*lengths)
        assert same_bits(now[0], was[0])


@pytest.mark.parametrize("bad", [-1, 50])
def test_rope_names_a_position_outside_its_table(ops: NativeOps, bad: int) -> None:
    q, table = torch.ones(2, 1, 4), torch.ones(50, 2)
    with pytest.raises(IndexError, match=f"position {bad} is outside the rotary table of 50"):
        ops.rope_(q, q.clone(), table, table, torch.tensor([0, bad]))
    assert torch.equal(q, torch.ones(2, 1, 4))


def test_silu_mul_is_accurate_over_its_whole_range(ops: NativeOps) -> None:
    gate = torch.linspace(-87, 88, 200_003)
    out = ops.silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0].double()
    expected = torch.nn.functional.silu(gate.double())
    error = (out - expected).abs() / expected.abs().clamp(min=1e-37)
    assert error.max() < 2e-7


def test_silu_mul_at_the_ends(ops: NativeOps) -> None:
    gate = torch.tensor([[200.0, -200.0, 0.0, float("inf"), float("nan")]])
    out = ops.silu_mul(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1))
    torch.testing.assert_close(
        out, torch.tensor([[400.0, 0.0, 0.0, float("inf"), float("nan")]]), equal_nan=True
    )


def test_silu_mul_has_one_arithmetic_at_every_width(ops: NativeOps) -> None:
    gate, up = torch.randn(70) * 5, torch.randn(70)
    wide = ops.silu_mul(torch.cat((gate, up))[None])
    for width in range(1, 70):
        narrow = ops.silu_mul(torch.cat((gate[:width], up[:width]))[None])
        assert same_bits(narrow, wide[:, :width]), width


def rope_rows(ops: NativeOps, x: Tensor) -> Tensor:
    q = x.clone().view(len(x), 3, 22)
    table = torch.linspace(0, 1, 11 * 11).view(11, 11)
    ops.rope_(q, q[:, :0], table, 1 - table, torch.arange(len(x)) * 0 + 7)
    return q.flatten(1)


@pytest.mark.parametrize(
    "op",
    [
        lambda ops, x: ops.rms_norm(x, torch.linspace(1, 2, 66), EPS),
        lambda ops, x: ops.add_rms_norm(x, x.flip(1), torch.linspace(1, 2, 66), EPS),
        lambda ops, x: ops.silu_mul(x),
        rope_rows,
    ],
    ids=["rms_norm", "add_rms_norm", "silu_mul", "rope_"],
)
def test_a_row_operation_has_the_same_bits_in_any_company(
    ops: NativeOps, op: Callable[[NativeOps, Tensor], Tensor]
) -> None:
    x = torch.randn(900, 66)
    alone = torch.cat([op(ops, row[None]) for row in x])
    single = NativeOps(_core.ThreadPool(1))
    for m in [*range(1, 71), 900]:
        first = int(torch.randint(0, 901 - m, ()))
        rows = slice(first, first + m)
        assert same_bits(op(ops, x[rows]), alone[rows]), m
        assert same_bits(op(single, x[rows]), alone[rows]), m


def test_row_operations_take_no_rows(ops: NativeOps) -> None:
    x, weight = torch.empty(0, 8), torch.ones(8)
    assert ops.rms_norm(x, weight, EPS).shape == (0, 8)
    assert ops.add_rms_norm(x, x.clone(), weight, EPS).shape == (0, 8)
    assert ops.silu_mul(x).shape == (0, 4)


def test_row_operations_refuse_what_does_not_fit(ops: NativeOps) -> None:
    x, weight = torch.ones(3, 8), torch.ones(8)
    with pytest.raises(ValueError, match="the last one 8 long"):
        ops.rms_norm(torch.ones(3, 7), weight, EPS)
    with pytest.raises(ValueError, match=r"weight must be .* torch.bfloat16 \[8\]"):
        ops.rms_norm(x, weight.bfloat16(), EPS)
    with pytest.raises(ValueError, match="x has 3 rows, the residual 2"):
        ops.add_rms_norm(x, torch.ones(2, 8), weight, EPS)
    with pytest.raises(ValueError, match="two halves, but has 7 columns"):
        ops.silu_mul(torch.ones(3, 7))


def test_rope_refuses_what_does_not_fit(ops: NativeOps) -> None:
    q, table, positions = torch.ones(2, 1, 8), torch.ones(9, 4), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"q must be .* the last one 6 long"):
        ops.rope_(q, q, table[:, :3].contiguous(), table, positions)
    with pytest.raises(ValueError, match="sin must be contiguous, like cos"):
        ops.rope_(q, q, table, torch.ones(8, 4), positions)
    with pytest.raises(ValueError, match="positions must be a contiguous int64"):
        ops.rope_(q, q, table, table, positions.int())
    with pytest.raises(ValueError, match="3 positions for 2 rows of q, 2 of k"):
        ops.rope_(q, q, table, table, torch.tensor([0, 1, 2]))


# ---- the same in plain torch


def test_torch_ops_keep_the_dtype_of_the_model() -> None:
    ops = TorchOps("cpu", torch.bfloat16)
    linear = ops.linear([torch.randn(8, 6), torch.randn(4, 6)], [torch.randn(8), None])
    x = torch.randn(3, 6).bfloat16()
    assert (linear.n, linear.k) == (12, 6)
    assert linear(x).dtype is torch.bfloat16
    assert linear.rows(torch.tensor([11])).shape == (1, 6)
    assert ops.silu_mul(linear(x)).dtype is torch.bfloat16
    assert ops.rms_norm(x, torch.ones(6), EPS).dtype is torch.bfloat16


def test_torch_ops_agree_with_the_native_ones(ops: NativeOps) -> None:
    reference = TorchOps("cpu", torch.float32)
    weight, bias, x = torch.randn(30, 40), torch.randn(30), torch.randn(5, 40)
    torch.testing.assert_close(
        ops.linear(weight, bias)(x), reference.linear(weight, bias)(x), rtol=1e-5, atol=1e-5
    )
    residual, other = torch.randn(5, 40), torch.empty(5, 40)
    other.copy_(residual)
    norm = torch.randn(40)
    torch.testing.assert_close(
        ops.add_rms_norm(x, residual, norm, EPS), reference.add_rms_norm(x, other, norm, EPS)
    )
    torch.testing.assert_close(residual, other)
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x))


# ---- every instruction set


@pytest.mark.skipif(_core.isa() == "base", reason="this CPU has no other instruction set")
@pytest.mark.parametrize("isa", ["base", "avx2"])
def test_narrower_instruction_sets_pass_the_same_tests(isa: str) -> None:
    if isa == _core.isa():
        pytest.skip("it is the one that the other tests run on")
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-k", "not instruction_sets", str(here)],
        env={**os.environ, "PREFIXKV_ISA": isa},
        cwd=here.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
