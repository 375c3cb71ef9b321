"""The `radix` manager by example: exact block ids, hits and orders. Native and twin alike."""

from __future__ import annotations

import pytest

from managers import RADIX, Make, admit, counts, fill, found, shape, state
from prefixkv.errors import CacheError, StaleHitError


@pytest.fixture(params=RADIX)
def make(request: pytest.FixtureRequest) -> Make:
    return RADIX[request.param]


# ----------------------------------------------------------------------------------- what is found


def test_at_block_size_1_a_hit_is_exact_to_the_token(make: Make) -> None:
    cache = make(num_blocks=32, block_size=1)
    fill(cache, range(14))
    seq = cache.sequence([*range(10), 90, 91, 92, 93])
    hit = cache.lookup(seq)
    assert (hit.num_tokens, hit.blocks) == (10, list(range(10)))
    table = cache.table()
    assert cache.allocate(table, 14, hit).new_blocks == [14, 15, 16, 17]
    assert shape(table) == ([*range(10), 14, 15, 16, 17], 14, 10)


@pytest.mark.parametrize(("block_size", "hit"), [(2, 10), (4, 8), (16, 0)])
def test_larger_blocks_are_found_whole(make: Make, block_size: int, hit: int) -> None:
    cache = make(num_blocks=32, block_size=block_size)
    fill(cache, range(14))
    assert cache.lookup(cache.sequence([*range(10), 90, 91, 92, 93])).num_tokens == hit


def test_an_extra_parts_what_it_overlaps_from_the_rest(make: Make) -> None:
    cache = make(num_blocks=32, block_size=4)
    one, two, moved = [(5, 6, b"one")], [(5, 6, b"two")], [(6, 7, b"one")]
    fill(cache, range(12), extra=one)
    assert found(cache, range(13), extra=one) == [0, 1, 2]
    assert found(cache, range(13), extra=two) == [0]
    assert found(cache, range(13), extra=moved) == [0]
    assert found(cache, range(13)) == [0]


def test_salts_adapters_and_groups_have_trees_of_their_own(make: Make) -> None:
    cache = make(num_blocks=32, block_size=4, num_groups=2)
    names = [{}, {"cache_salt": "x"}, {"lora": "x"}, {"lora": "x", "cache_salt": "x"}]
    tables = [fill(cache, range(8), group=g, **name) for name in names for g in range(2)]
    hits = [found(cache, range(9), group=g, **name) for name in names for g in range(2)]
    assert hits == [table.blocks for table in tables]
    assert len({block for hit in hits for block in hit}) == 16


def test_block_hashes_are_shown_only_for_events(make: Make) -> None:
    caches = [make(num_blocks=2, block_size=4, events=events) for events in (False, True)]
    for cache in caches:
        fill(cache, range(4))
    assert [cache.block(0).is_cached for cache in caches] == [True, True]
    assert [cache.block(0).block_hash is None for cache in caches] == [True, False]
    assert [cache.block(1).block_hash for cache in caches] == [None, None]


# ------------------------------------------------------------------------------ splits and children


def test_a_hit_inside_a_run_splits_it(make: Make) -> None:
    """So the part that is not used can go alone."""
    cache = make(num_blocks=4, block_size=4)
    cache.free(fill(cache, range(16)))
    assert cache.free_blocks() == [3, 2, 1, 0]
    table = admit(cache, cache.sequence(range(8)), 4)  # hits block 0
    assert counts(cache) == [1, 0, 0, 0]
    cache.free(table)
    assert cache.free_blocks() == [3, 2, 1, 0]
    cache.allocate(cache.table(), 4)  # evicts 3, 2, 1 and not the run above
    assert [cache.block(i).is_cached for i in range(4)] == [True, False, False, False]


