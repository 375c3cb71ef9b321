"""The radix tree under random traces, native and twin step by step; and what an eviction costs."""

from __future__ import annotations

import gc
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from faults import EvictsTheNewest, SplitWithoutLocks
from prefixkv.cache import RadixTree
from prefixkv.errors import CacheError
from reference import RadixTree as Twin
from reference.radix_tree import Node, Tree

NUM_STEPS = 250
VOCABULARY = 3
NAMESPACES = [None, "tenant"]


class Trace:
    """The same random calls on two trees, whose answers must be equal."""

    def __init__(self, trees: list[Any], seed: int) -> None:
        self.trees = trees
        self.rng = random.Random(seed)
        self.matches: list[list[Any]] = []  # one for each tree; some locked, some gone stale
        self.earlier: list[tuple[list[int], str | None]] = [([], None)]
        self.next_slot = 0
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        steps = [self.insert, self.match, self.lock, self.unlock, self.evict]
        for step in self.rng.choices(steps, [6, 6, 4, 4, 3], k=NUM_STEPS):
            step()
            self.agree([(tree.evictable_size, tree.protected_size) for tree in self.trees])
            if hasattr(self.trees[0], "check"):
                self.trees[0].check()
        return self.seen

    def agree(self, answers: list[Any]) -> Any:
        assert answers[0] == answers[1]
        return answers[0]

    def tokens(self) -> tuple[list[int], str | None]:
        """Often the beginning of earlier ones, with another end."""
        earlier, namespace = self.rng.choice(self.earlier)
        if self.rng.random() < 0.3:
            earlier, namespace = [], self.rng.choice(NAMESPACES)
        count = self.rng.randrange(2 * self.trees[0].page_size + 2)
        tokens = earlier[: self.rng.randint(0, len(earlier))]
        tokens = tokens + [self.rng.randrange(VOCABULARY) for _ in range(count)]
        self.earlier = [*self.earlier[-9:], (tokens, namespace)]
        return tokens, namespace

    def insert(self) -> None:
        tokens, namespace = self.tokens()
        slots = range(self.next_slot, self.next_slot + len(tokens))
        self.next_slot += len(tokens)
        answers = [tree.insert(tokens, slots, namespace) for tree in self.trees]
        self.seen["known tokens"] += self.agree(answers)

    def match(self) -> None:
        tokens, namespace = self.tokens()
        matches = [tree.match(tokens, namespace) for tree in self.trees]
        self.agree([(match.num_tokens, match.slots.tolist()) for match in matches])
        self.matches = [*self.matches[-9:], matches]

    def lock(self) -> None:
        self.on_a_match("lock")

    def unlock(self) -> None:
        """Often of a match that is not locked."""
        self.on_a_match("unlock")

    def on_a_match(self, call: str) -> None:
        if not self.matches:
            return
        answers: list[Any] = []
        for tree, match in zip(self.trees, self.rng.choice(self.matches), strict=True):
            try:
                answers.append(getattr(tree, call)(match))
            except CacheError as error:
                answers.append(type(error).__name__)
        self.seen[f"{call}: {self.agree(answers)}"] += 1

    def evict(self) -> None:
        count = self.rng.randrange(6 * self.trees[0].page_size)
        evicted = [tree.evict(count).tolist() for tree in self.trees]
        self.seen["evicted"] += len(self.agree(evicted))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_native_and_twin_agree(page_size: int, seed: int) -> None:
    Trace([RadixTree(page_size), Twin(page_size)], seed).run()


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_native_and_twin_agree_at_length(page_size: int) -> None:
    for seed in range(1000, 1600):
        Trace([RadixTree(page_size), Twin(page_size)], seed).run()


def test_the_traces_reach_every_rare_case() -> None:
    seen = sum((Trace([Twin(2), Twin(2)], seed).run() for seed in range(20)), Counter[str]())
    cases = ["known tokens", "evicted", "lock: None", "lock: StaleHitError"]
    cases += ["unlock: None", "unlock: CacheError"]
    assert {case: seen[case] for case in cases if seen[case] < 20} == {}


# ------------------------------------------------------------------------------- deliberate faults


class LockIsARefresh(Tree):
    def lock(self, node: Node, more: int) -> None:
        super().lock(node, more)
        for above in node.path():
            above.time = self.clock


class NoClock(Tree):
    def walk(self, node: Node, pages: Any) -> Node:
        self.clock = 0
        return super().walk(node, pages)


@pytest.mark.parametrize("fault", [EvictsTheNewest, SplitWithoutLocks, LockIsARefresh, NoClock])
def test_the_traces_catch(fault: type[Tree]) -> None:
    for seed in range(40):
        faulty = Twin(1)
        faulty._tree = fault()
        try:
            Trace([faulty, Twin(1)], seed).run()
        except AssertionError:
            return
    pytest.fail("no trace noticed")


# ----------------------------------------------------------------------------- cost of an eviction

FEW, MANY = 2_000, 130_000
EVICTIONS = 200


def tree_of(num_leaves: int) -> Any:
    """Leaves of one token, used in an order that is not that of their making."""
    tree = RadixTree(1)
    for token in range(num_leaves):
        tree.insert([token], [token])
    for token in np.random.default_rng(0).permutation(num_leaves).tolist():
        tree.match([token])
    return tree


def evict_one_by_one(tree: Any) -> list[int]:
    return [int(tree.evict(1)[0]) for _ in range(EVICTIONS)]


def put_back(tree: Any, tokens: list[int]) -> None:
    for token in tokens:
        tree.insert([token], [token])


@pytest.fixture(scope="module")
def trees() -> tuple[Any, Any]:
    return tree_of(FEW), tree_of(MANY)


def test_an_eviction_visits_no_more_nodes_in_a_large_tree(trees: tuple[Any, Any]) -> None:
    visited = []
    for tree in trees:
        before = tree._num_visited
        put_back(tree, evict_one_by_one(tree))
        visited.append((tree._num_visited - before) / EVICTIONS)
    few, many = visited
    assert 1 <= few <= 4 * math.log2(FEW)
    assert many <= few * math.log(MANY) / math.log(FEW) + 1


def cpu_time(call: Callable[[], list[int]]) -> tuple[float, list[int]]:
    start = time.thread_time()
    answer = call()
    return time.thread_time() - start, answer


def test_an_eviction_costs_at_most_3_times_as_much_in_a_large_tree(trees: tuple[Any, Any]) -> None:
    """CPU time, taken by turns, the best of many."""
    best = [math.inf, math.inf]
    gc.disable()
    try:
        for attempt in range(100):
            for i, tree in enumerate(trees):
                seconds, evicted = cpu_time(lambda tree=tree: evict_one_by_one(tree))
                best[i] = min(best[i], seconds)
                put_back(tree, evicted)
            # More rounds only help a noisy machine to one quiet measurement of each.
            if attempt >= 10 and best[1] <= 3 * best[0]:
                break
    finally:
        gc.enable()
    assert best[1] <= 3 * best[0]
