"""What `hash` and `radix` have in common: full blocks are found, while nothing has changed."""

from __future__ import annotations

import pytest

from managers import HASH, RADIX, Make, admit, fill, found, state
from prefixkv.errors import StaleHitError

EVERY = {**HASH, **RADIX}


@pytest.fixture(params=EVERY)
def make(request: pytest.FixtureRequest) -> Make:
    return EVERY[request.param]


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_the_last_token_is_always_computed(make: Make, num_tokens: int, hit: int) -> None:
    cache = make(num_blocks=8, block_size=4)
    fill(cache, range(12))
    assert cache.lookup(cache.sequence(range(num_tokens))).num_tokens == hit


def test_blocks_are_found_only_once_committed(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    seq = cache.sequence(range(13))
    table = admit(cache, seq)
    seen = [found(cache, range(13))]
    for computed in (3, 7, 8, 13):
        cache.commit(table, seq, computed)
        seen.append(found(cache, range(13)))
    assert seen == [[], [], [0], [0, 1], [0, 1, 2]]


def test_free_blocks_of_the_hit_are_not_counted_as_room(make: Make) -> None:
    cache = make(num_blocks=3, block_size=4)
    cache.free(fill(cache, range(8)))
    seq = cache.sequence(range(16))
    before = state(cache)
    assert cache.allocate(cache.table(), 16, cache.lookup(seq)) is None
    assert state(cache) == before
    assert cache.allocate(cache.table(), 12, cache.lookup(seq)).new_blocks == [2]


def test_a_hit_is_stale_after_a_reset(make: Make) -> None:
    cache = make(num_blocks=2, block_size=4)
    cache.free(fill(cache, range(4)))
    hit = cache.lookup(cache.sequence(range(5)))
    cache.reset()
    with pytest.raises(StaleHitError):
        cache.allocate(cache.table(), 5, hit)
