"""Managers with a fault each, for the tests of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reference import (
    BlockTable,
    Grant,
    Hit,
    Manager,
    PagedManager,
    Pin,
    RadixManager,
    ReferenceManager,
    TokenSequence,
)
from reference.radix_tree import Node, Tree

Fault = type[Manager]
TWINS: list[Any] = [ReferenceManager, RadixManager, PagedManager]
# Seen in a comparison only: the answers would be right.
COMPARED: list[Fault] = []
# Those that would hand a request another's K/V or no logits, lose a block, or tell untrue events.
WRONG_ANSWERS: list[Fault] = []


def on_each(faults: list[Fault]) -> Callable[[Callable[[Any], Fault]], Callable[[Any], Fault]]:
    """The fault in each of the three systems."""

    def add(fault_in: Callable[[Any], Fault]) -> Callable[[Any], Fault]:
        for base in TWINS:
            fault = fault_in(base)
            fault.__name__ = f"{fault.__name__}Of{base.__name__}"
            faults.append(fault)
        return fault_in

    return add


def on_one(faults: list[Fault]) -> Callable[[Fault], Fault]:
    def add(fault: Fault) -> Fault:
        faults.append(fault)
        return fault

    return add


# ------------------------------------------------------------------------------------- of the seam


@on_each(WRONG_ANSWERS)
def no_copy_on_write(base: Any) -> Fault:
    class NoCopyOnWrite(base):
        def _shared(self, *_: Any) -> list[int]:
            return []

    return NoCopyOnWrite


@on_each(WRONG_ANSWERS)
def copy_not_asked_for(base: Any) -> Fault:
    class CopyNotAskedFor(base):
        def allocate(self, *args: Any) -> Grant | None:
            grant: Grant | None = super().allocate(*args)
            return grant and grant._replace(copies=[])

    return CopyNotAskedFor


@on_each(WRONG_ANSWERS)
def fork_without_counting(base: Any) -> Fault:
    class ForkWithoutCounting(base):
        def _hold(self, holder: BlockTable | Pin) -> None:
            if isinstance(holder, Pin):
                super()._hold(holder)

    return ForkWithoutCounting


@on_each(WRONG_ANSWERS)
def pin_without_counting(base: Any) -> Fault:
    class PinWithoutCounting(base):
        def _hold(self, holder: BlockTable | Pin) -> None:
            if isinstance(holder, BlockTable):
                super()._hold(holder)

        def _drop(self, holder: BlockTable | Pin) -> None:
            if isinstance(holder, BlockTable):
                super()._drop(holder)

    return PinWithoutCounting


@on_each(WRONG_ANSWERS)
def release_frees_twice(base: Any) -> Fault:
    class ReleaseFreesTwice(base):
        def release(self, pin: Pin) -> None:
            super().release(pin)
            self._drop(pin)

    return ReleaseFreesTwice


@on_each(WRONG_ANSWERS)
def commit_to_shared_block(base: Any) -> Fault:
    class CommitToSharedBlock(base):
        def _check_commit(self, table: BlockTable, *args: Any) -> None:
            counts, self._ref_cnt = self._ref_cnt, [1] * self.num_blocks
            try:
                super()._check_commit(table, *args)
            finally:
                self._ref_cnt = counts

    return CommitToSharedBlock


@on_each(WRONG_ANSWERS)
def commit_many_commits_the_sampled_token(base: Any) -> Fault:
    class CommitManyCommitsTheSampledToken(base):
        def commit_many(self, tables: Any, seqs: Any, token_ids: Any) -> None:
            super().commit_many(tables, seqs, token_ids)
            for table, seq in zip(tables, seqs, strict=True):
                self.commit(table, seq, min(table.num_tokens, seq.num_tokens))

    return CommitManyCommitsTheSampledToken


@on_each(WRONG_ANSWERS)
def commit_many_checks_as_it_goes(base: Any) -> Fault:
    class CommitManyChecksAsItGoes(base):
        def commit_many(self, tables: Any, seqs: Any, token_ids: Any) -> None:
            self._check_many(tables, seqs)
            self._check_many(seqs, token_ids)
            for table, seq, token in zip(tables, seqs, token_ids, strict=True):
                seq.append([token])
                self.commit(table, seq, table.num_computed_tokens + 1)

    return CommitManyChecksAsItGoes


@on_each(COMPARED)
def allocate_many_goes_on_after_a_refusal(base: Any) -> Fault:
    class AllocateManyGoesOnAfterARefusal(base):
        def allocate_many(self, tables: Any, num_tokens: Any) -> list[Grant | None]:
            pairs = zip(tables, num_tokens, strict=True)
            return [self.allocate(table, room) for table, room in pairs]

    return AllocateManyGoesOnAfterARefusal


@on_each(COMPARED)
def reset_is_not_told(base: Any) -> Fault:
    class ResetIsNotTold(base):
        def reset(self) -> bool:
            events = self._events.copy()
            done: bool = super().reset()
            self._events = events
            return done

    return ResetIsNotTold


# ------------------------------------------------------------------------------------------- hash


@on_one(COMPARED)
class HeadFirstFree(ReferenceManager):
    def free(self, table: BlockTable) -> None:
        table.blocks.reverse()
        super().free(table)


@on_one(WRONG_ANSWERS)
class NoTouchOnHit(ReferenceManager):
    def _touch(self, _: BlockTable, hit: Hit) -> None:
        for block in hit.blocks:
            self._ref_cnt[block] += 1  # but it stays in the free queue


@on_one(WRONG_ANSWERS)
class HashKeptAfterEviction(ReferenceManager):
    def _evict(self, count: int, owner: str | None) -> list[int]:
        evicted = [self._cached.popitem(False)[0] for _ in range(count)]
        for block in evicted:
            self._ref_cnt[block] = 1
            self._owner[block] = owner
        return evicted


@on_one(WRONG_ANSWERS)
class HitCoversTheWholePrompt(ReferenceManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        seq.num_tokens += 1
        hit = super().lookup(seq, group)
        seq.num_tokens -= 1
        return hit


@on_one(WRONG_ANSWERS)
class RefusalKeepsReferences(ReferenceManager):
    def allocate(self, table: BlockTable, num_tokens: int, hit: Hit | None = None) -> Grant | None:
        grant = super().allocate(table, num_tokens, hit)
        if grant is None and hit is not None:
            self._touch(table, hit)
        return grant


@on_one(WRONG_ANSWERS)
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


@on_one(COMPARED)
class LaterCopyServes(ReferenceManager):
    def commit(self, table: BlockTable, seq: TokenSequence, num_computed_tokens: int) -> None:
        super().commit(table, seq, num_computed_tokens)
        for key, others in self._copies.items():
            self._index[key], others[-1] = others[-1], self._index[key]


@on_one(WRONG_ANSWERS)
class GroupsShare(ReferenceManager):
    def _keys(self, seq: TokenSequence, group: int, start: int, stop: int) -> list[bytes]:
        return super()._keys(seq, group and 0, start, stop)


@on_one(WRONG_ANSWERS)
class NamespacesShare(ReferenceManager):
    def sequence(self, token_ids: Any = (), *_: Any, **__: Any) -> TokenSequence:
        return super().sequence(token_ids)


@on_one(WRONG_ANSWERS)
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


@on_one(COMPARED)
class BlankGoesToTheBack(ReferenceManager):
    def _drop(self, holder: BlockTable | Pin) -> None:
        before = len(self._blank)
        super()._drop(holder)
        self._blank = self._blank[before:] + self._blank[:before]


@on_one(WRONG_ANSWERS)
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


WRONG_ANSWERS += [with_tree(EvictsLocked), with_tree(SplitWithoutLocks)]
COMPARED += [with_tree(EvictsTheNewest), with_tree(SplitIsNew)]


@on_one(WRONG_ANSWERS)
class ExtendsASharedLeaf(RadixManager):
    def _extend(self, table: BlockTable, node: Node, end: Node, *new: Any) -> Node:
        locks, node.locks = node.locks, 1
        table.owns_leaf = True
        end = super()._extend(table, node, end, *new)
        node.locks = locks
        return end


@on_one(COMPARED)
class NeverExtendsALeaf(RadixManager):
    def _extend(self, table: BlockTable, *args: Any) -> Node:
        table.owns_leaf = False
        return super()._extend(table, *args)


@on_one(WRONG_ANSWERS)
class KeepsItsDuplicate(RadixManager):
    def _cache(self, table: BlockTable, seq: TokenSequence, start: int, stop: int) -> None:
        before = table.blocks.copy()
        super()._cache(table, seq, start, stop)
        table.blocks = before


@on_one(WRONG_ANSWERS)
class RadixNamespacesShare(RadixManager):
    def _root(self, _: TokenSequence, group: int) -> Node:
        return self._tree.root(group)


@on_one(WRONG_ANSWERS)
class RadixHitCoversTheWholePrompt(RadixManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        blocks = self._find(seq, group, seq.num_tokens // self.block_size)
        return Hit(blocks, len(blocks) * self.block_size, seq, group)


@on_one(WRONG_ANSWERS)
class RadixStaleHitIsTaken(RadixManager):
    def _is_stale(self, _: Hit) -> bool:
        return False


@on_one(WRONG_ANSWERS)
class EvictionIsNotTold(RadixManager):
    def _evicted(self, *_: Any) -> None:
        pass


# ------------------------------------------------------------------------------------------- paged


@on_one(WRONG_ANSWERS)
class PagedHitCoversTheLastToken(PagedManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        longer = seq.fork()
        longer.append([0])
        return super().lookup(longer, group)


@on_one(COMPARED)
class TheNewestPinServes(PagedManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        self._pins.reverse()
        hit = super().lookup(seq, group)
        self._pins.reverse()
        return hit


@on_one(WRONG_ANSWERS)
class PagedStaleHitIsTaken(PagedManager):
    def _is_stale(self, _: Hit) -> bool:
        return False


@on_one(WRONG_ANSWERS)
class PagedHitsFullBlocksOnly(PagedManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        hit = super().lookup(seq, group)
        full = hit.num_tokens // self.block_size
        return hit._replace(num_tokens=full * self.block_size, blocks=hit.blocks[:full])


@on_one(WRONG_ANSWERS)
class GroupsShareAPin(PagedManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        hits = [super(GroupsShareAPin, self).lookup(seq, g) for g in range(self.num_groups)]
        return max(hits, key=lambda hit: hit.num_tokens)._replace(group=group)


@on_one(WRONG_ANSWERS)
class ToldFromTheTop(PagedManager):
    def release(self, pin: Pin) -> None:
        before = self._events.copy()
        super().release(pin)
        for event in self._events[len(before) :]:
            event.block_hashes.reverse()
