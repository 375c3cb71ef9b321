"""The public radix tree by example: slots of whole pages, locks, and the order of eviction."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prefixkv.cache import RadixTree
from prefixkv.errors import CacheError, ConfigError, StaleHitError
from reference import RadixTree as Twin

TREES: dict[str, Callable[..., Any]] = {"native": RadixTree, "twin": Twin}


@pytest.fixture(params=TREES)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return TREES[request.param]


def sizes(tree: Any) -> tuple[int, int]:
    return tree.evictable_size, tree.protected_size


# ------------------------------------------------------------------------------- insert and match


def test_what_was_inserted_is_matched(make: Callable[..., Any]) -> None:
    tree = make(1)
    assert tree.insert([1, 2, 3], [10, 11, 12]) == 0
    match = tree.match([1, 2, 4])
    assert match.num_tokens == 2
    assert match.slots.dtype == np.int32
    assert match.slots.tolist() == [10, 11]


def test_the_slots_that_were_there_stay(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1, 2, 3], [10, 11, 12])
    assert tree.insert([1, 2, 7, 8], [20, 21, 22, 23]) == 2
    assert tree.match([1, 2, 7, 8]).slots.tolist() == [10, 11, 22, 23]
    assert tree.match([1, 2, 3]).slots.tolist() == [10, 11, 12]
    assert sizes(tree) == (5, 0)


def test_all_that_was_there_is_counted(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1, 2, 3], [10, 11, 12])
    assert [tree.insert([1, 2, 3][:n], [0] * n) for n in range(4)] == [0, 1, 2, 3]
    assert sizes(tree) == (3, 0)


@pytest.mark.parametrize(("shared", "hit"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 8)])
def test_only_whole_pages_are_matched(make: Callable[..., Any], shared: int, hit: int) -> None:
    tree = make(4)
    assert tree.insert(range(11), range(100, 111)) == 0
    assert sizes(tree) == (8, 0)
    match = tree.match([*range(shared), 99, 99, 99, 99])
    assert match.num_tokens == hit
    assert match.slots.tolist() == list(range(100, 100 + hit))


def test_pages_differ_by_any_token(make: Callable[..., Any]) -> None:
    tree = make(2)
    tree.insert([1, 2], [0, 1])
    assert tree.insert([1, 3], [2, 3]) == 0
    assert tree.match([1, 3]).slots.tolist() == [2, 3]


def test_namespaces_are_apart(make: Callable[..., Any]) -> None:
    tree = make(1)
    for i, namespace in enumerate([None, "", "a"]):
        assert tree.insert([1, 2], [2 * i, 2 * i + 1], namespace) == 0
    names = [None, "", "a", "b"]
    assert [tree.match([1, 2], name).slots.tolist() for name in names] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [],
    ]
    assert sizes(tree) == (6, 0)


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "tuple": tuple,
    "array": lambda numbers: array("i", numbers),
    "int32": lambda numbers: np.array(numbers, np.int32),
    "int64": lambda numbers: np.array(numbers, np.int64),
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_and_slots_come_in_every_form(make: Callable[..., Any], form: str) -> None:
    tree = make(2)
    tree.insert(FORMS[form]([1, 2, 3, 4]), FORMS[form]([7, 2**31 - 1, 9, 0]))
    assert tree.match(FORMS[form]([1, 2, 3, 4])).slots.tolist() == [7, 2**31 - 1, 9, 0]


def test_nothing_is_matched_in_an_empty_tree(make: Callable[..., Any]) -> None:
    tree = make(4)
    assert tree.page_size == 4
    assert tree.insert([], []) == 0
    assert tree.match([1] * 9).num_tokens == 0
    assert tree.evict(9).tolist() == []
    assert sizes(tree) == (0, 0)


# --------------------------------------------------------------------------------------- eviction


def test_the_least_recent_leaf_goes_whole(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1, 1, 1], [10, 11, 12])
    tree.insert([2, 2], [20, 21])
    evicted = tree.evict(1)
    assert evicted.dtype == np.int32
    assert evicted.tolist() == [10, 11, 12]
    assert sizes(tree) == (2, 0)


def test_a_match_makes_recent(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1, 1], [10, 11])
    tree.insert([2, 2], [20, 21])
    tree.match([1, 1])
    assert tree.evict(1).tolist() == [20, 21]


def test_leaves_go_until_it_is_enough(make: Callable[..., Any]) -> None:
    tree = make(1)
    for i in range(4):
        tree.insert([i, i], [2 * i, 2 * i + 1])
    assert tree.evict(0).tolist() == []
    assert tree.evict(3).tolist() == [0, 1, 2, 3]
    assert tree.evict(99).tolist() == [4, 5, 6, 7]


def test_a_parent_without_children_joins_at_once(make: Callable[..., Any]) -> None:
    """The parent is as recent as the last of its children: before any inserted later."""
    tree = make(1)
    tree.insert([1, 2], [10, 11])
    tree.insert([1, 3], [99, 12])  # splits: 1, and below it 2 and 3
    tree.insert([4], [40])
    assert tree.evict(3).tolist() == [11, 12, 10]
    assert tree.evict(1).tolist() == [40]


def test_a_match_inside_a_run_makes_both_halves_recent(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1, 2, 3], [10, 11, 12])
    tree.insert([4], [40])
    tree.match([1, 2])
    assert tree.evict(1).tolist() == [40]
    assert tree.evict(1).tolist() == [12]
    assert tree.evict(1).tolist() == [10, 11]


def test_insert_never_extends_a_leaf(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1, 2], [10, 11])
    tree.insert([1, 2, 3], [0, 0, 12])
    assert tree.evict(1).tolist() == [12]


# ------------------------------------------------------------------------------------------ locks


def test_what_is_locked_is_not_evicted(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1, 2, 3], [10, 11, 12])
    match = tree.match([1, 2])
    tree.lock(match)
    assert sizes(tree) == (1, 2)
    assert tree.evict(9).tolist() == [12]
    tree.unlock(match)
    assert sizes(tree) == (2, 0)
    assert tree.evict(9).tolist() == [10, 11]


def test_a_lock_holds_the_whole_path(make: Callable[..., Any]) -> None:
    tree = make(1)
    for tail in (2, 3):
        tree.insert([1, tail], [10, 10 + tail])
    match = tree.match([1, 3])
    tree.lock(match)
    assert sizes(tree) == (1, 2)
    assert tree.evict(9).tolist() == [12]


def test_a_split_keeps_the_holders(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1, 2, 3, 4], [10, 11, 12, 13])
    match = tree.match([1, 2, 3, 4])
    tree.lock(match)
    tree.insert([1, 2, 9], [0, 0, 19])
    assert sizes(tree) == (1, 4)
    assert tree.evict(9).tolist() == [19]
    tree.unlock(match)
    assert sizes(tree) == (4, 0)


def test_locks_are_counted(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1], [10])
    match = tree.match([1])
    tree.lock(match)
    tree.lock(match)
    tree.unlock(match)
    assert tree.evict(1).tolist() == []
    tree.unlock(match)
    assert tree.evict(1).tolist() == [10]


def test_locking_makes_nothing_recent(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1], [10])
    match = tree.match([1])
    tree.insert([2], [20])
    tree.lock(match)
    tree.unlock(match)
    assert tree.evict(1).tolist() == [10]


def test_a_lock_outlives_its_match(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1], [10])
    match = tree.match([1])
    tree.lock(match)
    del match
    assert sizes(tree) == (0, 1)


def test_an_empty_match_may_be_locked(make: Callable[..., Any]) -> None:
    tree = make(1)
    tree.insert([1], [10])
    match = tree.match([2])
    tree.lock(match)
    assert sizes(tree) == (1, 0)
    assert tree.evict(1).tolist() == [10]
    tree.unlock(match)


# ----------------------------------------------------------------------------------------- misuse


class Scene:
    def __init__(self, make: Callable[..., Any]) -> None:
        self.tree = make(2)
        self.tree.insert([9] * 4, [90, 91, 92, 93])
        self.evicted = self.tree.match([9] * 4)
        self.tree.evict(4)
        self.tree.insert(range(8), range(10, 18))
        self.locked = self.tree.match(range(4))
        self.tree.lock(self.locked)
        self.unlocked = self.tree.match(range(8))
        self.released = self.tree.match(range(8))
        self.tree.lock(self.released)
        self.tree.unlock(self.released)
        self.other = make(2)
        self.other.insert(range(8), range(8))

    def visible(self) -> Any:
        return sizes(self.tree), self.tree.match(range(8)).slots.tolist()


MISUSES: dict[str, tuple[type[CacheError], Callable[[Scene], object]]] = {
    "unlock what was never locked": (CacheError, lambda s: s.tree.unlock(s.unlocked)),
    "unlock twice": (CacheError, lambda s: s.tree.unlock(s.released)),
    "lock what was evicted": (StaleHitError, lambda s: s.tree.lock(s.evicted)),
    "lock another's match": (CacheError, lambda s: s.tree.lock(s.other.match(range(8)))),
    "unlock another's match": (CacheError, lambda s: s.other.unlock(s.locked)),
    "evict a negative number": (CacheError, lambda s: s.tree.evict(-1)),
    "too few slots": (CacheError, lambda s: s.tree.insert([7] * 4, [1, 2, 3])),
    "too many slots": (CacheError, lambda s: s.tree.insert([7] * 4, [1, 2, 3, 4, 5])),
    "too few slots for the rest of a page": (CacheError, lambda s: s.tree.insert([7] * 5, [1] * 4)),
    "a negative slot": (CacheError, lambda s: s.tree.insert([7] * 4, [1, 2, -3, 4])),
    "too large a slot": (CacheError, lambda s: s.tree.insert([7] * 4, [1, 2, 2**31, 4])),
    "a negative slot in an array": (
        CacheError,
        lambda s: s.tree.insert([7] * 4, np.array([1, 2, -3, 4], np.int32)),
    ),
    "a negative token": (CacheError, lambda s: s.tree.insert([7, -7], [1, 2])),
    "too large a token": (CacheError, lambda s: s.tree.match([7, 2**31])),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_raises_and_changes_nothing(make: Callable[..., Any], misuse: str) -> None:
    scene = Scene(make)
    error, call = MISUSES[misuse]
    before = scene.visible()
    with pytest.raises(error):
        call(scene)
    assert scene.visible() == before


@pytest.mark.parametrize("page_size", [0, -1, 1025])
def test_a_page_size_out_of_its_limits_is_named(page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"page_size.*{page_size}"):
        RadixTree(page_size)
