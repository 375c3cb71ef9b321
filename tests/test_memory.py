"""What a block and a token cost in memory, measured on the whole process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NUM_BLOCKS = 2**18
STATM = Path("/proc/self/statm")
pytestmark = pytest.mark.skipif(
    not STATM.exists(), reason="this system does not tell how much memory a process has"
)

MEASURE = """
import gc, resource
import numpy as np
import prefixkv.cache as pk

def used():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

def tokens(count):
    return rng.integers(0, 50_000, count, np.int32)

rng = np.random.default_rng(0)
tokens(1000).tolist()
"""
FILL_A_MANAGER = """
def fill(cache, length):
    for _ in range(2 * cache.num_blocks * cache.block_size // length):  # each block twice
        seq, table = cache.sequence(tokens(length)), cache.table()
        cache.allocate(table, length)
        cache.commit(table, seq, length)
        cache.free(table)

fill(pk.make_cache({system!r}, num_blocks=64, block_size={block_size}), 64)
before = used()
cache = pk.make_cache({system!r}, num_blocks={num_blocks}, block_size={block_size})
fill(cache, 1024)
assert cache.block(0).is_cached and cache.block({num_blocks} - 1).is_cached
print(used() - before)
"""
FILL_A_TREE = """
pk.RadixTree(16).insert(tokens(64), tokens(64))
before = used()
tree = pk.RadixTree(16)
for start in range(0, {count} * {length}, {length}):
    tree.insert(tokens({length}), np.arange(start, start + {length}, dtype=np.int32))
assert tree.evictable_size == {count} * {length}
print(used() - before)
"""


def num_bytes(script: str) -> int:
    command = [sys.executable, "-c", MEASURE + script]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_a_block_of_hash(block_size: int) -> None:
    script = FILL_A_MANAGER.format(system="hash", num_blocks=NUM_BLOCKS, block_size=block_size)
    assert num_bytes(script) / NUM_BLOCKS <= 96 + 4 * block_size


def test_a_token_of_radix() -> None:
    script = FILL_A_MANAGER.format(system="radix", num_blocks=NUM_BLOCKS, block_size=16)
    assert num_bytes(script) / (16 * NUM_BLOCKS) <= 16


@pytest.mark.parametrize("length", [64, 256])
def test_a_token_of_the_tree(length: int) -> None:
    """100,000 sequences that share nothing."""
    script = FILL_A_TREE.format(count=100_000, length=length)
    assert num_bytes(script) / (100_000 * length) <= 16
