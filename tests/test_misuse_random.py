"""Wrong calls without end on managers in every state: each raises, and none leaves a trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from lockstep import LockStep, Setting
from managers import HASH, PAGED, RADIX, state
from misuse import MISUSES
from prefixkv.errors import CacheError

SYSTEMS = {"hash": HASH["xxh3"], "radix": RADIX["radix"], "paged": PAGED["paged"]}
MISUSES_A_STATE = 250  # between two of which the managers go on with their work


def abuse(step: LockStep, rng: random.Random, count: int) -> int:
    """How many were tried: none when there is nothing to misuse."""
    (world,) = step.worlds
    world.running = [(request.table, request.seqs[0]) for request in step.running]
    if not world.running:
        return 0
    before = state(world.cache), step.watch.visible(0, step.running)
    for _ in range(count):
        misuse = rng.choice(MISUSES)
        try:
            misuse(world, rng)
        except CacheError:
            continue
        pytest.fail(f"{misuse.__name__} is not refused")
    assert (state(world.cache), step.watch.visible(0, step.running)) == before
    world.running = []
    return count


def abuse_in_many_states(system: str, count: int) -> None:
    rng = random.Random(system)
    done = seed = 0
    while done < count:
        step = LockStep([SYSTEMS[system]], Setting.of(seed), seed)
        for _ in range(20):
            step.run(10)
            done += abuse(step, rng, MISUSES_A_STATE)
        step.cache.check()
        seed += 1


@pytest.mark.parametrize("system", SYSTEMS)
def test_misuse_leaves_no_trace(system: str) -> None:
    abuse_in_many_states(system, 17_000)


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_million_misuses_leave_no_trace(system: str) -> None:
    abuse_in_many_states(system, 340_000)


# What has no place there at all: not even a number, or none that a machine has.
WRONG_TYPES: dict[str, Callable[[Any, Any, Any], object]] = {
    "no table": lambda cache, _, seq: cache.commit(None, seq, 0),
    "no sequence": lambda cache, table, _: cache.commit(table, None, 0),
    "a sequence for a table": lambda cache, _, seq: cache.allocate(seq, 4),
    "a table for a hit": lambda cache, table, _: cache.allocate(table, 4, table),
    "a name for a number": lambda cache, table, _: cache.allocate(table, "4"),
    "half a token": lambda cache, table, _: cache.allocate(table, 4.5),
    "a huge number": lambda cache, table, _: cache.allocate(table, 2**70),
    "a number for a name": lambda cache, *_: cache.table(owner=3),
    "a list for a salt": lambda cache, *_: cache.sequence([1], cache_salt=["s"]),
    "no block": lambda cache, *_: cache.block(None),
    "no pin": lambda cache, *_: cache.release(None),
    "a table for a pin": lambda cache, table, _: cache.release(table),
    "no tables": lambda cache, *_: cache.allocate_many(None, [1]),
    "a hole in the tables": lambda cache, table, _: cache.allocate_many([table, None], [4, 4]),
    "names for numbers": lambda cache, table, _: cache.allocate_many([table], ["4"]),
    "no tokens": lambda cache, table, seq: cache.commit_many([table], [seq], None),
    "a hole in the tokens": lambda cache, table, seq: cache.commit_many([table], [seq], [None]),
    "text for tokens": lambda cache, *_: cache.sequence("text"),
    "an extra without content": lambda cache, *_: cache.sequence([1], extra=[(0, 1)]),
}


@pytest.mark.parametrize("wrong", WRONG_TYPES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_wrong_type_is_refused(system: str, wrong: str) -> None:
    cache = SYSTEMS[system](num_blocks=4, block_size=4)
    table, seq = cache.table(), cache.sequence([1, 2])
    before = state(cache)
    with pytest.raises((CacheError, TypeError)):
        WRONG_TYPES[wrong](cache, table, seq)
    assert state(cache) == before
    cache.check()


@pytest.mark.parametrize("num_tokens", [2**31, 2**40, 2**62, 2**63 - 1])
@pytest.mark.parametrize("system", SYSTEMS)
def test_room_beyond_all_reason_is_refused(system: str, num_tokens: int) -> None:
    cache = SYSTEMS[system](num_blocks=4, block_size=4)
    before = state(cache)
    assert cache.allocate(cache.table(), num_tokens) is None
    assert cache.allocate_many([cache.table()], [num_tokens]) == [None]
    assert state(cache) == before
