"""The `paged` manager by example: only what is reserved is found, to the token."""

from __future__ import annotations

import pytest

from managers import OFF, PAGED, Make, admit, counts, fill, found, shape, state
from prefixkv.errors import StaleHitError


@pytest.fixture(params=PAGED)
def make(request: pytest.FixtureRequest) -> Make:
    return PAGED[request.param]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_10_reserved_tokens_of_14_hit_at_any_block_size(make: Make, block_size: int) -> None:
    cache = make(num_blocks=40, block_size=block_size)
    table = fill(cache, range(10))
    cache.reserve(table, 10)
    cache.free(table)
    hit = cache.lookup(cache.sequence([*range(10), 90, 91, 92, 93]))
    assert hit.num_tokens == 10
    assert len(hit.blocks) == -(-10 // block_size)


def test_a_hit_is_as_long_as_what_is_shared(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    cache.reserve(fill(cache, range(10)), 10)
    prompts = [[*range(shared), 90] for shared in range(13)]
    hits = [cache.lookup(cache.sequence(prompt)) for prompt in prompts]
    assert [hit.num_tokens for hit in hits] == [*range(11), 10, 10]
    assert [len(hit.blocks) for hit in hits] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("name", [*PAGED, *OFF])
def test_nothing_is_found_that_is_not_reserved(name: str) -> None:
    cache = {**PAGED, **OFF}[name](num_blocks=8, block_size=4)
    table = fill(cache, range(8))
    assert found(cache, range(9)) == []
    assert not any(cache.block(i).is_cached for i in range(8))
    cache.free(table)
    assert found(cache, range(9)) == []
    assert cache.free_blocks() == [1, 0, 2, 3, 4, 5, 6, 7]


def test_nothing_is_found_once_it_is_released(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    table = fill(cache, range(10))
    pin = cache.reserve(table, 10)
    cache.release(pin)
    assert found(cache, range(11)) == []


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 10])
def test_the_last_token_is_always_computed(make: Make, num_tokens: int) -> None:
    cache = make(num_blocks=8, block_size=4)
    cache.reserve(fill(cache, range(10)), 10)
    assert cache.lookup(cache.sequence(range(num_tokens))).num_tokens == num_tokens - 1


def test_the_partial_last_block_is_copied_by_who_writes_into_it(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    table = fill(cache, range(10))
    cache.reserve(table, 10)
    cache.free(table)
    seq = cache.sequence([*range(10), 90, 91, 92, 93])
    reader = cache.table()
    grant = cache.allocate(reader, 14, cache.lookup(seq))
    assert (grant.copies, grant.new_blocks) == ([(2, 3)], [4])
    assert shape(reader) == ([0, 1, 3, 4], 14, 10)
    assert counts(cache) == [2, 2, 1, 1, 1, 0, 0, 0]


def test_nothing_is_copied_until_there_is_something_to_write(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    cache.reserve(fill(cache, range(6)), 6)
    seq = cache.sequence([*range(6), 90])
    reader = cache.table()
    grant = cache.allocate(reader, 6, cache.lookup(seq))
    assert (grant.copies, grant.new_blocks, reader.blocks) == ([], [], [0, 1])
    assert cache.allocate(reader, 7).copies == [(1, 2)]


def test_a_full_block_of_the_hit_is_not_copied(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    cache.reserve(fill(cache, range(8)), 8)
    reader = cache.table()
    grant = cache.allocate(reader, 9, cache.lookup(cache.sequence(range(9))))
    assert (grant.copies, grant.new_blocks, reader.blocks) == ([], [2], [0, 1, 2])


def test_the_copy_must_find_room(make: Make) -> None:
    cache = make(num_blocks=2, block_size=4)
    cache.reserve(fill(cache, range(6)), 6)
    before = state(cache)
    seq = cache.sequence([*range(6), 9])
    assert cache.allocate(cache.table(), 7, cache.lookup(seq)) is None
    assert state(cache) == before


def test_of_equal_hits_the_oldest_pin_serves(make: Make) -> None:
    cache = make(num_blocks=16, block_size=4)
    tables = [fill(cache, [*range(6), tail]) for tail in (50, 60, 70)]
    pins = [cache.reserve(table, 7) for table in tables]
    serve = [found(cache, [*range(6), 99])]
    cache.release(pins[0])
    serve.append(found(cache, [*range(6), 99]))
    assert serve == [tables[0].blocks, tables[1].blocks]


def test_of_several_pins_the_longest_prefix_serves(make: Make) -> None:
    cache = make(num_blocks=16, block_size=4)
    tables = [fill(cache, [*range(shared), 50]) for shared in (3, 6, 4)]
    for table in tables:
        cache.reserve(table, table.num_computed_tokens)
    hit = cache.lookup(cache.sequence(range(9)))
    assert (hit.num_tokens, hit.blocks) == (6, tables[1].blocks)


def test_an_extra_is_shared_up_to_where_it_differs(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    cache.reserve(fill(cache, range(8), extra=[(3, 5, b"one")]), 8)
    extras = [[(3, 5, b"one")], [(3, 5, b"two")], [(2, 5, b"one")], []]
    hits = [cache.lookup(cache.sequence(range(9), extra=extra)).num_tokens for extra in extras]
    assert hits == [8, 3, 2, 3]


def test_a_hit_of_a_released_pin_is_stale(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    table = fill(cache, range(6))
    pin, _ = cache.reserve(table, 6), cache.reserve(table, 6)
    seq = cache.sequence(range(7))
    hit = cache.lookup(seq)
    cache.release(pin)
    before = state(cache)
    with pytest.raises(StaleHitError):
        cache.allocate(cache.table(), 7, hit)
    assert state(cache) == before
    assert admit(cache, seq).num_computed_tokens == 6


def test_freed_blocks_go_to_the_front_as_one_run(make: Make) -> None:
    cache = make(num_blocks=10, block_size=4)
    first, second = fill(cache, range(20)), fill(cache, range(12))
    assert second.blocks == [5, 6, 7]
    cache.free(second)
    assert cache.free_blocks() == [7, 6, 5, 8, 9]
    cache.free(first)
    assert cache.free_blocks() == [4, 3, 2, 1, 0, 7, 6, 5, 8, 9]


def test_there_is_no_block_hash(make: Make) -> None:
    cache = make(num_blocks=2, block_size=4, events=True)
    cache.reserve(fill(cache, range(4)), 4)
    block = cache.block(0)
    assert (block.is_cached, block.block_hash) == (True, None)
