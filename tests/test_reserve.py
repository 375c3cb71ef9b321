"""Reservations in every system: held beyond the table, found, and given back once."""

from __future__ import annotations

import gc

import pytest

from managers import OFF, SYSTEMS, Make, counts, fill, found, state
from prefixkv.errors import CacheError


@pytest.fixture(params=SYSTEMS)
def make(request: pytest.FixtureRequest) -> Make:
    return SYSTEMS[request.param]


@pytest.fixture
def whole_tokens(make: Make) -> bool:
    """Whether a partial block can be found."""
    return make in (SYSTEMS["paged"], SYSTEMS["paged twin"])


def test_reserved_tokens_outlive_the_table(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    table = fill(cache, range(8))
    pin = cache.reserve(table, 8)
    cache.free(table)
    assert (pin.num_tokens, pin.blocks, pin.group) == (8, [0, 1], 0)
    assert counts(cache) == [1, 1, 0, 0]
    assert [cache.block(i).is_cached for i in range(4)] == [True, True, False, False]
    assert found(cache, range(9)) == [0, 1]


def test_reserved_blocks_are_not_reused(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    table = fill(cache, range(8))
    cache.reserve(table, 8)
    cache.free(table)
    assert cache.num_free_blocks == 2
    assert cache.allocate(cache.table(), 9) is None
    assert cache.allocate(cache.table(), 8).new_blocks == [2, 3]
    assert found(cache, range(9)) == [0, 1]


def test_only_what_can_be_found_is_held(make: Make, whole_tokens: bool) -> None:
    cache = make(num_blocks=8, block_size=4)
    table = fill(cache, range(11))
    pins = [cache.reserve(table, n) for n in (2, 4, 6, 11)]
    held = [(pin.num_tokens, pin.blocks) for pin in pins]
    if whole_tokens:
        assert held == [(2, [0]), (4, [0]), (6, [0, 1]), (11, [0, 1, 2])]
    else:
        assert held == [(0, []), (4, [0]), (4, [0]), (8, [0, 1])]


def test_a_part_of_the_table_may_be_reserved(make: Make) -> None:
    cache = make(num_blocks=4, block_size=2)
    table = fill(cache, range(8))
    pin = cache.reserve(table, 4)
    assert counts(cache) == [2, 2, 1, 1]
    cache.free(table)
    assert counts(cache) == [1, 1, 0, 0]
    assert cache.free_blocks() == [3, 2]
    cache.release(pin)
    assert cache.num_free_blocks == 4


def test_two_pins_hold_twice(make: Make) -> None:
    cache = make(num_blocks=2, block_size=4)
    table = fill(cache, range(8))
    pins = [cache.reserve(table, 8), cache.reserve(table, 4)]
    cache.free(table)
    assert counts(cache) == [2, 1]
    cache.release(pins[0])
    assert counts(cache) == [1, 0]
    cache.release(pins[1])
    assert counts(cache) == [0, 0]


def test_a_pin_stays_when_its_object_goes(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    table = fill(cache, range(8))
    pin = cache.reserve(table, 8)
    cache.free(table)
    del pin
    gc.collect()
    assert counts(cache) == [1, 1, 0, 0]


def test_reset_waits_for_a_pin(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    table = fill(cache, range(8))
    pin = cache.reserve(table, 4)
    cache.free(table)
    before = state(cache)
    assert cache.reset() is False
    assert state(cache) == before
    cache.release(pin)
    assert cache.reset() is True


def test_a_pin_is_found_in_its_group_only(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4, num_groups=2)
    table = fill(cache, range(8), group=1)
    pin = cache.reserve(table, 8)
    assert pin.group == 1
    assert found(cache, range(9), group=1) == [0, 1]
    assert found(cache, range(9), group=0) == []


def test_a_pin_is_found_in_its_namespace_only(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    table = fill(cache, range(8), cache_salt="tenant")
    cache.reserve(table, 8)
    assert found(cache, range(9)) == []
    assert found(cache, range(9), cache_salt="tenant") == [0, 1]


@pytest.mark.parametrize("num_tokens", [0, -1, 7, 2**40])
def test_only_computed_tokens_are_reserved(make: Make, num_tokens: int) -> None:
    cache = make(num_blocks=4, block_size=4)
    table = cache.table()
    cache.allocate(table, 8)
    cache.commit(table, cache.sequence(range(8)), 6)
    before = state(cache)
    with pytest.raises(CacheError, match=str(num_tokens)):
        cache.reserve(table, num_tokens)
    assert state(cache) == before


def test_a_pin_is_released_once(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    table = fill(cache, range(8))
    pin, other = cache.reserve(table, 8), cache.reserve(table, 8)
    cache.release(pin)
    before = state(cache)
    with pytest.raises(CacheError):
        cache.release(pin)
    assert state(cache) == before
    cache.release(other)


def test_a_pin_is_released_where_it_was_made(make: Make) -> None:
    caches = [make(num_blocks=4, block_size=4) for _ in range(2)]
    tables = [fill(cache, range(8)) for cache in caches]
    pins = [cache.reserve(table, 8) for cache, table in zip(caches, tables, strict=True)]
    with pytest.raises(CacheError):
        caches[0].release(pins[1])
    assert [counts(cache) for cache in caches] == [[2, 2, 0, 0]] * 2


@pytest.mark.parametrize("name", OFF)
def test_off_reserves_nothing(name: str) -> None:
    cache = OFF[name](num_blocks=4, block_size=4)
    table = fill(cache, range(8))
    with pytest.raises(CacheError):
        cache.reserve(table, 8)
    assert counts(cache) == [1, 1, 0, 0]
