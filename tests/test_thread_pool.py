"""The thread pool under many short jobs of different sizes, with more threads than cores."""

from __future__ import annotations

import torch

from prefixkv import _core
from prefixkv.model.ops import NativeOps


def test_short_jobs_of_changing_size_run_each_task_once() -> None:
    ops = NativeOps(_core.ThreadPool(6))
    torch.manual_seed(0)
    narrow, wide = ops.linear(torch.randn(64, 32)), ops.linear(torch.randn(2048, 32))
    small, large = torch.randn(1, 32), torch.randn(40, 32)
    expected = [(layer, x, layer(x)) for layer in (narrow, wide) for x in (small, large)]
    for _ in range(2_000):
        for layer, x, y in expected:
            assert layer(x).equal(y)
