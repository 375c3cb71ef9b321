"""The `hash` manager refuses what is wrong, and is as before then. Native and twin alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from managers import HASH, Make, admit, fill, shape, state
from prefixkv import _core
from prefixkv.cache import BlockTable, RadixTree, make_cache
from prefixkv.errors import CacheError, ConfigError, StaleHitError


@pytest.fixture(params=HASH)
def make(request: pytest.FixtureRequest) -> Make:
    return HASH[request.param]


def test_a_hit_whose_block_was_evicted_is_stale(make: Make) -> None:
    cache = make(num_blocks=3, block_size=4)
    cache.free(fill(cache, range(12)))
    seq = cache.sequence([*range(12), 99])
    hit = cache.lookup(seq)
    cache.allocate(cache.table(), 4)  # evicts the deepest block of the hit
    table = cache.table()
    before = state(cache), shape(table)
    with pytest.raises(StaleHitError):
        cache.allocate(table, 13, hit)
    assert (state(cache), shape(table)) == before


def test_a_hit_whose_block_holds_something_else_now_is_stale(make: Make) -> None:
    cache = make(num_blocks=2, block_size=4)
    cache.free(fill(cache, range(4)))
    hit = cache.lookup(cache.sequence(range(5)))
    fill(cache, range(50, 58))
    with pytest.raises(StaleHitError):
        cache.allocate(cache.table(), 5, hit)


def test_a_hit_outlasts_the_eviction_of_other_blocks(make: Make) -> None:
    cache = make(num_blocks=3, block_size=4)
    cache.free(fill(cache, range(50, 54)))  # 0, evicted below
    cache.free(fill(cache, range(8)))  # 1, 2
    seq = cache.sequence([*range(8), 9])
    hit = cache.lookup(seq)
    evictor = cache.table()
    assert cache.allocate(evictor, 4).new_blocks == [0]
    cache.free(evictor)
    table = cache.table()
    cache.allocate(table, 9, hit)
    assert table.blocks == [1, 2, 0]


class Scene:
    """A manager in use, for a misuse to be tried on."""

    def __init__(self, make: Make) -> None:
        self.cache = make(num_blocks=8, block_size=4, num_groups=2)
        self.other = make(num_blocks=8, block_size=4, num_groups=2)
        self.freed = fill(self.cache, range(8))
        self.cache.free(self.freed)
        self.seq = self.cache.sequence([*range(8), 50, 51, 52])
        self.hit = self.cache.lookup(self.seq)
        self.table = admit(self.cache, self.seq, 10)  # 8 tokens computed
        self.blank = self.cache.table()  # the same room, nothing computed
        self.cache.allocate(self.blank, 10)


MISUSES: dict[str, Callable[[Scene], object]] = {
    "free twice": lambda s: s.cache.free(s.freed),
    "allocate a freed table": lambda s: s.cache.allocate(s.freed, 8),
    "commit a freed table": lambda s: s.cache.commit(s.freed, s.seq, 8),
    "free another's table": lambda s: s.cache.free(s.other.table()),
    "allocate another's table": lambda s: s.cache.allocate(s.other.table(), 4),
    "commit another's table": lambda s: s.cache.commit(s.other.table(), s.seq, 0),
    "look up another's sequence": lambda s: s.cache.lookup(s.other.sequence(range(9))),
    "commit another's sequence": lambda s: s.cache.commit(s.table, s.other.sequence(range(9)), 8),
    "use another's hit": lambda s: s.cache.allocate(
        s.cache.table(), 9, s.other.lookup(s.other.sequence(range(9)))
    ),
    "commit less than before": lambda s: s.cache.commit(s.table, s.seq, 7),
    "commit more than there is room for": lambda s: s.cache.commit(s.table, s.seq, 11),
    "commit more than the sequence has": lambda s: s.cache.commit(
        s.blank, s.cache.sequence(range(6)), 7
    ),
    "commit a negative number": lambda s: s.cache.commit(s.blank, s.seq, -1),
    "shrink": lambda s: s.cache.allocate(s.table, 9),
    "allocate a negative number": lambda s: s.cache.allocate(s.cache.table(), -1),
    "a hit for a table in use": lambda s: s.cache.allocate(s.table, 10, s.hit),
    "a hit for a table of another group": lambda s: s.cache.allocate(
        s.cache.table(group=1), 10, s.hit
    ),
    "less room than the hit covers": lambda s: s.cache.allocate(s.cache.table(), 7, s.hit),
    "look up in no group": lambda s: s.cache.lookup(s.seq, 2),
    "look up in a negative group": lambda s: s.cache.lookup(s.seq, -1),
    "a table of no group": lambda s: s.cache.table(group=2),
    "a block below the first": lambda s: s.cache.block(-1),
    "a block beyond the last": lambda s: s.cache.block(8),
    "an extra that covers nothing": lambda s: s.cache.sequence([1], extra=[(3, 3, b"")]),
    "an extra that begins before the first token": lambda s: s.cache.sequence(
        [1], extra=[(-1, 3, b"")]
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_raises_and_changes_nothing(make: Make, misuse: str) -> None:
    scene = Scene(make)
    before = state(scene.cache), shape(scene.table), shape(scene.blank)
    with pytest.raises(CacheError):
        MISUSES[misuse](scene)
    assert (state(scene.cache), shape(scene.table), shape(scene.blank)) == before
    scene.cache.commit(scene.table, scene.seq, 10)  # and it can go on
    scene.cache.free(scene.table)


@pytest.mark.parametrize("name", [name for name in HASH if name != "colliding"])
@pytest.mark.parametrize("from_hit", [True, False])
def test_a_table_is_not_committed_with_another_sequence(name: str, from_hit: bool) -> None:
    """Told by the hash of the last cached block, so not where hashes are made to collide."""
    cache = HASH[name](num_blocks=8, block_size=4)
    earlier = fill(cache, range(8)) if from_hit else None
    seq = cache.sequence(range(9))
    table = admit(cache, seq, 12)
    cache.commit(table, seq, 9)
    before = state(cache), shape(table)
    with pytest.raises(CacheError, match="sequence"):
        cache.commit(table, cache.sequence(range(90, 102)), 12)
    assert (state(cache), shape(table)) == before
    del earlier


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_blocks", 0),
        ("num_blocks", -1),
        ("num_blocks", 2**31),
        ("block_size", 0),
        ("block_size", 1025),
        ("num_groups", 0),
        ("hash_algorithm", "md5"),
        ("system", "tree"),
    ],
)
def test_an_option_out_of_its_limits_is_named(option: str, value: object) -> None:
    options: dict[str, Any] = {"num_blocks": 4, option: value}
    with pytest.raises(ConfigError, match=f"{option}.*{value}"):
        make_cache(**options)


def test_a_block_that_two_sequences_wrote_is_not_cached_for_one_of_them() -> None:
    cache = make_cache("hash", num_blocks=8, block_size=4)
    mine, other = cache.sequence([1, 2, 3, 4, 5]), cache.sequence([9, 9, 9, 9, 9])
    table = cache.table()
    cache.allocate(table, 5)
    cache.commit(table, mine, 3)
    with pytest.raises(CacheError, match="not the one that filled the table"):
        cache.commit(table, other, 4)


class Meddler:
    """A token id whose ``__index__`` runs code of ours."""

    def __init__(self, meddle: Callable[[], object], value: int = 7) -> None:
        self._meddle, self._value = meddle, value

    def __index__(self) -> int:
        self._meddle()
        return self._value


def test_a_token_id_may_empty_the_list_that_it_is_read_from() -> None:
    seq = make_cache("hash", num_blocks=4).sequence([1])
    items: list[object] = []
    items += [Meddler(items.clear), *range(1000, 101_000)]
    seq.append(items)
    assert seq.num_tokens == 100_002


def test_a_token_id_may_append_to_the_sequence_that_it_is_appended_to() -> None:
    seq = make_cache("hash", num_blocks=4).sequence([1])
    seq.append([Meddler(lambda: seq.append(range(1_000_000))), *range(1000, 101_000)])
    assert seq.num_tokens == 1 + 1_000_000 + 100_001


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupted() -> Iterator[int]:
    yield 1
    interrupt()


@pytest.mark.parametrize(
    "make_ids", [interrupted, lambda: [Meddler(interrupt)]], ids=["iterator", "item"]
)
def test_an_error_while_token_ids_are_read_is_not_hidden(make_ids: Callable[[], object]) -> None:
    cache, tree = make_cache("hash", num_blocks=4), RadixTree(1)
    seq, table = cache.sequence([1]), cache.table()
    cache.allocate(table, 1)
    calls: list[Callable[[Any], object]] = [
        seq.append,
        cache.sequence,
        tree.match,
        lambda ids: cache.allocate_many([table], ids),
        lambda ids: cache.commit_many([table], [seq], ids),
        lambda ids: tree.insert([1], ids),
    ]
    for call in calls:
        with pytest.raises(KeyboardInterrupt):
            call(make_ids())
    assert (seq.num_tokens, table.num_computed_tokens, tree.evictable_size) == (1, 0, 0)


class Shown:
    """What an error that names it finds instead of a text."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def __repr__(self) -> str:
        if self._text is None:
            raise ValueError("no text")
        return self._text


