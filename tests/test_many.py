"""A decode step in one call, in every system: `allocate_many` and `commit_many` by example."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from managers import OFF, SYSTEMS, Make, fill, shape, state
from prefixkv.cache import BlockTable, make_cache
from prefixkv.errors import CacheError

EVERY = {**SYSTEMS, **OFF}


@pytest.fixture(params=EVERY)
def make(request: pytest.FixtureRequest) -> Make:
    return EVERY[request.param]


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "array": lambda numbers: array("q", numbers),
    "int32": lambda numbers: np.array(numbers, np.int32),
    "int64": lambda numbers: np.array(numbers, np.int64),
}


@pytest.mark.parametrize("form", FORMS)
def test_grants_come_in_order(make: Make, form: str) -> None:
    cache = make(num_blocks=8, block_size=4)
    tables = [cache.table() for _ in range(3)]
    grants = cache.allocate_many(tables, FORMS[form]([5, 0, 9]))
    assert [grant.new_blocks for grant in grants] == [[0, 1], [], [2, 3, 4]]
    assert [table.num_tokens for table in tables] == [5, 0, 9]


def test_after_a_refusal_nobody_gets_any(make: Make) -> None:
    cache = make(num_blocks=4, block_size=4)
    tables = [cache.table() for _ in range(3)]
    grants = cache.allocate_many(tables, [8, 12, 4])
    assert [grant and grant.new_blocks for grant in grants] == [[0, 1], None, None]
    assert [shape(table) for table in tables] == [([0, 1], 8, 0), ([], 0, 0), ([], 0, 0)]
    assert cache.free_blocks() == [2, 3]


def test_forks_copy_in_order(make: Make) -> None:
    cache = make(num_blocks=8, block_size=4)
    table = fill(cache, range(6))
    tables = [table, cache.fork(table), cache.fork(table)]
    grants = cache.allocate_many(tables, [7, 7, 7])
    assert [grant.copies for grant in grants] == [[(1, 2)], [(1, 3)], []]


@pytest.mark.parametrize("form", FORMS)
def test_a_token_that_was_just_sampled_is_appended_and_not_yet_computed(
    make: Make, form: str
) -> None:
    """The step computed token 4 of five and sampled the sixth."""
    cache = make(num_blocks=8, block_size=4)
    seqs = [cache.sequence(range(start, start + 5)) for start in (0, 50)]
    tables = [cache.table() for _ in seqs]
    for table, seq in zip(tables, seqs, strict=True):
        cache.allocate(table, 5)
        cache.commit(table, seq, 4)
    cache.commit_many(tables, seqs, FORMS[form]([90, 91]))
    assert [table.num_computed_tokens for table in tables] == [5, 5]
    assert [seq.num_tokens for seq in seqs] == [6, 6]
    assert seqs[0].shared_prefix(cache.sequence([*range(5), 90])) == 6


def test_a_token_that_was_just_computed_is_appended_and_committed(make: Make) -> None:
    """The sequences end where K/V ends; the step computed one more token."""
    cache = make(num_blocks=8, block_size=4)
    seqs = [cache.sequence(range(start, start + 3)) for start in (0, 50)]
    tables = [fill_with(cache, seq) for seq in seqs]
    cache.allocate_many(tables, [4, 4])
    cache.commit_many(tables, seqs, [3, 53])
    assert [table.num_computed_tokens for table in tables] == [4, 4]
    pins = [cache.reserve(table, 4) for table in tables] if make not in OFF.values() else []
    for pin, start in zip(pins, (0, 50), strict=False):
        assert cache.lookup(cache.sequence(range(start, start + 5))).blocks == pin.blocks


def fill_with(cache: Any, seq: Any) -> Any:
    table = cache.table()
    cache.allocate(table, seq.num_tokens)
    cache.commit(table, seq, seq.num_tokens)
    return table


def test_none_at_all_is_fine(make: Make) -> None:
    cache = make(num_blocks=2, block_size=4)
    assert cache.allocate_many([], []) == []
    cache.commit_many([], [], [])


class Scene:
    """Two requests in the middle of a step, and what does not belong into it."""

    def __init__(self, make: Make) -> None:
        self.cache = make(num_blocks=16, block_size=4)
        self.seqs = [self.cache.sequence(range(start, start + 5)) for start in (0, 50)]
        self.tables = [fill_with(self.cache, seq) for seq in self.seqs]
        self.cache.allocate_many(self.tables, [6, 6])
        self.other = make(num_blocks=16, block_size=4)
        self.freed = self.cache.table()
        self.cache.free(self.freed)

    def allocate(self, *pairs: tuple[Any, int]) -> None:
        self.cache.allocate_many([table for table, _ in pairs], [room for _, room in pairs])

    def commit(self, *triples: tuple[Any, Any, int]) -> None:
        self.cache.commit_many(*([triple[i] for triple in triples] for i in range(3)))

    def good(self) -> tuple[Any, Any, int]:
        return self.tables[0], self.seqs[0], 7

    def visible(self) -> Any:
        seen = [shape(table) for table in self.tables], [seq.num_tokens for seq in self.seqs]
        return state(self.cache), seen


MISUSES: dict[str, Callable[[Scene], object]] = {
    "more tables than rooms": lambda s: s.cache.allocate_many(s.tables, [9]),
    "more rooms than tables": lambda s: s.cache.allocate_many(s.tables, [9, 9, 9]),
    "room for a table twice": lambda s: s.allocate((s.tables[0], 9), (s.tables[0], 10)),
    "room for a freed table": lambda s: s.allocate((s.tables[0], 9), (s.freed, 4)),
    "room for another's table": lambda s: s.allocate((s.tables[0], 9), (s.other.table(), 4)),
    "less room than before": lambda s: s.allocate((s.tables[0], 9), (s.tables[1], 5)),
    "negative room": lambda s: s.allocate((s.tables[0], 9), (s.cache.table(), -1)),
    "more tables than sequences": lambda s: s.cache.commit_many(s.tables, s.seqs[:1], [7, 8]),
    "more tables than tokens": lambda s: s.cache.commit_many(s.tables, s.seqs, [7]),
    "more tokens than tables": lambda s: s.cache.commit_many(s.tables, s.seqs, [7, 8, 9]),
    "commit a table twice": lambda s: s.commit(s.good(), (s.tables[0], s.seqs[0].fork(), 7)),
    "commit a sequence twice": lambda s: s.commit(s.good(), (s.cache.table(), s.seqs[0], 7)),
    "commit a freed table": lambda s: s.commit(s.good(), (s.freed, s.seqs[1], 7)),
    "commit another's table": lambda s: s.commit(s.good(), (s.other.table(), s.seqs[1], 7)),
    "commit another's sequence": lambda s: s.commit(
        s.good(), (s.tables[1], s.other.sequence(range(50, 55)), 7)
    ),
    "commit where there is no room": lambda s: s.commit(
        s.good(), (fill(s.cache, [8]), s.cache.sequence([8]), 7)
    ),
    "commit beyond the sequence": lambda s: s.commit(
        s.good(), (s.tables[1], s.cache.sequence(range(50, 54)), 7)
    ),
    "commit the sequence of another table": lambda s: s.commit(
        s.good(), (s.tables[1], s.cache.sequence(range(5)), 7)
    ),
    "a negative token": lambda s: s.commit(s.good(), (s.tables[1], s.seqs[1], -1)),
    "too large a token": lambda s: s.commit(s.good(), (s.tables[1], s.seqs[1], 2**31)),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_one_misuse_spoils_none_of_the_others(make: Make, misuse: str) -> None:
    scene = Scene(make)
    before = scene.visible()
    with pytest.raises(CacheError):
        MISUSES[misuse](scene)
    assert scene.visible() == before
    scene.cache.commit_many(scene.tables, scene.seqs, [7, 8])  # and it can go on
    assert [table.num_computed_tokens for table in scene.tables] == [6, 6]


def test_a_shared_block_is_not_committed(make: Make) -> None:
    scene = Scene(make)
    child = scene.cache.fork(scene.tables[1])
    before = scene.visible()
    with pytest.raises(CacheError, match="shared"):
        scene.cache.commit_many(scene.tables, scene.seqs, [7, 8])
    assert scene.visible() == before
    scene.cache.free(child)
    scene.cache.commit_many(scene.tables, scene.seqs, [7, 8])


@pytest.mark.filterwarnings("ignore:nanobind")
@pytest.mark.parametrize(
    "item", [5, None, BlockTable.__new__(BlockTable)], ids=["5", "None", "raw"]
)
def test_what_no_cache_has_made_is_refused(item: Any) -> None:
    cache = make_cache(num_blocks=4)
    with pytest.raises(TypeError, match="BlockTable is needed"):
        cache.allocate_many([cache.table(), item], [1, 1])
    assert cache.num_free_blocks == 4
