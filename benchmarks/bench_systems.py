"""The cache systems side by side on the same work, alternately in one run: no model, no K/V.

    python benchmarks/bench_systems.py [--trace FILE] [--requests N] [--pool TOKENS] [--rounds N]

Without a trace, prompts are made up (request_traces.made_up). Traces are read where they lie:
Mooncake (`.jsonl.gz` with `hash_ids`), kv-cache-tester (with `req`) and text sessions (`.tar.gz`).
Each section takes the systems in turn, round after round, and prints medians over the rounds of the
calling thread's CPU time. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from prefixkv.cache import BlockTable, CacheManager, make_cache
from request_traces import Tokens, common_prefix, made_up, read_trace

SYSTEMS = ("hash", "radix", "paged", "off")
IN_FLIGHT = 8

Row = tuple[str, ...]


def spent() -> float:
    """CPU seconds of this thread."""
    return time.thread_time()


def show(title: str, header: Row, rows: Sequence[Row]) -> None:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}\n")
    for row in (header, tuple("-" * (width - 1) + ":" for width in widths), *rows):
        print(
            "| "
            + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            + " |"
        )


def medians(
    measures: Mapping[str, Callable[[], list[float]]], rounds: int
) -> dict[str, list[float]]:
    """Each measure once a round, in turn; for each its medians."""
    taken: dict[str, list[list[float]]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            taken[name].append(measure())
    return {
        name: [statistics.median(c) for c in zip(*runs, strict=True)]
        for name, runs in taken.items()
    }


# ---- a trace through a pool ----


def admit(cache: CacheManager, prompt: Tokens, running: deque[BlockTable]) -> int:
    """One request, which stays while fewer than IN_FLIGHT come after it; its hit tokens."""
    seq = cache.sequence(prompt)
    hit = cache.lookup(seq)
    table = cache.table()
    while cache.allocate(table, seq.num_tokens, hit) is None:
        cache.free(running.popleft())
    cache.commit(table, seq, seq.num_tokens)
    running.append(table)
    if len(running) == IN_FLIGHT:
        cache.free(running.popleft())
    return hit.num_tokens


def replay(
    system: str, block_size: int, pool: int, prompts: list[Tokens], known: Tokens
) -> list[float]:
    """Hit tokens of all prompt tokens in percent, and microseconds a request."""
    cache = make_cache(system, num_blocks=pool // block_size, block_size=block_size)
    if system == "paged" and len(known):
        reserve(cache, known)
    running: deque[BlockTable] = deque()
    start = spent()
    hits = sum(admit(cache, prompt, running) for prompt in prompts)
    took = spent() - start
    return [100 * hits / sum(map(len, prompts)), 1e6 * took / len(prompts)]


def reserve(cache: CacheManager, tokens: Tokens) -> None:
    seq, table = cache.sequence(tokens), cache.table()
    cache.allocate(table, len(tokens))
    cache.commit(table, seq, len(tokens))
    cache.reserve(table, len(tokens))
    cache.free(table)


def hit_rates(prompts: list[Tokens], pools: list[int], rounds: int) -> None:
    known = common_prefix(prompts)
    fits = [max(pool, 2 * max(map(len, prompts))) for pool in pools]
    sides = [(s, b) for b in (16, 1) for s in SYSTEMS if b == 16 or s in ("hash", "radix")]
    rows = []
    for pool in dict.fromkeys(fits):
        measures = {
            f"{system} {block_size}": partial(replay, system, block_size, pool, prompts, known)
            for system, block_size in sides
        }
        figures = medians(measures, rounds)
        rows += [
            (
                f"{pool:,}",
                *name.split(),
                f"{hit:.2f} %",
                f"{each:.1f}",
                f"{each / figures['off 16'][1]:.1f}x",
            )
            for name, (hit, each) in figures.items()
        ]
    title = (
        f"Hit rate in the same pool: {len(prompts):,} prompts of {sum(map(len, prompts)):,} "
        f"tokens, {IN_FLIGHT} in flight; paged has {len(known):,} common tokens reserved"
    )
    show(title, ("pool, tokens", "system", "block", "hit", "µs a request", "of off"), rows)


# ---- a request, a step ----


def serve(cache: CacheManager, prompts: Sequence[Tokens]) -> float:
    """Microseconds of a request: sequence, lookup, allocate, commit, free."""
    start = spent()
    for prompt in prompts:
        seq = cache.sequence(prompt)
        table = cache.table()
        cache.allocate(table, len(prompt), cache.lookup(seq))
        cache.commit(table, seq, len(prompt))
        cache.free(table)
    return 1e6 * (spent() - start) / len(prompts)


def random_prompts(count: int, length: int, seed: int) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50_000, length).astype(np.int32) for _ in range(count)]


def request_costs(length: int, rounds: int, scale: float) -> None:
    count = max(4, int(scale * 2**20) // length)
    first, second = (random_prompts(count, length, seed) for seed in (1, 2))

    def measure(system: str) -> list[float]:
        cache = make_cache(system, num_blocks=count * length // 16)
        return [serve(cache, first), serve(cache, first), serve(cache, second)]

    figures = medians({system: partial(measure, system) for system in SYSTEMS}, rounds)
    rows = [(system, *(f"{each:.2f}" for each in figures[system])) for system in SYSTEMS]
    header = ("system", "never seen", "all cached", "never seen, full pool")
    show(
        f"µs a request of {length:,} tokens, block 16, {count:,} requests one after another",
        header,
        rows,
    )


def decode_costs(batch: int, rounds: int, steps: int) -> None:
    def measure(system: str) -> list[float]:
        cache = make_cache(system, num_blocks=batch * (1024 + 4 * steps) // 16)
        seqs = [cache.sequence(prompt) for prompt in random_prompts(batch, 1024, 3)]
        tables = [cache.table() for _ in seqs]
        cache.allocate_many(tables, [1024] * batch)
        for table, seq in zip(tables, seqs, strict=True):
            cache.commit(table, seq, 1024)
        tokens = np.arange(batch, dtype=np.int32)
        start = spent()
        for length in range(1025, 1025 + steps):
            cache.allocate_many(tables, [length] * batch)
            cache.commit_many(tables, seqs, tokens)
        many = spent() - start
        start = spent()
        for length in range(1025 + steps, 1025 + 2 * steps):
            for table, seq, token in zip(tables, seqs, tokens.tolist(), strict=True):
                cache.allocate(table, length)
                seq.append([token])
                cache.commit(table, seq, length)
        return [1e6 * many / steps, 1e6 * (spent() - start) / steps]

    figures = medians({system: partial(measure, system) for system in SYSTEMS}, rounds)
    rows = [
        (s, f"{many:.1f}", f"{each:.1f}", f"{each / many:.1f}x")
        for s, (many, each) in figures.items()
    ]
    header = ("system", "allocate_many, commit_many", "one call each", "ratio")
    show(f"µs a decode step of {batch} sequences of 1,024 tokens and more, block 16", header, rows)


def eviction_costs(rounds: int, sizes: Sequence[int]) -> None:
    """Each prompt of 64 tokens is a leaf of its own and, in a full pool, evicts another."""
    systems = ("hash", "radix")
    full = {}
    for size in sizes:
        prompts = random_prompts(size, 64, 4)
        for system in systems:
            full[system, size] = make_cache(system, num_blocks=4 * size)
            serve(full[system, size], prompts)
    seeds = itertools.count(5)

    def measure(system: str) -> list[float]:
        new = random_prompts(1000, 64, next(seeds))
        return [serve(full[system, size], new) for size in sizes]

    figures = medians({system: partial(measure, system) for system in systems}, rounds)
    rows = [
        (system, *(f"{each:.2f}" for each in times), f"{times[-1] / times[0]:.1f}x")
        for system, times in figures.items()
    ]
    header = ("system", *(f"{size:,} prompts cached" for size in sizes), "ratio")
    show("µs a request of 64 new tokens that evicts 4 blocks, block 16", header, rows)


# ---- what needs no clock ----


def duplicates(count: int, length: int) -> None:
    """Equal prompts that all start before the first of them has committed anything."""
    rows = []
    for system in SYSTEMS:
        cache = make_cache(system, num_blocks=2 * count * (length // 16 + 1))
        prompt = random_prompts(1, length, 6)[0]
        seqs = [cache.sequence(prompt) for _ in range(count)]
        tables = [cache.table() for _ in seqs]
        for table, seq in zip(tables, seqs, strict=True):
            cache.allocate(table, length, cache.lookup(seq))
        before = cache.num_blocks - cache.num_free_blocks
        for table, seq in zip(tables, seqs, strict=True):
            cache.commit(table, seq, length)
        held = cache.num_blocks - cache.num_free_blocks
        for table in tables:
            cache.free(table)
        kept = sum(cache.block(i).is_cached for i in range(cache.num_blocks))
        rows.append((system, f"{before:,}", f"{held:,}", f"{kept:,}"))
    header = ("system", "held before commit", "held after", "cached when all ended")
    show(f"Blocks of {count} equal prompts of {length:,} tokens at once, block 16", header, rows)


def shared_hits() -> None:
    """A prompt of 14 tokens shares 10 with one that ran before."""
    ran = list(range(14))
    later = [*range(10), 90, 91, 92, 93]
    rows = []
    for system in SYSTEMS:
        hits = []
        for block_size in (1, 2, 4, 16):
            cache = make_cache(system, num_blocks=64, block_size=block_size)
            if system == "paged":
                reserve(cache, np.asarray(ran[:10], dtype=np.int32))
            else:
                serve(cache, [np.asarray(ran, dtype=np.int32)])
            hits.append(str(cache.lookup(cache.sequence(later)).num_tokens))
        rows.append((system, *hits))
    header = ("system", "block 1", "block 2", "block 4", "block 16")
    show("Tokens hit of 10 that are shared, of 14; paged has the 10 reserved", header, rows)


MEASURE_MEMORY = """
import resource, sys
import numpy as np
from prefixkv.cache import make_cache

