"""A request's bookkeeping: ours through its public calls, and the plain Python twin of the tests.

    python benchmarks/bench_manager.py [--rounds N] [--scale X] [--json FILE]

Of each request: sequence, lookup, table, allocate, commit, free. `cold`: never seen, in a pool with
room; `hit`: all cached; `evict`: never seen, in a full pool. Sides alternate, round after round, on
the calling thread's CPU time; figures are medians in microseconds a request, ratios those of the
medians. Prompts share nothing. The twin gets lists, its fastest input.

`sha256_cbor` is compared with what SHA-256 alone takes (hashlib, which uses the CPU's instructions
for it where there are some) for as many bytes, in one piece.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench_engine import cpu_model, positive
from bench_systems import random_prompts, serve, show, spent
from prefixkv.cache import make_cache
from request_traces import Tokens

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from reference import ReferenceManager

# Tokens of a prompt, and how many prompts: within an L2 cache of 1 MiB, hashes and all.
WITHIN_L2 = {512: 100, 8192: 8, 100_000: 1}
BEYOND_L2 = {512: 4000, 8192: 250, 100_000: 20}
CASES = ("cold", "hit", "evict")

Measure = Callable[[], list[float]]


def request_costs(
    make: Callable[..., Any], first: Sequence[Any], second: Sequence[Any], block_size: int
) -> list[float]:
    """Microseconds a request of each case, from a fresh cache that holds ``first`` exactly."""
    cache = make(num_blocks=sum(-(-len(prompt) // block_size) for prompt in first))
    return [serve(cache, first), serve(cache, first), serve(cache, second)]


def medians(sides: Mapping[str, Measure], rounds: int) -> dict[str, list[float]]:
    """Each side once a round, in turn; what goes first changes."""
    taken: dict[str, list[list[float]]] = {name: [] for name in sides}
    for round_ in range(rounds):
        names = list(sides)
        for name in names if round_ % 2 == 0 else reversed(names):
            taken[name].append(sides[name]())
    return {
        name: [statistics.median(case) for case in zip(*runs, strict=True)]
        for name, runs in taken.items()
    }


def against_the_twin(
    counts: Mapping[int, int], block_size: int, rounds: int
) -> list[dict[str, Any]]:
    results = []
    for length, count in counts.items():
        arrays, lists = prompts_of(count, length)
        make = partial(make_cache, "hash", block_size=block_size)
        sides = {
            "NumPy": partial(request_costs, make, *arrays, block_size),
            "list": partial(request_costs, make, *lists, block_size),
            "twin": partial(
                request_costs, partial(ReferenceManager, block_size=block_size), *lists, block_size
            ),
        }
        results.append({"length": length, "sides": medians(sides, rounds)})
    return results


def prompts_of(count: int, length: int) -> tuple[list[list[Tokens]], list[list[list[int]]]]:
    """Two sets of prompts, as arrays and as lists."""
    arrays = [random_prompts(count, length, seed) for seed in (1, 2)]
    return arrays, [[prompt.tolist() for prompt in prompts] for prompts in arrays]


def against_sha256(counts: Mapping[int, int], rounds: int) -> list[dict[str, Any]]:
    results = []
    for length, count in counts.items():
        arrays, _ = prompts_of(count, length)
        make = partial(make_cache, "hash", block_size=16, hash_algorithm="sha256_cbor")
        sides = {
            "ours": partial(request_costs, make, *arrays, 16),
            "SHA-256": partial(sha256_costs, count, length),
        }
        results.append({"length": length, "sides": medians(sides, rounds)})
    return results


def sha256_costs(count: int, length: int) -> list[float]:
    """A block of 16 tokens is a message of 86 to 119 bytes, which is two blocks of SHA-256."""
    data = bytes(128 * (length // 16))
    start = spent()
    for _ in range(count):
        hashlib.sha256(data).digest()
    return [1e6 * (spent() - start) / count] * len(CASES)


def rows_of(results: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Costs, and of the last side's costs how many times those of each."""
    rows = []
    for result in results:
        *_, base = result["sides"].values()
        for name, costs in result["sides"].items():
            cells = [f"{cost:,.2f}" for cost in costs]
            ratios = [f"{plain / cost:.2f}x" for cost, plain in zip(costs, base, strict=True)]
            rows.append((f"{result['length']:,}", name, *cells, *ratios))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=positive(int), default=9)
    parser.add_argument("--scale", type=positive(float), default=1.0, help="of every count")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    args = parser.parse_args(arguments)
    print(f"{cpu_model()}; numpy {np.__version__}; medians of {args.rounds} rounds")
    within, beyond = (
        {length: max(1, round(count * args.scale)) for length, count in counts.items()}
        for counts in (WITHIN_L2, BEYOND_L2)
    )
    tables = {
        "xxh3, block 16, within L2": partial(against_the_twin, within, 16),
        "xxh3, block 16, beyond L2": partial(against_the_twin, beyond, 16),
        "xxh3, block 64, within L2": partial(against_the_twin, within, 64),
        "sha256_cbor, block 16, within L2": partial(against_sha256, within),
    }
    written = {}
    for title, measure in tables.items():
        written[title] = measure(args.rounds)
        base = "SHA-256" if title.startswith("sha") else "twin"
        header = ("tokens", "side", *CASES, *(f"{base} / {case}" for case in CASES))
        show(f"µs a request, {title}", header, rows_of(written[title]))
        sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
