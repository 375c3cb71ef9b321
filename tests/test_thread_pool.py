"""The thread pool under many short jobs of different sizes, with more threads than cores."""

from __future__ import annotations

import subprocess
import sys

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


def test_threads_that_the_system_refuses_are_an_error_and_no_abort() -> None:
    code = """
import resource
from prefixkv._core import ThreadPool
from prefixkv.errors import ConfigError
resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
try:
    ThreadPool(5000)
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "threads is 5000" in done.stdout) == (0, True), done.stderr
