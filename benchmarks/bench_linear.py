"""The native matrix product against torch's, alternately in one run.

    python benchmarks/bench_linear.py [--dtype float32] [--threads 2] [--rows 1 8 16 64 256 512]

The shapes are the four linear layers of SmolLM2-135M and its head. Each call takes the weights of
the next of 30 layers, as a forward pass does, so that they come from memory and not from a cache;
the head has one copy. Times are medians; a ratio above 1 means that ours is the faster.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixkv import _core
from prefixkv.model.ops import NativeOps

LAYERS = 30
SHAPES = {"qkv": (960, 576), "out": (576, 576), "gate/up": (3072, 576), "down": (576, 1536)}
HEAD = (49152, 576)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(sides: list[Callable[[], object]], seconds: float) -> list[float]:
    """Median time of each side over turns that take about so long in all."""
    times: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for side, taken in zip(sides, times, strict=True):
            taken.append(timed(side))
    return [statistics.median(taken) for taken in times]


def compare(
    ops: NativeOps, dtype: torch.dtype, shape: tuple[int, int], layers: int, rows: list[int]
) -> None:
    n, k = shape
    weights: list[Tensor] = [torch.randn(n, k).to(dtype) for _ in range(layers)]
    packed = [ops.linear(weight) for weight in weights]
    for m in rows:
        x = torch.randn(m, k)
        narrow = x.to(dtype)

        def ours(x: Tensor = x) -> None:
            for linear in packed:
                linear(x)

        def torchs(x: Tensor = narrow) -> None:
            for weight in weights:
                F.linear(x, weight)

        mine, other = (each / layers for each in alternate([ours, torchs], seconds=1.0))
        flop, read = 2 * m * n * k, n * k * dtype.itemsize
        print(
            f"{m:6} {mine * 1e6:10.1f} {other * 1e6:10.1f} "
            f"{flop / mine / 1e9:9.1f} {flop / other / 1e9:9.1f} "
            f"{read / mine / 1e9:8.1f} {read / other / 1e9:8.1f} {other / mine:7.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 256, 512])
    parser.add_argument("--shapes", choices=[*SHAPES, "head"], nargs="+", default=[*SHAPES, "head"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pool = _core.ThreadPool(args.threads)
    print(f"{_core.isa()}, {args.threads} threads; ours and torch in one run")
    for name in args.dtype or ["float32", "bfloat16"]:
        dtype = getattr(torch, name)
        ops = NativeOps(pool, dtype)
        for shape in args.shapes:
            n, k = SHAPES.get(shape, HEAD)
            print(f"\n{name} {shape} [{n}, {k}]")
            print("  rows         µs      torch   GFLOP/s     torch     GB/s    torch   ratio")
            rows = [m for m in args.rows if m <= 8] if shape == "head" else args.rows
            compare(ops, dtype, (n, k), 1 if shape == "head" else LAYERS, rows)


if __name__ == "__main__":
    main()
