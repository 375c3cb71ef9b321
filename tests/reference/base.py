"""What the three systems have in common: tables, copy-on-write, pins, batches, misuse, events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prefixkv.errors import CacheError, StaleHitError
from reference.tokens import Extra, TokenSequence, tokens_to_bytes


class Hit(NamedTuple):
    """Where the leading tokens of a sequence are found; holds nothing."""

    blocks: list[int]
    num_tokens: int
    seq: TokenSequence
    group: int
    source: Any = None  # what tells whether it is stale: hash, an epoch; paged, the pin


class Grant(NamedTuple):
    new_blocks: list[int]
    copies: list[tuple[int, int]]


class Block(NamedTuple):
    ref_cnt: int
    block_hash: bytes | None
    is_cached: bool
    owner: str | None


class Event(NamedTuple):
    kind: str
    block_hashes: list[bytes]
    parent_block_hash: bytes | None = None
    token_ids: Sequence[int] = ()
    group: int = 0
    lora: str | None = None
    cache_salt: str | None = None


class BlockTable:
    """Logical to physical blocks of one sequence. Only its manager writes it."""

    def __init__(self, manager: Manager, owner: str | None, group: int) -> None:
        self.manager: Manager | None = manager  # None once freed
        self.owner = owner
        self.group = group
        self.blocks: list[int] = []
        self.num_tokens = 0
        self.num_computed_tokens = 0
        self.seq: TokenSequence | None = None  # the one that filled it
        self.node: Any = None  # radix: the tree's node where its full blocks end
        self.owns_leaf = False  # radix: its own commit made that node

    def __del__(self) -> None:
        if self.manager is not None:
            self.manager.free(self)


@dataclass(eq=False)
class Pin:
    """Computed tokens that are held without a table."""

    blocks: list[int]
    num_tokens: int
    group: int
    seq: TokenSequence | None
    node: Any = None


class Manager:
    """A pool of blocks; the systems say what is findable and what goes first.

    Flat lists hold `_ref_cnt[block]` and `_owner[block]`, that of the table that took it last.
    `_blank` has the blank free blocks, the front of the queue **last**.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        hash_algorithm: str = "fast",
        num_groups: int = 1,
        events: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hash_algorithm = hash_algorithm
        self.num_groups = num_groups
        self.events = events
        self._ref_cnt = [0] * num_blocks
        self._owner: list[str | None] = [None] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._pins: list[Pin] = []  # the oldest first
        self._events: list[Event] = []

    # ------------------------------------------------------- what a system says (none is optional)

    num_free_blocks: Any

    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        raise NotImplementedError

    def free_blocks(self) -> list[int]:
        raise NotImplementedError

    def block(self, index: int) -> Block:
        raise NotImplementedError

    def _is_stale(self, hit: Hit) -> bool:
        raise NotImplementedError

    def _num_unheld(self, hit: Hit) -> int:
        """Blocks of the hit that are free, so that to use it takes them from the free ones."""
        raise NotImplementedError

    def _touch(self, table: BlockTable, hit: Hit) -> None:
        """Hold the hit's blocks for the table."""
        raise NotImplementedError

    def _take(self, count: int, owner: str | None) -> list[int]:
        """The first blocks of the queue, held once from now on."""
        raise NotImplementedError

    def _cache(self, table: BlockTable, seq: TokenSequence, start: int, stop: int) -> None:
        """Blocks [start, stop) of the table are full now; there is at least one."""
        raise NotImplementedError

    def _num_pinnable(self, num_tokens: int) -> int:
        """Of so many computed tokens, those that can be found again."""
        raise NotImplementedError

    def _node_of(self, table: BlockTable, num_blocks: int) -> Any:
        """Radix: the node where the first blocks of the table end."""
        raise NotImplementedError

    def _hold(self, holder: BlockTable | Pin) -> None:
        """One more holder of blocks that have one."""
        raise NotImplementedError

    def _drop(self, holder: BlockTable | Pin) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        """Make every block blank, in the order of `free_blocks`; all are free."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------- the seam

    def sequence(
        self,
        token_ids: Any = (),
        cache_salt: str | None = None,
        lora: str | None = None,
        extra: Sequence[Extra] = (),
    ) -> TokenSequence:
        seq = TokenSequence(self, self.block_size, self.hash_algorithm, cache_salt, lora, extra)
        seq.append(token_ids)
        return seq

    def table(self, owner: str | None = None, group: int = 0) -> BlockTable:
        self._check_group(group)
        return BlockTable(self, owner, group)

    def allocate(self, table: BlockTable, num_tokens: int, hit: Hit | None = None) -> Grant | None:
        """Room for `num_tokens` in all, after the blocks of the hit; None leaves no trace."""
        self._check_room(table, num_tokens)
        if hit is not None:
            self._check_hit(table, num_tokens, hit)
        if hit is not None and hit.num_tokens:
            have, computed, holders = hit.blocks, hit.num_tokens, 0
        else:
            hit, have, computed, holders = None, table.blocks, table.num_computed_tokens, 1
        shared = self._shared(have, computed, holders) if num_tokens > computed else []
        need = -(-num_tokens // self.block_size) - len(have) + len(shared)
        if need > self.num_free_blocks - (self._num_unheld(hit) if hit else 0):
            return None
        if hit:
            self._touch(table, hit)
            table.blocks = hit.blocks.copy()
            table.num_computed_tokens = computed
            table.seq = hit.seq
        new = self._take(need, table.owner)
        copies = self._replace(table, shared, new)
        table.blocks += new[len(shared) :]
        table.num_tokens = num_tokens
        return Grant(new[len(copies) :], copies)

    def _shared(self, blocks: list[int], computed: int, holders: int) -> list[int]:
        """Indices of the blocks that are not all computed and have more holders than that."""
        first, count = computed // self.block_size, self._ref_cnt
        return [i for i, block in enumerate(blocks[first:], first) if count[block] > holders]

    def _replace(
        self, table: BlockTable, shared: list[int], new: list[int]
    ) -> list[tuple[int, int]]:
        """Own blocks for those that the table must not write; (source, target) of what it keeps."""
        copies = []
        for index, block in zip(shared, new, strict=False):
            old = table.blocks[index]
            self._ref_cnt[old] -= 1
            table.blocks[index] = block
            # Later ones are room that nobody has written for this table.
            if index * self.block_size < table.num_computed_tokens:
                copies.append((old, block))
        return copies

    def commit(self, table: BlockTable, seq: TokenSequence, num_computed_tokens: int) -> None:
        """The K/V of the first `num_computed_tokens` is written: their full blocks are findable."""
        self._check_commit(table, seq, num_computed_tokens, seq.num_tokens)
        start = table.num_computed_tokens // self.block_size
        stop = num_computed_tokens // self.block_size
        if start < stop:
            self._cache(table, seq, start, stop)
        table.num_computed_tokens = num_computed_tokens
        table.seq = seq

    def fork(self, table: BlockTable) -> BlockTable:
        """A table of the same blocks; who writes into a shared one gets a copy by `allocate`."""
        self._check_table(table)
        child = BlockTable(self, table.owner, table.group)
        child.blocks = table.blocks.copy()
        child.num_tokens = table.num_tokens
        child.num_computed_tokens = table.num_computed_tokens
        child.seq = table.seq
        child.node = table.node
        self._hold(child)
        return child

    def free(self, table: BlockTable) -> None:
        """Drop every count, last block first, so that of a prefix the deepest block goes first."""
        self._check_table(table)
        self._drop(table)
        table.blocks = []
        table.manager = None

    def reserve(self, table: BlockTable, num_tokens: int) -> Pin:
        """Hold computed tokens beyond the life of the table, until `release`."""
        self._check_table(table)
        if not 1 <= num_tokens <= table.num_computed_tokens:
            raise CacheError(f"num_tokens {num_tokens} is not in 1..{table.num_computed_tokens}")
        pinned = self._num_pinnable(num_tokens)
        blocks = table.blocks[: -(-pinned // self.block_size)]
        node = self._node_of(table, len(blocks))
        pin = Pin(blocks, pinned, table.group, table.seq, node)
        self._hold(pin)
        self._pins.append(pin)
        return pin

    def release(self, pin: Pin) -> None:
        if pin not in self._pins:
            raise CacheError("the pin was released, or belongs to another manager")
        self._pins.remove(pin)
        self._drop(pin)

    def reset(self) -> bool:
        """Forget all cached blocks, the queue's order kept; False while a block is held."""
        if self.num_free_blocks < self.num_blocks:
            return False
        self._forget()
        if self.events:
            self._events.append(Event("cleared", []))
        return True

    # -------------------------------------------------------------------------------- many at once

    def allocate_many(self, tables: Sequence[BlockTable], num_tokens: Any) -> list[Grant | None]:
        """`allocate` in order; from the first None on, all are None and untouched."""
        rooms = [int(room) for room in num_tokens]
        self._check_many(tables, rooms)
        for table, room in zip(tables, rooms, strict=True):
            self._check_room(table, room)
        grants: list[Grant | None] = []
        for table, room in zip(tables, rooms, strict=True):
            refused = bool(grants) and grants[-1] is None
            grants.append(None if refused else self.allocate(table, room))
        return grants

    def commit_many(
        self, tables: Sequence[BlockTable], seqs: Sequence[TokenSequence], token_ids: Any
    ) -> None:
        """Append one token to each sequence, and commit one more in each table."""
        tokens_to_bytes(token_ids)
        tokens = list(token_ids)
        self._check_many(tables, seqs)
        self._check_many(seqs, tokens)
        for table, seq in zip(tables, seqs, strict=True):
            self._check_table(table)
            self._check_commit(table, seq, table.num_computed_tokens + 1, seq.num_tokens + 1)
        for table, seq, token in zip(tables, seqs, tokens, strict=True):
            seq.append([token])
            self.commit(table, seq, table.num_computed_tokens + 1)

    # -------------------------------------------------------------------------------------- events

    def drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _stored(self, seq: TokenSequence, group: int, start: int, stop: int) -> None:
        """Blocks [start, stop) of the sequence were not findable and are now."""
        if not self.events or start == stop:
            return
        parent = seq.hashes[start - 1] if start else None
        tokens = seq.tokens(start * self.block_size, stop * self.block_size)
        hashes = seq.hashes[start:stop]
        self._events.append(
            Event("stored", hashes, parent, tokens, group, seq.lora, seq.cache_salt)
        )

    def _evicted(self, block_hash: bytes, group: int) -> None:
        if not self.events:
            return
        last = self._events[-1] if self._events else None
        if last is not None and (last.kind, last.group) == ("evicted", group):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(Event("evicted", [block_hash], group=group))

    # -------------------------------------------------------------------------------------- misuse

    def _check_group(self, group: int) -> None:
        if not 0 <= group < self.num_groups:
            raise CacheError(f"group {group} is not in 0..{self.num_groups - 1}")

    def _check_block(self, index: int) -> None:
        if not 0 <= index < self.num_blocks:
            raise CacheError(f"block {index} is not in 0..{self.num_blocks - 1}")

    def _check_table(self, table: BlockTable) -> None:
        if table.manager is not self:
            raise CacheError("the table was freed, or belongs to another manager")

    def _check_sequence(self, seq: TokenSequence) -> None:
        if seq.manager is not self:
            raise CacheError("the sequence belongs to another manager")

    def _check_room(self, table: BlockTable, num_tokens: int) -> None:
        self._check_table(table)
        if num_tokens < table.num_tokens:
            raise CacheError(f"num_tokens {num_tokens} is below the table's {table.num_tokens}")

    def _check_hit(self, table: BlockTable, num_tokens: int, hit: Hit) -> None:
        if hit.seq.manager is not self:
            raise CacheError("the hit belongs to another manager")
        if hit.group != table.group:
            raise CacheError(f"hit of group {hit.group} for a table of group {table.group}")
        if hit.blocks and table.blocks:
            raise CacheError(f"a hit starts a table, this one has {len(table.blocks)} blocks")
        if hit.num_tokens > num_tokens:
            raise CacheError(f"num_tokens {num_tokens} is below the hit's {hit.num_tokens}")
        if hit.blocks and self._is_stale(hit):
            raise StaleHitError("a block of the hit was evicted since; look up again")

    def _check_commit(
        self, table: BlockTable, seq: TokenSequence, num_computed: int, num_known: int
    ) -> None:
        self._check_table(table)
        self._check_sequence(seq)
        low, high = table.num_computed_tokens, min(table.num_tokens, num_known)
        if not low <= num_computed <= high:
            raise CacheError(f"num_computed_tokens {num_computed} is not in {low}..{high}")
        if low and seq is not table.seq and seq.shared_prefix(table.seq) < low:
            raise CacheError("the table was filled from another sequence")
        if num_computed > low:
            first, stop = low // self.block_size, -(-num_computed // self.block_size)
            for block in table.blocks[first:stop]:
                if self._ref_cnt[block] != 1:
                    raise CacheError(f"block {block} is shared; allocate before writing")

    def _check_many(self, things: Sequence[Any], others: Sequence[Any]) -> None:
        if len(things) != len(others):
            raise CacheError(f"there are {len(things)} of one and {len(others)} of the other")
        if len({id(thing) for thing in things}) < len(things):
            raise CacheError("the same table or sequence is there twice")
