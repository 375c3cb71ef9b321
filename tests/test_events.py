"""What a cache tells of itself by `drain_events`, by example."""

from __future__ import annotations

from typing import Any

import pytest

from managers import HASH, OFF, PAGED, RADIX, SYSTEMS, Make, admit, fill

ALGORITHM = "sha256_cbor"  # whose hashes native and twin have in common


def told(cache: Any) -> list[tuple[Any, ...]]:
    return [
        (event.kind, list(event.block_hashes), event.parent_block_hash, list(event.token_ids))
        for event in cache.drain_events()
    ]


def hashes_of(tokens: Any, **namespace: Any) -> list[bytes]:
    """By another cache, in which nothing else happens."""
    cache = HASH["twin"](num_blocks=64, block_size=4, hash_algorithm=ALGORITHM)
    hashes: list[bytes] = cache.sequence(tokens, **namespace).hashes
    return hashes


A = hashes_of(range(16))
CACHING = {"hash": HASH["xxh3"], "hash twin": HASH["twin"], **RADIX}


@pytest.fixture(params=CACHING)
def cache(request: pytest.FixtureRequest) -> Any:
    make = CACHING[request.param]
    return make(num_blocks=6, block_size=4, num_groups=2, hash_algorithm=ALGORITHM, events=True)


def test_a_commit_tells_what_is_new_as_one_run(cache: Any) -> None:
    seq = cache.sequence(range(14))
    table = admit(cache, seq)
    cache.commit(table, seq, 9)
    assert told(cache) == [("stored", A[:2], None, list(range(8)))]
    cache.commit(table, seq, 11)
    assert told(cache) == []
    cache.commit(table, seq, 14)
    assert told(cache) == [("stored", A[2:3], A[1], list(range(8, 12)))]


def test_events_are_told_once(cache: Any) -> None:
    fill(cache, range(4))
    assert len(told(cache)) == 1
    assert told(cache) == []


def test_a_second_copy_is_no_news(cache: Any) -> None:
    seqs = [cache.sequence(range(8)) for _ in range(2)]
    tables = [admit(cache, seq) for seq in seqs]
    for table, seq in zip(tables, seqs, strict=True):
        cache.commit(table, seq, 8)
    assert told(cache) == [("stored", A[:2], None, list(range(8)))]


def test_what_goes_on_from_a_known_prefix_names_its_parent(cache: Any) -> None:
    fill(cache, range(8))
    told(cache)
    fill(cache, [*range(8), 90, 91, 92, 93])
    other = hashes_of([*range(8), 90, 91, 92, 93])
    assert told(cache) == [("stored", other[2:], A[1], [90, 91, 92, 93])]


def test_the_deepest_is_evicted_first_and_all_of_them_in_one_event(cache: Any) -> None:
    cache.free(fill(cache, range(16)))
    told(cache)
    cache.allocate(cache.table(), 24)
    assert told(cache) == [("evicted", A[3::-1], None, [])]


def test_a_reset_clears(cache: Any) -> None:
    table = fill(cache, range(8))
    told(cache)
    cache.reset()
    assert told(cache) == []
    cache.free(table)
    cache.reset()
    assert told(cache) == [("cleared", [], None, [])]


def test_an_event_says_whose_it_is(cache: Any) -> None:
    fill(cache, range(4), group=1, lora="adapter", cache_salt="tenant")
    (event,) = cache.drain_events()
    assert (event.group, event.lora, event.cache_salt) == (1, "adapter", "tenant")
    assert list(event.block_hashes) == hashes_of(range(4), lora="adapter", cache_salt="tenant")


def test_evictions_of_two_groups_are_two_events(cache: Any) -> None:
    for group in (0, 1):
        cache.free(fill(cache, range(4), group=group))
    told(cache)
    cache.allocate(cache.table(), 24)
    assert [(event.kind, event.group) for event in cache.drain_events()] == [
        ("evicted", 0),
        ("evicted", 1),
    ]


@pytest.mark.parametrize("name", ["xxh3", "twin"])
def test_in_hash_a_content_is_gone_with_its_last_copy(name: str) -> None:
    cache = HASH[name](num_blocks=4, block_size=4, hash_algorithm=ALGORITHM, events=True)
    seqs = [cache.sequence(range(4)) for _ in range(2)]
    tables = [admit(cache, seq) for seq in seqs]
    for table, seq in zip(tables, seqs, strict=True):
        cache.commit(table, seq, 4)
        cache.free(table)
    told(cache)
    table = cache.table()
    seen = []
    for room in (8, 12, 16):  # two blank blocks, then one copy, then the other
        cache.allocate(table, room)
        seen.append(told(cache))
    assert seen == [[], [], [("evicted", A[:1], None, [])]]


@pytest.fixture(params=PAGED)
def paged(request: pytest.FixtureRequest) -> Any:
    make = PAGED[request.param]
    return make(num_blocks=16, block_size=4, hash_algorithm=ALGORITHM, events=True)


def test_in_paged_a_pin_is_what_is_told(paged: Any) -> None:
    table = fill(paged, range(14))
    assert told(paged) == []
    pin = paged.reserve(table, 11)
    assert told(paged) == [("stored", A[:2], None, list(range(8)))]
    paged.free(table)
    assert told(paged) == []
    paged.release(pin)
    assert told(paged) == [("evicted", A[1::-1], None, [])]


def test_in_paged_each_content_is_told_once(paged: Any) -> None:
    table = fill(paged, range(12))
    pins = [paged.reserve(table, n) for n in (4, 12, 8)]
    assert told(paged) == [
        ("stored", A[:1], None, list(range(4))),
        ("stored", A[1:3], A[0], list(range(4, 12))),
    ]
    paged.release(pins[1])
    assert told(paged) == [("evicted", [A[2]], None, [])]
    paged.release(pins[0])
    assert told(paged) == []
    paged.release(pins[2])
    assert told(paged) == [("evicted", A[1::-1], None, [])]


@pytest.mark.parametrize("make", [*SYSTEMS.values(), *OFF.values()], ids=[*SYSTEMS, *OFF])
def test_nothing_is_told_unless_asked_for(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    cache.free(fill(cache, range(16)))
    cache.free(fill(cache, range(50, 66)))
    cache.reset()
    assert cache.drain_events() == []
