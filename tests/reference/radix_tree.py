"""The compressed radix tree of RadixAttention (SGLang), and the public tree over token slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from prefixkv.errors import CacheError, StaleHitError
from reference.tokens import TOKEN_BYTES, tokens_to_bytes

Page = Hashable  # what is compared
MAX_SLOT = 2**31 - 1


class Node:
    """A run of pages below `parent`, which tells its children apart by their first page."""

    def __init__(self, parent: Node | None, pages: list[Page], values: list[Any], created: int):
        self.parent = parent  # None: a root, which has no pages
        self.pages = pages
        self.values = values
        self.created = created
        self.children: dict[Page, Node] = {}
        self.time = 0
        self.locks = 0
        self.is_evicted = False

    def path(self) -> Iterator[Node]:
        """Itself and all above it, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Tree:
    """Pages by their prefix, a value each. Whoever makes a walk ticks the clock first."""

    def __init__(self) -> None:
        self.clock = 0
        self._roots: dict[Hashable, Node] = {}
        self._created = count()

    def root(self, namespace: Hashable) -> Node:
        return self._roots.setdefault(namespace, Node(None, [], [], -1))

    def nodes(self) -> Iterator[Node]:
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            pending += node.children.values()
            if node.parent is not None:
                yield node

    def find(self, node: Node, pages: Sequence[Page]) -> list[Any]:
        """Values of the longest run of `pages` below the node; changes nothing."""
        values: list[Any] = []
        while len(values) < len(pages) and pages[len(values)] in node.children:
            node = node.children[pages[len(values)]]
            same = _common(node.pages, pages[len(values) :])
            values += node.values[:same]
            if same < len(node.pages):
                break
        return values

    def walk(self, node: Node, pages: Sequence[Page]) -> Node:
        """Where that run ends; an edge that it ends in is split, and all on the way is recent."""
        done = 0
        while done < len(pages) and pages[done] in node.children:
            node = node.children[pages[done]]
            node.time = self.clock
            same = _common(node.pages, pages[done:])
            done += same
            if same < len(node.pages):
                return self.split(node, same)
        return node

    def split(self, lower: Node, at: int) -> Node:
        """A new node takes the first pages of another, which stays itself to all that know it."""
        assert lower.parent is not None
        upper = Node(lower.parent, lower.pages[:at], lower.values[:at], next(self._created))
        upper.time, upper.locks = lower.time, lower.locks
        upper.children[lower.pages[at]] = lower
        lower.parent.children[lower.pages[0]] = upper
        lower.parent = upper
        del lower.pages[:at], lower.values[:at]
        return upper

    def add(self, node: Node, pages: Sequence[Page], values: Sequence[Any]) -> Node:
        child = Node(node, list(pages), list(values), next(self._created))
        child.time = self.clock
        node.children[pages[0]] = child
        return child

    def lock(self, node: Node, more: int) -> None:
        for above in node.path():
            above.locks += more

    def eviction_order(self, enough: int) -> list[Node]:
        """The least recent unlocked leaves, whole, until they have `enough` pages."""
        order: list[Node] = []
        while sum(len(node.pages) for node in order) < enough:
            leaves = [
                node
                for node in self.nodes()
                if not node.locks
                and node not in order
                and all(child in order for child in node.children.values())
            ]
            if not leaves:
                break
            order.append(min(leaves, key=lambda leaf: (leaf.time, leaf.created)))
        return order

    def evict(self, enough: int) -> list[Node]:
        order = self.eviction_order(enough)
        for leaf in order:
            assert leaf.parent is not None
            del leaf.parent.children[leaf.pages[0]]
            leaf.is_evicted = True
        return order


def _common(pages: Sequence[Page], others: Sequence[Page]) -> int:
    pairs = zip(pages, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(pages), len(others)))


class Match:
    """Where a walk ended; holds nothing unless it is locked."""

    def __init__(self, tree: RadixTree, node: Node, slots: list[int]) -> None:
        self.tree = tree
        self.node = node
        self.num_tokens = len(slots)
        self.slots = np.array(slots, np.int32)


class RadixTree:
    """Token slots by the prefix of tokens, in whole pages."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._tree = Tree()
        self._locks: Counter[Match] = Counter()

    def insert(self, tokens: Any, slots: Any, namespace: str | None = None) -> int:
        """Tokens of it that were there already; they keep their slots."""
        pages = self._pages(tokens)
        values = self._slots(slots, len(tokens))
        self._tree.clock += 1
        root = self._tree.root(namespace)
        known = len(self._tree.find(root, pages))
        end = self._tree.walk(root, pages)
        if known < len(pages):
            self._tree.add(end, pages[known:], values[known : len(pages)])
        return known * self.page_size

    def match(self, tokens: Any, namespace: str | None = None) -> Match:
        pages = self._pages(tokens)
        self._tree.clock += 1
        root = self._tree.root(namespace)
        values = self._tree.find(root, pages)
        return Match(self, self._tree.walk(root, pages), [s for page in values for s in page])

    def lock(self, match: Match) -> None:
        self._check(match)
        if match.node.is_evicted:
            raise StaleHitError("the match was evicted since; match again")
        self._locks[match] += 1
        self._tree.lock(match.node, 1)

    def unlock(self, match: Match) -> None:
        self._check(match)
        if not self._locks[match]:
            raise CacheError("the match is not locked; was it unlocked twice?")
        self._locks[match] -= 1
        self._tree.lock(match.node, -1)

    def evict(self, num_tokens: int) -> Any:
        if num_tokens < 0:
            raise CacheError(f"num_tokens is {num_tokens}; it must be 0 or more")
        gone = self._tree.evict(-(-num_tokens // self.page_size))
        return np.array([s for node in gone for page in node.values for s in page], np.int32)

    @property
    def evictable_size(self) -> int:
        return self._size(lambda node: not node.locks)

    @property
    def protected_size(self) -> int:
        return self._size(lambda node: node.locks > 0)

    def _size(self, counts: Any) -> int:
        nodes = [node for node in self._tree.nodes() if counts(node)]
        return self.page_size * sum(len(node.pages) for node in nodes)

    def _pages(self, tokens: Any) -> list[Page]:
        data, step = tokens_to_bytes(tokens), TOKEN_BYTES * self.page_size
        return [data[i : i + step] for i in range(0, len(data) - step + 1, step)]

    def _slots(self, slots: Any, num_tokens: int) -> list[Any]:
        values = [int(slot) for slot in slots]
        if len(values) != num_tokens:
            raise CacheError(f"{len(values)} slots for {num_tokens} tokens")
        if not all(0 <= slot <= MAX_SLOT for slot in values):
            raise CacheError(f"a slot is not in 0..{MAX_SLOT}")
        size = self.page_size
        return [values[i : i + size] for i in range(0, num_tokens - size + 1, size)]

    def _check(self, match: Match) -> None:
        if match.tree is not self:
            raise CacheError("the match belongs to another tree")
