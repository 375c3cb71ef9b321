"""`radix`: a tree over blocks that evicts whole leaves, as SGLang's RadixAttention does it."""

from __future__ import annotations

from typing import Any

from reference.base import Block, BlockTable, Hit, Manager, Pin
from reference.radix_tree import Node, Page, Tree
from reference.tokens import TokenSequence


class RadixManager(Manager):
    """A table's full computed blocks are the tree's, held by a lock; the rest are its own.

    `_ref_cnt` counts the holders of blocks outside the tree; of those in it, the locks of their
    node do.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tree = Tree()
        self._content: dict[int, tuple[bytes, int]] = {}  # hash and group of the tree's blocks

    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        """The longest run of the tree's blocks from the start; changes nothing."""
        self._check_sequence(seq)
        self._check_group(group)
        # Never the block of the last token: its logits are needed, so it is computed.
        most = max(seq.num_tokens - 1, 0) // self.block_size
        blocks = self._find(seq, group, most)
        return Hit(blocks, len(blocks) * self.block_size, seq, group)

    @property
    def num_free_blocks(self) -> int:
        unlocked = [node for node in self._tree.nodes() if not node.locks]
        return len(self._blank) + sum(len(node.values) for node in unlocked)

    def free_blocks(self) -> list[int]:
        """Ids in the order of reuse."""
        order = self._tree.eviction_order(self.num_blocks)
        return [*reversed(self._blank), *(b for node in order for b in reversed(node.values))]

    def block(self, index: int) -> Block:
        self._check_block(index)
        owner = self._owner[index]
        for node in self._tree.nodes():
            if index in node.values:
                block_hash = self._content[index][0] if self.events else None
                return Block(node.locks, block_hash, True, owner)
        return Block(self._ref_cnt[index], None, False, owner)

    # ------------------------------------------------------------------------------- steps of them

    def _root(self, seq: TokenSequence, group: int) -> Node:
        return self._tree.root((group, seq.lora, seq.cache_salt))

    def _pages(self, seq: TokenSequence, start: int, stop: int) -> list[Page]:
        return [seq.page(i) for i in range(start, stop)]

    def _find(self, seq: TokenSequence, group: int, num_blocks: int) -> list[int]:
        return self._tree.find(self._root(seq, group), self._pages(seq, 0, num_blocks))

    def _is_stale(self, hit: Hit) -> bool:
        return self._find(hit.seq, hit.group, len(hit.blocks)) != hit.blocks

    def _num_unheld(self, hit: Hit) -> int:
        return sum(not self.block(block).ref_cnt for block in hit.blocks)

    def _touch(self, table: BlockTable, hit: Hit) -> None:
        self._tree.clock += 1
        pages = self._pages(hit.seq, 0, len(hit.blocks))
        table.node = self._tree.walk(self._root(hit.seq, hit.group), pages)
        self._tree.lock(table.node, 1)

    def _take(self, count: int, owner: str | None) -> list[int]:
        if count > len(self._blank):
            self._evict(count - len(self._blank))
        new = [self._blank.pop() for _ in range(count)]
        for block in new:
            self._ref_cnt[block] = 1
            self._owner[block] = owner
        return new

    def _evict(self, count: int) -> None:
        """Whole leaves go to the back of the blank queue, each with its last block first."""
        for leaf in self._tree.evict(count):
            for block in reversed(leaf.values):
                self._blank.insert(0, block)
                self._evicted(*self._content.pop(block))

    def _cache(self, table: BlockTable, seq: TokenSequence, start: int, stop: int) -> None:
        """What the tree has already is given up for the tree's; the rest becomes the tree's."""
        tree = self._tree
        tree.clock += 1
        node = table.node or self._root(seq, table.group)
        for above in node.path():
            above.time = tree.clock
        pages = self._pages(seq, start, stop)
        theirs = tree.find(node, pages)
        end = tree.walk(node, pages)
        split = start + len(theirs)
        given_up, added = table.blocks[start:split], table.blocks[split:stop]
        table.blocks[start:split] = theirs
        self._blank += given_up
        if added:
            end = self._extend(table, node, end, pages[len(theirs) :], added)
        for block in given_up + added:
            self._ref_cnt[block] = 0
        for i, block in enumerate(added, split):
            self._content[block] = seq.hashes[i], table.group
        tree.lock(end, 1)
        tree.lock(node, -1)
        table.node = end
        table.owns_leaf = bool(added)
        self._stored(seq, table.group, split, stop)

    def _extend(
        self, table: BlockTable, node: Node, end: Node, pages: list[Page], blocks: list[int]
    ) -> Node:
        """A running request grows its own leaf while nobody else can see that."""
        if end is node and table.owns_leaf and node.locks == 1 and not node.children:
            node.pages += pages
            node.values += blocks
            return node
        return self._tree.add(end, pages, blocks)

    def _num_pinnable(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.block_size

    def _node_of(self, table: BlockTable, num_blocks: int) -> Node | None:
        """Split off if there is none; that is no use of it, so it makes nothing more recent."""
        if table.node is None:
            return None
        node: Node = table.node
        stop = sum(len(above.pages) for above in node.path())
        while node.parent is not None and stop - len(node.pages) >= num_blocks:
            stop -= len(node.pages)
            node = node.parent
        if stop > num_blocks:
            return self._tree.split(node, num_blocks - stop + len(node.pages))
        return node

    def _hold(self, holder: BlockTable | Pin) -> None:
        for block in self._own(holder):
            self._ref_cnt[block] += 1
        if holder.node is not None:
            self._tree.lock(holder.node, 1)

    def _drop(self, holder: BlockTable | Pin) -> None:
        own = self._own(holder)
        for block in own:
            self._ref_cnt[block] -= 1
        self._blank += [block for block in own if not self._ref_cnt[block]]
        if holder.node is not None:
            self._tree.lock(holder.node, -1)

    def _own(self, holder: BlockTable | Pin) -> list[int]:
        """The holder's blocks outside the tree."""
        if isinstance(holder, Pin):
            return []
        return holder.blocks[holder.num_computed_tokens // self.block_size :]

    def _forget(self) -> None:
        self._blank = self.free_blocks()[::-1]
        self._tree = Tree()
        self._content.clear()
