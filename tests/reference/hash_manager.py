"""`hash`: chained block hashes and a free queue, as vLLM V1 does it.

Two facts carry it:

* The hash of a block covers its parent's hash, so equal hashes mean equal prefixes, and a dict from
  hash to block is all that a lookup needs.
* Blank blocks enter the free queue only at its front and cached ones only at its back, so the queue
  is always a stack of blank blocks followed by an ordered map of cached ones.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import groupby
from typing import Any

from reference.base import Block, BlockTable, Hit, Manager, Pin
from reference.tokens import ALGORITHMS, TokenSequence


class ReferenceManager(Manager):
    """The plain Python baseline of the benchmarks too, so its loops are as tight as can be.

    `_key[block]` is None for a blank block, else a block hash, with the group's id behind it in
    groups other than 0. `_index` maps a key to the block that serves it and `_copies` to the later
    copies of the same content. `_cached` has the cached free blocks, which come after `_blank`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._key: list[bytes | None] = [None] * self.num_blocks
        self._index: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        self._num_evictions = 0
        self._hash_size = len(ALGORITHMS[self.hash_algorithm][0])

    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        """The longest run of cached blocks from the start; changes nothing."""
        self._check_sequence(seq)
        self._check_group(group)
        # Never the block of the last token: its logits are needed, so it is computed.
        most = max(seq.num_tokens - 1, 0) // self.block_size
        blocks = []
        for block in map(self._index.get, self._keys(seq, group, 0, most)):
            if block is None:
                break
            blocks.append(block)
        return Hit(blocks, len(blocks) * self.block_size, seq, group, self._num_evictions)

    @property
    def num_free_blocks(self) -> int:
        return len(self._blank) + len(self._cached)

    def free_blocks(self) -> list[int]:
        """Ids in the order of reuse."""
        return [*reversed(self._blank), *self._cached]

    def block(self, index: int) -> Block:
        self._check_block(index)
        key = self._key[index]
        block_hash = None if key is None else key[: self._hash_size]
        return Block(self._ref_cnt[index], block_hash, key is not None, self._owner[index])

    # ------------------------------------------------------------------------------- steps of them

    def _keys(self, seq: TokenSequence, group: int, start: int, stop: int) -> list[bytes]:
        hashes = seq.hashes[start:stop]
        return [h + group.to_bytes(4) for h in hashes] if group else hashes

    def _is_stale(self, hit: Hit) -> bool:
        if hit.source == self._num_evictions:
            return False
        held = [self._key[block] for block in hit.blocks]
        return held != self._keys(hit.seq, hit.group, 0, len(held))

    def _num_unheld(self, hit: Hit) -> int:
        return sum(not self._ref_cnt[block] for block in hit.blocks)

    def _touch(self, table: BlockTable, hit: Hit) -> None:
        del table  # its blocks say all
        ref_cnt, cached = self._ref_cnt, self._cached
        for block in hit.blocks:
            count = ref_cnt[block]
            if not count:
                del cached[block]
            ref_cnt[block] = count + 1

    def _take(self, count: int, owner: str | None) -> list[int]:
        """A cached block loses its hash here, and only here."""
        if count <= 0:
            return []
        blank = self._blank
        new = blank[: -count - 1 : -1]
        del blank[-count:]
        ref_cnt, owner_of = self._ref_cnt, self._owner
        for block in new:
            ref_cnt[block] = 1
            owner_of[block] = owner
        if count > len(new):
            new += self._evict(count - len(new), owner)
        return new

    def _evict(self, count: int, owner: str | None) -> list[int]:
        pop, key_of, index, copies = self._cached.popitem, self._key, self._index, self._copies
        ref_cnt, owner_of, events = self._ref_cnt, self._owner, self.events
        self._num_evictions += count
        evicted = []
        for _ in range(count):
            block, key = pop(False)
            key_of[block] = None
            if key in copies:
                self._evict_copy(key, block)
            else:
                del index[key]
                if events:
                    size = self._hash_size
                    self._evicted(key[:size], int.from_bytes(key[size:]))
            ref_cnt[block] = 1
            owner_of[block] = owner
            evicted.append(block)
        return evicted

    def _evict_copy(self, key: bytes, block: int) -> None:
        others = self._copies[key]
        if self._index[key] == block:  # the next copy in order of commit serves from now on
            self._index[key] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._copies[key]

    def _cache(self, table: BlockTable, seq: TokenSequence, start: int, stop: int) -> None:
        keys = self._keys(seq, table.group, start, stop)
        if self.events:
            fresh = groupby(range(start, stop), lambda i: keys[i - start] not in self._index)
            for run in [list(blocks) for is_new, blocks in fresh if is_new]:
                self._stored(seq, table.group, run[0], run[-1] + 1)
        key_of, copies = self._key, self._copies
        serve = self._index.setdefault
        for block, key in zip(table.blocks[start:stop], keys, strict=True):
            key_of[block] = key
            if serve(key, block) != block:
                copies.setdefault(key, []).append(block)

    def _num_pinnable(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.block_size

    def _node_of(self, table: BlockTable, num_blocks: int) -> None:
        """There is no tree."""

    def _hold(self, holder: BlockTable | Pin) -> None:
        for block in holder.blocks:
            self._ref_cnt[block] += 1

    def _drop(self, holder: BlockTable | Pin) -> None:
        ref_cnt, key_of, cached = self._ref_cnt, self._key, self._cached
        blank = []
        for block in reversed(holder.blocks):
            count = ref_cnt[block] = ref_cnt[block] - 1
            if not count:
                key = key_of[block]
                if key is None:
                    blank.append(block)
                else:
                    cached[block] = key
        self._blank += reversed(blank)

    def _forget(self) -> None:
        self._blank = self.free_blocks()[::-1]
        self._cached.clear()
        self._index.clear()
        self._copies.clear()
        self._key = [None] * self.num_blocks
        self._num_evictions += 1
