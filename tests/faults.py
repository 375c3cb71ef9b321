"""Managers with a fault each, for the tests of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faults_of_seam as seam
from faults_of_seam import Fault
from reference import (
    BlockTable,
    Grant,
    Hit,
    PagedManager,
    Pin,
    RadixManager,
    ReferenceManager,
    TokenSequence,
)
from reference.radix_tree import Node, Tree

# ------------------------------------------------------------------------------------------- hash


class HeadFirstFree(ReferenceManager):
    def free(self, table: BlockTable) -> None:
        table.blocks.reverse()
        super().free(table)


class NoTouchOnHit(ReferenceManager):
    def _touch(self, _: BlockTable, hit: Hit) -> None:
        for block in hit.blocks:
            self._ref_cnt[block] += 1  # but it stays in the free queue


class HashKeptAfterEviction(ReferenceManager):
    def _evict(self, count: int, owner: str | None) -> list[int]:
        evicted = [self._cached.popitem(False)[0] for _ in range(count)]
        for block in evicted:
            self._ref_cnt[block] = 1
            self._owner[block] = owner
        return evicted


class HitCoversTheWholePrompt(ReferenceManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        seq.num_tokens += 1
        hit = super().lookup(seq, group)
        seq.num_tokens -= 1
        return hit


class RefusalKeepsReferences(ReferenceManager):
    def allocate(self, table: BlockTable, num_tokens: int, hit: Hit | None = None) -> Grant | None:
        grant = super().allocate(table, num_tokens, hit)
        if grant is None and hit is not None:
            self._touch(table, hit)
        return grant


class CommitBeforeTheStep(ReferenceManager):
    def allocate(self, table: BlockTable, num_tokens: int, hit: Hit | None = None) -> Grant | None:
        grant = super().allocate(table, num_tokens, hit)
        if grant is not None and hit is not None:
            full = num_tokens // self.block_size
            keys = self._keys(hit.seq, hit.group, 0, full)
            for block, key in zip(table.blocks[:full], keys, strict=False):
                if key not in self._index:
                    self._index[key] = block
                    self._key[block] = key
        return grant


class LaterCopyServes(ReferenceManager):
    def commit(self, table: BlockTable, seq: TokenSequence, num_computed_tokens: int) -> None:
        super().commit(table, seq, num_computed_tokens)
        for key, others in self._copies.items():
            self._index[key], others[-1] = others[-1], self._index[key]


class GroupsShare(ReferenceManager):
    def _keys(self, seq: TokenSequence, group: int, start: int, stop: int) -> list[bytes]:
        return super()._keys(seq, group and 0, start, stop)


class NamespacesShare(ReferenceManager):
    def sequence(self, token_ids: Any = (), *_: Any, **__: Any) -> TokenSequence:
        return super().sequence(token_ids)


class StaleHitIsTaken(ReferenceManager):
    def _is_stale(self, _: Hit) -> bool:
        return False

    def _touch(self, _: BlockTable, hit: Hit) -> None:
        for block in hit.blocks:
            if not self._ref_cnt[block]:
                self._cached.pop(block, None)
                if block in self._blank:
                    self._blank.remove(block)
            self._ref_cnt[block] += 1


class BlankGoesToTheBack(ReferenceManager):
    def _drop(self, holder: BlockTable | Pin) -> None:
        before = len(self._blank)
        super()._drop(holder)
        self._blank = self._blank[before:] + self._blank[:before]


class EveryCopyIsTold(ReferenceManager):
    def _cache(self, table: BlockTable, seq: TokenSequence, start: int, stop: int) -> None:
        super()._cache(table, seq, start, stop)
        self._events = [event for event in self._events if event.kind != "stored"]
        self._stored(seq, table.group, start, stop)


# ------------------------------------------------------------------------------------------- radix


def with_tree(tree: type[Tree]) -> Fault:
    class Faulty(RadixManager):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._tree = tree()

    Faulty.__name__ = tree.__name__
    return Faulty


class EvictsLocked(Tree):
    def eviction_order(self, enough: int) -> list[Node]:
        locks = {node: node.locks for node in self.nodes()}
        for node in locks:
            node.locks = 0
        order = super().eviction_order(enough)
        for node, count in locks.items():
            node.locks = count
        return order


class EvictsTheNewest(Tree):
    def eviction_order(self, enough: int) -> list[Node]:
        for node in self.nodes():
            node.time = -node.time
        order = super().eviction_order(enough)
        for node in self.nodes():
            node.time = -node.time
        return order


class SplitWithoutLocks(Tree):
    def split(self, lower: Node, at: int) -> Node:
        upper = super().split(lower, at)
        upper.locks = 0
        return upper


class SplitIsNew(Tree):
    def split(self, lower: Node, at: int) -> Node:
        upper = super().split(lower, at)
        lower.time = 0
        return upper


class ExtendsASharedLeaf(RadixManager):
    def _extend(self, table: BlockTable, node: Node, end: Node, *new: Any) -> Node:
        locks, node.locks = node.locks, 1
        table.owns_leaf = True
        end = super()._extend(table, node, end, *new)
        node.locks = locks
        return end


class NeverExtendsALeaf(RadixManager):
    def _extend(self, table: BlockTable, *args: Any) -> Node:
        table.owns_leaf = False
        return super()._extend(table, *args)


class KeepsItsDuplicate(RadixManager):
    def _cache(self, table: BlockTable, seq: TokenSequence, start: int, stop: int) -> None:
        before = table.blocks.copy()
        super()._cache(table, seq, start, stop)
        table.blocks = before


class RadixNamespacesShare(RadixManager):
    def _root(self, _: TokenSequence, group: int) -> Node:
        return self._tree.root(group)


class RadixHitCoversTheWholePrompt(RadixManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        blocks = self._find(seq, group, seq.num_tokens // self.block_size)
        return Hit(blocks, len(blocks) * self.block_size, seq, group)


class RadixStaleHitIsTaken(RadixManager):
    def _is_stale(self, _: Hit) -> bool:
        return False


class EvictionIsNotTold(RadixManager):
    def _evicted(self, *_: Any) -> None:
        pass


# ------------------------------------------------------------------------------------------- paged


class PagedHitCoversTheLastToken(PagedManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        longer = seq.fork()
        longer.append([0])
        return super().lookup(longer, group)


class TheNewestPinServes(PagedManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        self._pins.reverse()
        hit = super().lookup(seq, group)
        self._pins.reverse()
        return hit


class PagedStaleHitIsTaken(PagedManager):
    def _is_stale(self, _: Hit) -> bool:
        return False


class PagedHitsFullBlocksOnly(PagedManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        hit = super().lookup(seq, group)
        full = hit.num_tokens // self.block_size
        return hit._replace(num_tokens=full * self.block_size, blocks=hit.blocks[:full])


class GroupsShareAPin(PagedManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        hits = [super(GroupsShareAPin, self).lookup(seq, g) for g in range(self.num_groups)]
        return max(hits, key=lambda hit: hit.num_tokens)._replace(group=group)


class ToldFromTheTop(PagedManager):
    def release(self, pin: Pin) -> None:
        before = self._events.copy()
        super().release(pin)
        for event in self._events[len(before) :]:
            event.block_hashes.reverse()


# -------------------------------------------------------------------------------------- all of them


def in_each_system(fault_in: Callable[[Any], Fault]) -> list[Fault]:
    faults = [fault_in(right) for right in TWINS]
    for fault, right in zip(faults, TWINS, strict=True):
        fault.__name__ = f"{fault.__name__}Of{right.__name__}"
    return faults


TWINS: list[Any] = [ReferenceManager, RadixManager, PagedManager]
# Seen in a comparison only: the answers would be right.
COMPARED: list[Fault] = [
    *in_each_system(seam.allocate_many_goes_on_after_a_refusal),
    *in_each_system(seam.reset_is_not_told),
    HeadFirstFree,
    LaterCopyServes,
    BlankGoesToTheBack,
    NeverExtendsALeaf,
    TheNewestPinServes,
    with_tree(EvictsTheNewest),
    with_tree(SplitIsNew),
]
# Those that would hand a request another's K/V or no logits, lose a block, or tell untrue events.
WRONG_ANSWERS: list[Fault] = [
    *in_each_system(seam.no_copy_on_write),
    *in_each_system(seam.copy_not_asked_for),
    *in_each_system(seam.fork_without_counting),
    *in_each_system(seam.pin_without_counting),
    *in_each_system(seam.release_frees_twice),
    *in_each_system(seam.commit_to_shared_block),
    *in_each_system(seam.commit_many_commits_the_sampled_token),
    *in_each_system(seam.commit_many_checks_as_it_goes),
    NoTouchOnHit,
    HashKeptAfterEviction,
    HitCoversTheWholePrompt,
    RefusalKeepsReferences,
    CommitBeforeTheStep,
    GroupsShare,
    NamespacesShare,
    StaleHitIsTaken,
    EveryCopyIsTold,
    ExtendsASharedLeaf,
    KeepsItsDuplicate,
    RadixNamespacesShare,
    RadixHitCoversTheWholePrompt,
    RadixStaleHitIsTaken,
    EvictionIsNotTold,
    PagedHitCoversTheLastToken,
    PagedStaleHitIsTaken,
    PagedHitsFullBlocksOnly,
    GroupsShareAPin,
    ToldFromTheTop,
    with_tree(EvictsLocked),
    with_tree(SplitWithoutLocks),
]