def test_a_lookup_splits_and_refreshes_nothing(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    cache.free(fill(cache, [1] * 8))
    cache.free(fill(cache, [2] * 8))
    before = state(cache)
    assert found(cache, [1] * 8) == [0]
    assert state(cache) == before
    cache.allocate(cache.table(), 4)
    assert (found(cache, [1] * 9), found(cache, [2] * 9)) == ([], [2, 3])


def test_a_running_request_extends_its_own_leaf(make: Make) -> None:
    """Committed in three steps, and still one run that goes whole."""
    cache = make(num_blocks=3, block_size=4)
    seq = cache.sequence(range(12))
    table = admit(cache, seq)
    for computed in (4, 8, 12):
        cache.commit(table, seq, computed)
    cache.free(table)
    other = cache.table()
    assert cache.allocate(other, 4).new_blocks == [2]
    assert found(cache, range(13)) == []
    assert cache.free_blocks() == [1, 0]


def test_a_leaf_that_another_uses_is_not_extended(make: Make) -> None:
    cache = make(num_blocks=5, block_size=4)
    seq = cache.sequence(range(8))
    table = admit(cache, seq)
    cache.commit(table, seq, 4)
    guest = admit(cache, cache.sequence(range(5)), 5)  # hits block 0
    cache.commit(table, seq, 8)
    cache.free(guest)
    cache.free(table)
    assert cache.free_blocks() == [2, 3, 4, 1, 0]
    cache.allocate(cache.table(), 16)  # evicts the run of block 1 alone
    assert found(cache, range(9)) == [0]


def test_a_leaf_that_a_fork_shares_is_not_extended(make: Make) -> None:
    cache = make(num_blocks=6, block_size=4)
    seq = cache.sequence(range(8))
    table = cache.table()
    cache.allocate(table, 4)
    cache.commit(table, seq, 4)
    child = cache.fork(table)
    cache.allocate(table, 8)
    cache.commit(table, seq, 8)
    assert counts(cache) == [2, 1, 0, 0, 0, 0]
    cache.free(child)
    assert counts(cache) == [1, 1, 0, 0, 0, 0]


def test_what_was_hit_is_not_ones_own_leaf(make: Make) -> None:
    """A request that goes on from a hit adds a run; its first one stays."""
    cache = make(num_blocks=4, block_size=4)
    cache.free(fill(cache, range(4)))
    table = fill(cache, range(12))
    cache.free(table)
    assert table.blocks == []
    cache.allocate(cache.table(), 8)
    assert found(cache, range(13)) == [0]


# -------------------------------------------------------------------------------------- duplicates


def test_the_second_copy_is_given_up_for_the_trees(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    seqs = [cache.sequence(range(9)) for _ in range(2)]
    tables = [admit(cache, seq) for seq in seqs]
    assert tables[1].blocks == [3, 4, 5]
    for table, seq in zip(tables, seqs, strict=True):
        cache.commit(table, seq, 9)
    assert [table.blocks for table in tables] == [[0, 1, 2], [0, 1, 5]]
    assert counts(cache) == [2, 2, 1, 0, 0, 1, 0, 0]
    assert cache.free_blocks() == [4, 3, 6, 7]


def test_a_duplicate_is_given_up_as_far_as_it_is_one(make: Make) -> None:
    cache = make(num_blocks=8, block_size=2)
    seqs = [cache.sequence([0, 1, 2, 3, tail, tail]) for tail in (7, 8)]
    tables = [admit(cache, seq) for seq in seqs]
    for table, seq in zip(tables, seqs, strict=True):
        cache.commit(table, seq, 6)
    assert [table.blocks for table in tables] == [[0, 1, 2], [0, 1, 5]]
    assert found(cache, [0, 1, 2, 3, 8, 8, 9]) == [0, 1, 5]


def test_blocks_that_went_and_came_back_hold_the_same(make: Make) -> None:
    """Hit, evict, compute again: the tree has it once."""
    cache = make(num_blocks=2, block_size=4)
    for _ in range(3):
        cache.free(fill(cache, range(8)))
        assert found(cache, range(9)) == cache.free_blocks()[::-1]


# ---------------------------------------------------------------------------------------- eviction


def test_golden_order_of_eviction(make: Make) -> None:
    """Oldest leaf first, whole, its last block first; then a parent that has become one."""
    cache = make(num_blocks=8, block_size=4)
    first = fill(cache, range(12))
    second = fill(cache, [*range(8), *range(50, 54)])
    assert (first.blocks, second.blocks) == ([0, 1, 2], [0, 1, 3])
    cache.free(second)
    assert cache.free_blocks() == [4, 5, 6, 7, 3]
    cache.free(first)
    assert cache.free_blocks() == [4, 5, 6, 7, 2, 3, 1, 0]


def test_the_least_recently_used_leaf_goes_first(make: Make) -> None:
    cache = make(num_blocks=6, block_size=4)
    cache.free(fill(cache, [1] * 8))  # 0, 1
    cache.free(fill(cache, [2] * 8))  # 2, 3
    cache.free(fill(cache, [3] * 8))  # 4, 5
    cache.free(admit(cache, cache.sequence([1] * 9), 8))
    assert cache.free_blocks() == [3, 2, 5, 4, 1, 0]


def test_a_leaf_goes_whole(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    cache.free(fill(cache, range(16)))
    table = cache.table()
    assert cache.allocate(table, 4).new_blocks == [3]
    assert [cache.block(i).is_cached for i in range(4)] == [False] * 4
    assert cache.free_blocks() == [2, 1, 0]


def test_all_that_a_call_needs_is_evicted_before_any_is_taken(make: Make) -> None:
    """Two leaves of two for three blocks: the blank block first, then they in order."""
    cache = make(num_blocks=5, block_size=4)
    cache.free(fill(cache, [1] * 8))  # 0, 1
    cache.free(fill(cache, [2] * 8))  # 2, 3; 4 is blank
    table = cache.table()
    assert cache.allocate(table, 16).new_blocks == [4, 1, 0, 3]
    assert cache.free_blocks() == [2]


def test_what_is_held_is_not_evicted(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    held = fill(cache, range(8))
    cache.free(fill(cache, [*range(4), *range(50, 54)]))
    assert cache.num_free_blocks == 2
    assert cache.allocate(cache.table(), 12) is None
    assert cache.allocate(cache.table(), 8) is not None
    assert found(cache, range(9)) == held.blocks


def test_a_hit_saves_its_blocks_from_their_own_allocation(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    cache.free(fill(cache, range(16)))
    table = admit(cache, cache.sequence([*range(12), *range(50, 54)]))
    assert table.blocks == [0, 1, 2, 3]
    assert cache.num_free_blocks == 0


def test_blank_blocks_of_a_table_go_to_the_front_as_one_run(make: Make) -> None:
    cache = make(num_blocks=6, block_size=4)
    table = cache.table()
    cache.allocate(table, 12)
    cache.free(table)
    assert cache.free_blocks() == [2, 1, 0, 3, 4, 5]


# ---------------------------------------------------------------------------- reserve, reset, stale


def test_a_pin_splits_a_run_and_lets_the_rest_go(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    table = fill(cache, range(16))
    pin = cache.reserve(table, 9)
    cache.free(table)
    assert (pin.num_tokens, counts(cache)) == (8, [1, 1, 0, 0])
    other = cache.table()
    assert cache.allocate(other, 4).new_blocks == [3]
    assert found(cache, range(17)) == [0, 1]
    assert cache.allocate(other, 12) is None


def test_a_pin_makes_nothing_more_recent(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    old = fill(cache, [1] * 8)  # 0, 1
    cache.free(fill(cache, [2] * 8))  # 2, 3
    pin = cache.reserve(old, 4)
    cache.free(old)
    cache.release(pin)
    assert cache.free_blocks() == [1, 0, 3, 2]


def test_reset_keeps_the_order(make: Make) -> None:
    cache = make(num_blocks=5, block_size=4)
    table = fill(cache, range(8))
    assert cache.reset() is False
    cache.free(table)
    assert cache.free_blocks() == [2, 3, 4, 1, 0]
    assert cache.reset() is True
    assert cache.free_blocks() == [2, 3, 4, 1, 0]
    assert not any(cache.block(i).is_cached for i in range(5))
    assert found(cache, range(9)) == []


def test_a_hit_of_an_evicted_run_is_stale(make: Make) -> None:
    cache = make(num_blocks=3, block_size=4)
    cache.free(fill(cache, range(12)))
    hit = cache.lookup(cache.sequence([*range(12), 99]))
    cache.allocate(cache.table(), 4)
    before = state(cache)
    with pytest.raises(StaleHitError):
        cache.allocate(cache.table(), 13, hit)
    assert state(cache) == before


def test_a_hit_outlasts_splits_and_the_eviction_of_others(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    cache.free(fill(cache, range(50, 54)))  # 0, the oldest
    cache.free(fill(cache, range(12)))  # 1, 2, 3
    hit = cache.lookup(cache.sequence([*range(8), 9]))
    cache.free(admit(cache, cache.sequence([*range(4), 9]), 4))  # splits what was hit
    evictor = cache.table()
    assert cache.allocate(evictor, 4).new_blocks == [0]
    cache.free(evictor)
    table = cache.table()
    cache.allocate(table, 9, hit)
    assert table.blocks == [1, 2, 0]


def test_a_table_is_not_committed_with_another_sequence(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    seq = cache.sequence(range(9))
    table = admit(cache, seq, 12)
    cache.commit(table, seq, 9)
    before = state(cache), shape(table)
    with pytest.raises(CacheError, match="sequence"):
        cache.commit(table, cache.sequence([*range(8), *range(90, 94)]), 12)
    assert (state(cache), shape(table)) == before
    cache.commit(table, cache.sequence([*range(9), 90, 91, 92]), 12)  # shares what is computed
    assert found(cache, [*range(9), 90, 91, 92, 0]) == [0, 1, 2]