UNSHOWABLE: dict[str, tuple[object, str]] = {
    "no text": (Shown(None), "of type Shown"),
    "half a character": (Shown("\ud800"), "of type Shown"),
    "more digits than Python shows": (10**5000, "of type int"),
    "far too much": (Shown("x" * 1_000_000), "x{200}(?!x)"),
}


@pytest.mark.parametrize("name", UNSHOWABLE)
def test_what_cannot_be_shown_is_refused_all_the_same(name: str) -> None:
    bad, shown = UNSHOWABLE[name]
    cache = make_cache("hash", num_blocks=4)
    with pytest.raises(CacheError, match=shown):
        cache.sequence([bad])
    with pytest.raises(CacheError, match=shown):
        cache.sequence([1], extra=[bad])


class MadeOnReading:
    """Items that nobody holds once the next is read."""

    def __init__(self, make: Callable[[], object], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> object:
        if index >= self._count:
            raise IndexError
        return self._make()


def test_the_arrays_of_a_step_hold_what_they_are_made_of() -> None:
    cache = make_cache("hash", num_blocks=100)

    def table() -> BlockTable:
        made = cache.table()
        cache.allocate(made, 32)
        return made

    tables = MadeOnReading(table, 20)
    seqs = MadeOnReading(lambda: cache.sequence(range(32)), 20)
    arrays = _core.step_arrays(seqs, tables, [0] * 20, [32] * 20)
    assert arrays[0].tolist() == [*range(32)] * 20
    assert arrays[5].tolist() == list(range(40))


def test_a_number_may_empty_the_lists_of_a_step() -> None:
    cache = make_cache("hash", num_blocks=100)
    tables, seqs = [cache.table() for _ in range(20)], [cache.sequence([7]) for _ in range(20)]
    for table in tables:
        cache.allocate(table, 1)
    del table
    start = Meddler(lambda: (tables.clear(), seqs.clear()), 0)
    arrays = _core.step_arrays(seqs, tables, [start] * 20, [1] * 20)
    assert arrays[0].tolist() == [7] * 20
    assert arrays[5].tolist() == list(range(20))


def test_owners_of_freed_tables_take_no_memory() -> None:
    cache = make_cache("hash", num_blocks=4)
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("this system does not tell how much memory a process has")

    def pages() -> int:
        return int(statm.read_text().split()[1])

    before = pages()
    for i in range(200_000):
        table = cache.table(owner=f"request-{i:032d}")
        cache.allocate(table, 16)
        cache.free(table)
    assert pages() - before < 2048
    assert cache.block(0).owner == f"request-{199_999:032d}"


@pytest.mark.parametrize("algorithm", ["xxh3", "sha256_cbor", "sha256"])
def test_a_token_id_that_fails_after_it_used_the_sequence_poisons_nothing(algorithm: str) -> None:
    cache = make_cache("hash", num_blocks=8, block_size=4, hash_algorithm=algorithm)
    seq = cache.sequence([1, 2, 3])

    def meddle() -> None:
        seq.append([7] * 9)
        cache.lookup(seq)
        raise ValueError("no token")

    with pytest.raises(ValueError, match="no token"):
        seq.append([Meddler(meddle)])
    assert seq.num_tokens == 12
    table = cache.table()
    cache.allocate(table, 12)
    cache.commit(table, seq, 12)
    assert cache.lookup(cache.sequence([1, 2, 3, *[7] * 9, 0])).num_tokens == 12
    assert cache.lookup(cache.sequence([1, 2, 3, *[8] * 9, 0])).num_tokens == 0
