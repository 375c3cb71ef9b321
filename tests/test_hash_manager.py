"""The `hash` manager by example: exact block ids, hits and counts. Native and twin alike."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from managers import HASH, Make, admit, fill, found, shape, state
from prefixkv.cache import make_cache


@pytest.fixture(params=HASH)
def make(request: pytest.FixtureRequest) -> Make:
    return HASH[request.param]


# ------------------------------------------------------------------------------------------- order


def test_a_fresh_queue_is_in_order(make: Make) -> None:
    assert make(num_blocks=5, block_size=4).free_blocks() == [0, 1, 2, 3, 4]


def test_10_shared_tokens_are_8_hit_and_6_computed(make: Make) -> None:
    cache = make(num_blocks=16, block_size=4)
    fill(cache, range(16))
    seq = cache.sequence([*range(10), 90, 91, 92, 93])
    hit = cache.lookup(seq)
    assert (hit.num_tokens, hit.blocks) == (8, [0, 1])
    table = cache.table()
    grant = cache.allocate(table, 14, hit)
    assert (grant.new_blocks, grant.copies) == ([4, 5], [])
    assert shape(table) == ([0, 1, 4, 5], 14, 8)


def test_golden_order_of_the_free_queue(make: Make) -> None:
    cache = make(num_blocks=10, block_size=16)
    first = fill(cache, range(55))
    second_seq = cache.sequence([*range(48), *range(900, 907)])
    second = admit(cache, second_seq)
    assert first.blocks == [0, 1, 2, 3]
    assert second.blocks == [0, 1, 2, 4]
    cache.free(first)
    assert cache.free_blocks() == [3, 5, 6, 7, 8, 9]
    cache.free(second)
    assert cache.free_blocks() == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]


def test_blank_blocks_of_a_table_go_to_the_front_as_one_run(make: Make) -> None:
    cache = make(num_blocks=10, block_size=4)
    cache.free(fill(cache, range(20)))  # 4, 3, 2, 1, 0 at the back
    table = cache.table()
    assert cache.allocate(table, 12).new_blocks == [5, 6, 7]
    cache.free(table)
    assert cache.free_blocks() == [7, 6, 5, 8, 9, 4, 3, 2, 1, 0]


def test_the_deepest_block_of_a_prefix_is_evicted_first(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    cache.free(fill(cache, range(16)))
    assert cache.allocate(cache.table(), 4) is not None
    assert found(cache, [*range(16), 99]) == [0, 1, 2]


def test_a_hit_saves_its_blocks_from_their_own_allocation(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    cache.free(fill(cache, range(16)))  # the queue is 3, 2, 1, 0
    seq = cache.sequence([*range(12), *range(50, 54)])
    table = admit(cache, seq)
    assert table.blocks == [0, 1, 2, 3]
    assert cache.num_free_blocks == 0


def test_reuse_moves_a_block_behind_those_not_used(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    cache.free(fill(cache, [1] * 4))
    cache.free(fill(cache, [2] * 4))
    cache.free(admit(cache, cache.sequence([1] * 5), 4))
    assert cache.free_blocks() == [2, 3, 1, 0]


def test_growing_takes_a_block_only_past_a_block_boundary(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    table = cache.table()
    taken = [cache.allocate(table, n).new_blocks for n in (3, 4, 5, 8, 13)]
    assert taken == [[0], [], [1], [], [2, 3]]


# -------------------------------------------------------------------------------------------- hits


def test_an_empty_sequence_hits_nothing(make: Make) -> None:
    cache = make(num_blocks=2, block_size=4)
    assert cache.lookup(cache.sequence([])).blocks == []


def test_a_partial_block_is_found_once_it_is_full(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    seq = cache.sequence(range(6))
    table = admit(cache, seq)
    cache.commit(table, seq, 6)
    assert not cache.block(1).is_cached
    seq.append([6, 7])
    assert cache.allocate(table, 8).new_blocks == []
    cache.commit(table, seq, 8)
    assert found(cache, range(9)) == [0, 1]


def test_of_equal_blocks_the_one_cached_first_serves_while_it_lives(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    seqs = [cache.sequence([7] * 4) for _ in range(3)]
    tables = [admit(cache, seq) for seq in seqs]
    for i in (1, 0, 2):
        cache.commit(tables[i], seqs[i], 4)
    served = [found(cache, [7] * 5)]
    for i in (1, 0, 2):
        cache.free(tables[i])
    held = cache.table()
    for room in (4, 8, 12, 16):  # takes the blank block 3, then evicts 1, 0 and 2
        cache.allocate(held, room)
        served.append(found(cache, [7] * 5))
    assert served == [[1], [1], [0], [2], []]


def test_groups_do_not_find_each_other(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4, num_groups=2)
    fill(cache, range(8), group=0)
    assert found(cache, range(9), group=1) == []
    fill(cache, range(8), group=1)
    assert found(cache, range(9), group=0) == [0, 1]
    assert found(cache, range(9), group=1) == [2, 3]


NAMESPACES: list[dict[str, Any]] = [
    {},
    {"cache_salt": "x"},
    {"cache_salt": "y"},
    {"lora": "x"},
    {"lora": "x", "cache_salt": "x"},
    {"extra": [(1, 2, b"x")]},
    {"extra": [(1, 2, b"y")]},
    {"extra": [(0, 2, b"x")]},
]


def test_namespaces_do_not_find_each_other(make: Make) -> None:
    cache = make(num_blocks=64, block_size=4)
    tables = [fill(cache, range(8), **namespace) for namespace in NAMESPACES]
    hits = [found(cache, range(9), **namespace) for namespace in NAMESPACES]
    assert hits == [table.blocks for table in tables]
    assert len({block for hit in hits for block in hit}) == 2 * len(NAMESPACES)


def test_a_colliding_hash_serves_nobody_elses_block() -> None:
    cache = HASH["colliding"](num_blocks=8, block_size=2)
    fill(cache, [1, 2, 3, 4])
    assert cache.block(0).block_hash == cache.block(1).block_hash
    assert found(cache, [1, 2, 3, 4, 5]) == [0, 1]
    for other in ([2, 1, 3], [3, 4, 1, 2, 5], [1, 3, 3, 4, 5]):
        assert found(cache, other) == []
    assert found(cache, [1, 2, 4, 3, 5]) == [0]
    assert found(cache, [1, 2, 3, 4, 5], cache_salt="s") == []


# --------------------------------------------------------------------------------- counts, refusals


def test_reference_counts_follow_the_tables(make: Make) -> None:
    cache = make(num_blocks=6, block_size=4)
    counts = []

    def note() -> None:
        counts.append([cache.block(i).ref_cnt for i in range(4)])

    first = fill(cache, range(12))
    note()
    second = fill(cache, [*range(8), 50])
    note()
    cache.free(first)
    note()
    cache.free(second)
    note()
    assert counts == [[1, 1, 1, 0], [2, 2, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]]


def test_a_block_is_owned_by_the_table_that_took_it_last(make: Make) -> None:
    cache = make(num_blocks=3, block_size=4)
    seq = cache.sequence(range(5))
    table = cache.table(owner="a")
    cache.allocate(table, 5)
    cache.commit(table, seq, 5)
    guest = cache.table(owner="b")
    cache.allocate(guest, 5, cache.lookup(seq))
    assert [cache.block(i).owner for i in range(3)] == ["a", "a", "b"]


def test_a_refusal_leaves_no_trace(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    cache.free(fill(cache, range(8)))
    held = cache.table()
    cache.allocate(held, 4)
    table, seq = cache.table(), cache.sequence(range(17))
    hit = cache.lookup(seq)
    before = state(cache), shape(table)
    assert cache.allocate(table, 17, hit) is None
    assert (state(cache), shape(table)) == before
    assert cache.allocate(table, 12, hit).new_blocks == [3]


def test_a_refused_growth_keeps_the_table(make: Make) -> None:
    cache = make(num_blocks=2, block_size=4)
    table = fill(cache, range(6))
    assert cache.allocate(table, 9) is None
    assert shape(table) == ([0, 1], 6, 6)


def test_reset_waits_for_every_holder(make: Make) -> None:
    cache = make(num_blocks=5, block_size=4)
    table = fill(cache, range(8))
    before = state(cache)
    assert cache.reset() is False
    assert state(cache) == before
    cache.free(table)
    assert cache.reset() is True
    assert cache.free_blocks() == [2, 3, 4, 1, 0]
    assert not any(cache.block(i).is_cached for i in range(5))
    assert found(cache, range(9)) == []


def test_a_dropped_table_gives_its_blocks_back(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    table = fill(cache, range(10))
    assert cache.free_blocks() == [3]
    del table
    gc.collect()
    assert cache.free_blocks() == [2, 3, 1, 0]


def test_the_manager_may_go_before_its_tables() -> None:
    cache = make_cache(num_blocks=4, block_size=4)
    table = cache.table()
    cache.allocate(table, 8)
    del cache
    gc.collect()
    assert table.blocks == [0, 1]


def test_off_shares_nothing() -> None:
    cache = make_cache("off", num_blocks=4, block_size=4)
    table = fill(cache, range(8))
    assert found(cache, range(9)) == []
    assert not cache.block(0).is_cached
    cache.free(table)
    assert cache.free_blocks() == [1, 0, 2, 3]
    cache.check()
