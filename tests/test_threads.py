"""One cache used by several threads at once, which change places as often as Python lets them.

A call is one step for the others, also where Python code runs in its middle: in token ids of a
class of one's own, and in the pickle that `sha256` is taken of.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from managers import fill, found
from prefixkv import _core
from prefixkv.cache import make_cache
from prefixkv.config import CACHE_SYSTEMS
from prefixkv.errors import StaleHitError

NUM_THREADS = 4
BLOCK_SIZE = 4

CACHES = {
    "xxh3": {"system": "hash"},
    "sha256_cbor": {"system": "hash", "hash_algorithm": "sha256_cbor"},
    "sha256": {"system": "hash", "hash_algorithm": "sha256"},
    **{system: {"system": system} for system in CACHE_SYSTEMS if system != "hash"},
}
FIND_NOTHING = ("off", "paged")  # unless it is reserved


@pytest.fixture(autouse=True)
def frequent_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also while a block is pickled, as a garbage collection that runs a finalizer would do it."""
    dumps = pickle.dumps

    def slow_dumps(value: Any, protocol: int) -> bytes:
        time.sleep(0)
        return dumps(value, protocol=protocol)

    monkeypatch.setattr(pickle, "dumps", slow_dumps)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class SlowToken:
    """A token id that lets other threads in while it is read."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        time.sleep(0)
        return self.value


FORMS: list[Callable[[list[int]], Any]] = [
    list,
    lambda tokens: np.array(tokens, dtype=np.int32),
    lambda tokens: [SlowToken(token) for token in tokens],
]


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """`work(0)` to `work(NUM_THREADS - 1)`, at the same time; what one raises is raised."""
    start = threading.Barrier(NUM_THREADS)

    def run(number: int) -> Any:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(run, range(NUM_THREADS)))


class Worker:
    """Requests one after the other, as one thread of an engine would make them."""

    def __init__(self, cache: Any, shadow: list[Any], seed: int) -> None:
        self.cache = cache
        self.shadow = shadow  # of all workers: what each slot holds
        self.rng = random.Random(seed)
        self.hit_tokens = 0

    def run(self, num_requests: int) -> int:
        for _ in range(num_requests):
            self.request()
        return self.hit_tokens

    def request(self) -> None:
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 20))]
        seq = self.cache.sequence(self.rng.choice(FORMS)(tokens))
        table = self.cache.table(owner=f"request {self.rng.randrange(5)}")
        try:
            grant = self.cache.allocate(table, len(tokens), self.cache.lookup(seq))
        except StaleHitError:  # another thread came between the two calls
            grant = None
        if grant is not None:
            self.hit_tokens += table.num_computed_tokens
            self.check(table, tokens)
            self.compute(table, seq, tokens)
            self.decode(table, seq, tokens)
        if self.rng.random() < 0.8:
            self.cache.free(table)  # else it is dropped, which frees it too

    def decode(self, table: Any, seq: Any, tokens: list[int]) -> None:
        more = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 6))]
        seq.append(self.rng.choice(FORMS)(more))
        tokens += more
        if self.cache.allocate(table, len(tokens)) is not None:
            self.compute(table, seq, tokens)

    def slots(self, table: Any, start: int, stop: int) -> Iterator[tuple[int, int]]:
        blocks = table.blocks
        for position in range(start, stop):
            yield position, blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def compute(self, table: Any, seq: Any, tokens: list[int]) -> None:
        for position, slot in self.slots(table, table.num_computed_tokens, len(tokens)):
            self.shadow[slot] = tokens[: position + 1]
        self.cache.commit(table, seq, len(tokens))
        self.check(table, tokens)

    def check(self, table: Any, tokens: list[int]) -> None:
        for position, slot in self.slots(table, 0, table.num_computed_tokens):
            assert self.shadow[slot] == tokens[: position + 1]


@pytest.mark.parametrize("kind", CACHES)
def test_requests_of_several_threads_never_mix(kind: str) -> None:
    cache = make_cache(num_blocks=24, block_size=BLOCK_SIZE, **CACHES[kind])
    shadow: list[Any] = [None] * (24 * BLOCK_SIZE)
    hit_tokens = in_threads(lambda number: Worker(cache, shadow, number).run(200))
    cache.check()
    assert cache.num_free_blocks == 24
    assert (sum(hit_tokens) > 0) == (kind not in FIND_NOTHING)


@pytest.mark.parametrize("kind", ["xxh3", "sha256"])
def test_threads_that_hash_one_sequence_find_the_same(kind: str) -> None:
    cache = make_cache(num_blocks=64, block_size=BLOCK_SIZE, **CACHES[kind])
    tokens = list(range(201))
    cache.free(fill(cache, tokens))
    for _ in range(5):
        seq = cache.sequence(tokens)  # not hashed yet

        def look_up(_: int, seq: Any = seq) -> list[int]:
            blocks: list[int] = cache.lookup(seq).blocks
            return blocks

        assert in_threads(look_up) == [found(cache, tokens)] * NUM_THREADS
    assert len(found(cache, tokens)) == 50


def test_what_a_call_appends_stays_together() -> None:
    cache = make_cache(num_blocks=1, block_size=1024)
    seq, table = cache.sequence([]), cache.table()

    def append(number: int) -> None:
        for _ in range(20):
            seq.append([SlowToken(number)] * 5)

    in_threads(append)
    assert seq.num_tokens == NUM_THREADS * 20 * 5
    cache.allocate(table, seq.num_tokens)
    token_ids = _core.step_arrays([seq], [table], [0], [seq.num_tokens])[0].reshape(-1, 5)
    assert (token_ids == token_ids[:, :1]).all()


def test_calls_in_the_middle_of_a_call_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that runs while a block is pickled may use the same cache."""
    cache = make_cache(num_blocks=8, block_size=1, hash_algorithm="sha256")
    dumps = pickle.dumps
    calls: list[Callable[[], object]] = []

    def busy_dumps(value: Any, protocol: int) -> bytes:
        while calls:
            calls.pop()()
        return dumps(value, protocol=protocol)

    monkeypatch.setattr(pickle, "dumps", busy_dumps)
    cached = fill(cache, [1, 2, 3])
    seq, table = cache.sequence([5, 6, 7]), cache.table()
    cache.allocate(table, 3)
    calls += [cache.check, lambda: cache.free(fill(cache, [8])), lambda: cache.free(cached)]
    cache.commit(table, seq, 2)
    cache.check()
    assert calls == []
    assert found(cache, [5, 6, 7]) == table.blocks[:2]
