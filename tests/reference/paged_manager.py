"""`paged`: block tables as in the PagedAttention paper; only what is reserved is found."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from prefixkv.errors import CacheError
from reference.base import Block, BlockTable, Hit, Manager, Pin
from reference.tokens import TokenSequence

Content = tuple[int, bytes]  # group and block hash


class PagedManager(Manager):
    """No block is findable by itself: all free blocks are blank, and lookups ask the pins."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_pins: Counter[Content] = Counter()  # that have this full block

    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        """The most tokens that a pin has in common with it, of equal ones the oldest pin's."""
        self._check_sequence(seq)
        self._check_group(group)
        best, source = 0, None
        for pin in self._pins:
            # Never the last token: its logits are needed, so it is computed.
            shared = min(_tokens(pin).shared_prefix(seq), pin.num_tokens, seq.num_tokens - 1)
            if pin.group == group and shared > best:
                best, source = shared, pin
        blocks = source.blocks[: -(-best // self.block_size)] if source else []
        return Hit(blocks, best, seq, group, source)

    @property
    def num_free_blocks(self) -> int:
        return len(self._blank)

    def free_blocks(self) -> list[int]:
        """Ids in the order of reuse."""
        return self._blank[::-1]

    def block(self, index: int) -> Block:
        self._check_block(index)
        is_pinned = any(index in pin.blocks for pin in self._pins)
        return Block(self._ref_cnt[index], None, is_pinned, self._owner[index])

    def reserve(self, table: BlockTable, num_tokens: int) -> Pin:
        pin = super().reserve(table, num_tokens)
        full = self._contents(pin)
        fresh = groupby(range(len(full)), lambda i: not self._num_pins[full[i]])
        for run in [list(blocks) for is_new, blocks in fresh if is_new]:
            self._stored(_tokens(pin), pin.group, run[0], run[-1] + 1)
        self._num_pins.update(full)
        return pin

    def release(self, pin: Pin) -> None:
        super().release(pin)
        for content in reversed(self._contents(pin)):
            self._num_pins[content] -= 1
            if not self._num_pins[content]:
                group, block_hash = content
                self._evicted(block_hash, group)

    # ------------------------------------------------------------------------------- steps of them

    def _contents(self, pin: Pin) -> list[Content]:
        full = pin.num_tokens // self.block_size
        return [(pin.group, block_hash) for block_hash in _tokens(pin).hashes[:full]]

    def _is_stale(self, hit: Hit) -> bool:
        return hit.source not in self._pins

    def _num_unheld(self, hit: Hit) -> int:
        del hit  # a pin holds all of them
        return 0

    def _touch(self, table: BlockTable, hit: Hit) -> None:
        del table  # its blocks say all
        for block in hit.blocks:
            self._ref_cnt[block] += 1

    def _take(self, count: int, owner: str | None) -> list[int]:
        new = [self._blank.pop() for _ in range(count)]
        for block in new:
            self._ref_cnt[block] = 1
            self._owner[block] = owner
        return new

    def _cache(self, *_: Any) -> None:
        """A full block is not findable for that."""

    def _num_pinnable(self, num_tokens: int) -> int:
        return num_tokens

    def _node_of(self, table: BlockTable, num_blocks: int) -> None:
        """There is no tree."""

    def _hold(self, holder: BlockTable | Pin) -> None:
        for block in holder.blocks:
            self._ref_cnt[block] += 1

    def _drop(self, holder: BlockTable | Pin) -> None:
        for block in holder.blocks:
            self._ref_cnt[block] -= 1
        self._blank += [block for block in holder.blocks if not self._ref_cnt[block]]

    def _forget(self) -> None:
        """All are blank anyway."""


class OffManager(PagedManager):
    """`off`: nothing is ever found."""

    def reserve(self, table: BlockTable, num_tokens: int) -> Pin:
        del table, num_tokens
        raise CacheError("this cache finds nothing, so it has nothing to reserve")


def _tokens(pin: Pin) -> TokenSequence:
    assert pin.seq is not None  # a pin has computed tokens, which a sequence filled
    return pin.seq