def used():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

system, block_size, num_blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(0)
def fill(cache):
    for _ in range(2 * cache.num_blocks * block_size // 1024):
        seq, table = cache.sequence(rng.integers(0, 50_000, 1024, np.int32)), cache.table()
        cache.allocate(table, 1024)
        cache.commit(table, seq, 1024)
        cache.free(table)
fill(make_cache(system, num_blocks=1024, block_size=block_size))
before = used()
cache = make_cache(system, num_blocks=num_blocks, block_size=block_size)
fill(cache)
print((used() - before) / num_blocks)
"""


def memory(num_blocks: int) -> None:
    sizes = (1, 4, 16, 64)
    rows = []
    for system in SYSTEMS:
        cells = []
        for block_size in sizes:
            command = [
                sys.executable,
                "-c",
                MEASURE_MEMORY,
                system,
                str(block_size),
                str(num_blocks),
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            cells.append(f"{float(done.stdout):.0f}")
        rows.append((system, *cells))
    show(
        f"Bytes a block: {num_blocks:,} blocks, each used twice, prompts that share nothing",
        ("system", *(f"block {size}" for size in sizes)),
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="only replay this trace")
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="of the trace")
    parser.add_argument("--pool", type=int, action="append", metavar="TOKENS", help="repeatable")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--scale", type=float, default=1.0, help="less work, for a quick look")
    args = parser.parse_args(arguments)
    print(
        f"{platform.machine()}, Python {platform.python_version()}; medians of {args.rounds} rounds"
    )
    prompts = read_trace(args.trace, args.requests) if args.trace else made_up(args.requests)
    hit_rates(prompts, args.pool or [2**15, 2**17, 2**19], args.rounds)
    if args.trace:
        return
    shared_hits()
    duplicates(8, 1000)
    for length in (512, 8192):
        request_costs(length, args.rounds, args.scale)
    decode_costs(64, args.rounds, max(16, int(512 * args.scale)))
    eviction_costs(args.rounds, (2000, max(2000, int(130_000 * args.scale))))
    if sys.platform == "linux":
        memory(max(1024, int(2**17 * args.scale)))


if __name__ == "__main__":
    main()
