"""Forks by example: what is shared, who copies when it writes, and what is never copied."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from managers import SYSTEMS, Make, counts, fill, shape, state

BLOCK_SIZES = [2, 4, 16]


@pytest.fixture(params=SYSTEMS)
def make(request: pytest.FixtureRequest) -> Make:
    return SYSTEMS[request.param]


def family(cache: Any, num_tokens: int, size: int) -> list[tuple[Any, Any]]:
    """Holders of the same computed tokens: tables, and a sequence for each."""
    seq = cache.sequence(range(num_tokens))
    table = cache.table()
    cache.allocate(table, num_tokens)
    cache.commit(table, seq, num_tokens)
    return [(table, seq), *((cache.fork(table), seq.fork()) for _ in range(size - 1))]


def write(cache: Any, holder: tuple[Any, Any], token: int) -> list[tuple[int, int]]:
    """Append a token and compute it: the copies that this took."""
    table, seq = holder
    seq.append([token])
    grant = cache.allocate(table, seq.num_tokens)
    cache.commit(table, seq, seq.num_tokens)
    copies: list[tuple[int, int]] = grant.copies
    return copies


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_of_k_that_write_a_shared_block_all_but_one_copy(
    make: Make, block_size: int, size: int
) -> None:
    for order in permutations(range(size)):
        cache = make(num_blocks=16, block_size=block_size)
        holders = family(cache, 2 * block_size - 1, size)
        partial = holders[0][0].blocks[1]
        copies = [copy for i in order for copy in write(cache, holders[i], 100 + i)]
        targets = [target for _, target in copies]
        assert copies == [(partial, target) for target in targets]
        last_blocks = {table.blocks[1] for table, _ in holders}
        assert last_blocks == {partial, *targets}
        assert len(targets) == size - 1 == len(last_blocks) - 1


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_who_is_left_alone_does_not_copy(make: Make, block_size: int) -> None:
    for gone in range(3):
        cache = make(num_blocks=16, block_size=block_size)
        holders = family(cache, block_size - 1, 3)
        cache.free(holders.pop(gone)[0])
        assert len(write(cache, holders[0], 50)) == 1
        assert write(cache, holders[1], 51) == []


@pytest.mark.parametrize("block_size", [1, *BLOCK_SIZES])
def test_a_full_block_is_never_copied(make: Make, block_size: int) -> None:
    cache = make(num_blocks=16, block_size=block_size)
    holders = family(cache, 3 * block_size, 3)
    shared = holders[0][0].blocks.copy()
    assert [write(cache, holder, 100 + i) for i, holder in enumerate(holders)] == [[]] * 3
    assert [table.blocks[:3] for table, _ in holders] == [shared] * 3
    assert [cache.block(block).ref_cnt for block in shared] == [3, 3, 3]


def test_a_fork_shares_every_block_and_takes_none(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4, num_groups=2)
    seq, table = cache.sequence(range(9)), cache.table("mine", group=1)
    cache.allocate(table, 14)
    cache.commit(table, seq, 9)
    child = cache.fork(table)
    assert shape(child) == shape(table) == ([0, 1, 2, 3], 14, 9)
    assert (child.owner, child.group) == ("mine", 1)
    assert counts(cache) == [2, 2, 2, 2]
    cache.free(table)
    assert counts(cache) == [1, 1, 1, 1]
    cache.free(child)
    assert cache.num_free_blocks == 4


def test_room_that_nobody_wrote_is_replaced_without_a_copy(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    seq, table = cache.sequence(range(6)), cache.table()
    cache.allocate(table, 14)
    cache.commit(table, seq, 6)
    child = cache.fork(table)
    grant = cache.allocate(child, 18)
    assert (grant.copies, grant.new_blocks) == ([(1, 4)], [5, 6, 7])
    assert child.blocks == [0, 4, 5, 6, 7]
    assert table.blocks == [0, 1, 2, 3]


def test_nothing_is_replaced_where_nothing_will_be_written(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    holders = family(cache, 6, 2)
    child = holders[1][0]
    assert cache.allocate(child, 6).copies == []
    assert cache.allocate(child, 7).copies == [(1, 2)]


def test_no_room_for_a_copy_leaves_no_trace(make: Make) -> None:
    cache = make(num_blocks=3, block_size=4)
    holders = family(cache, 6, 2)
    other = cache.table()
    cache.allocate(other, 1)
    before = state(cache), shape(holders[1][0])
    assert cache.allocate(holders[1][0], 7) is None
    assert (state(cache), shape(holders[1][0])) == before
    cache.free(other)
    assert cache.allocate(holders[1][0], 7).copies == [(1, 2)]


def test_a_copy_is_owned_by_the_table_that_took_it(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    table = cache.table("mine")
    cache.allocate(table, 2)
    cache.commit(table, cache.sequence([1, 2]), 2)
    child = cache.fork(table)
    cache.allocate(child, 3)
    assert child.blocks == [1]
    assert [cache.block(i).owner for i in range(3)] == ["mine", "mine", None]


def test_siblings_that_part_find_their_own(make: Make) -> None:
    cache = make(num_blocks=8, block_size=2)
    (mine, my_seq), (its, its_seq) = family(cache, 3, 2)
    write(cache, (mine, my_seq), 70)
    write(cache, (its, its_seq), 71)
    pins = [cache.reserve(table, 4) for table in (mine, its)]
    found = [cache.lookup(cache.sequence([0, 1, 2, token, 9])).blocks for token in (70, 71)]
    assert found == [pin.blocks for pin in pins] == [mine.blocks, its.blocks]
    assert mine.blocks[0] == its.blocks[0]


def test_a_forked_sequence_grows_on_its_own(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    seq = cache.sequence(range(6), cache_salt="a", extra=[(1, 2, b"image")])
    child = seq.fork()
    seq.append([6])
    child.append([7, 8])
    assert (seq.num_tokens, child.num_tokens) == (7, 8)
    assert seq.shared_prefix(child) == child.shared_prefix(seq) == 6
    assert seq.shared_prefix(cache.sequence(range(7), cache_salt="a")) == 1


def test_a_dropped_fork_counts_no_more(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    table = fill(cache, range(6))
    child = cache.fork(table)
    assert counts(cache) == [2, 2, 0, 0]
    del child
    assert counts(cache) == [1, 1, 0, 0]
