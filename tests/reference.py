"""The `hash` cache manager in plain Python: its rules to read, its twin to test against.

`ReferenceManager` has the interface of `prefixkv.cache.make_cache(system="hash")` and gives the
same hits, block ids, counts and queue order. It is also the plain Python baseline of the
benchmarks, so its loops are as tight as the language allows.

Two facts carry it:

* The hash of a block covers its parent's hash, so equal hashes mean equal prefixes (hash chain of
  vLLM V1), and a dict from hash to block is all that a lookup needs.
* Blank blocks enter the free queue only at its front and cached ones only at its back, so the queue
  is always a stack of blank blocks followed by an ordered map of cached ones.
"""

from __future__ import annotations

import pickle
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b, sha256
from struct import iter_unpack
from typing import Any, NamedTuple

from prefixkv.errors import CacheError, StaleHitError

Extra = tuple[int, int, bytes]  # [start, stop) in tokens, and the content that they stand for
ExtraKeys = tuple[tuple[str, int | str], ...] | None
BlockHasher = Callable[[bytes, bytes, ExtraKeys], bytes]  # parent, int32 tokens, extra keys

MAX_TOKEN_ID = 2**31 - 1
TOKEN_BYTES = 4


class Hit(NamedTuple):
    """The cached blocks that a sequence starts with; says where, holds nothing."""

    blocks: list[int]
    num_tokens: int
    manager: ReferenceManager
    group: int
    keys: list[bytes]  # what each block must still hold when the hit is used
    num_evictions: int  # of the manager at lookup: unchanged means not stale


class Grant(NamedTuple):
    new_blocks: list[int]
    copies: list[tuple[int, int]]


class Block(NamedTuple):
    ref_cnt: int
    block_hash: bytes | None
    is_cached: bool
    owner: str | None


# ---------------------------------------------------------------------------------------- hashing


def cbor(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949) of the types that a block's key is made of."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _cbor_head(3, len(text)) + text
    return _cbor_head(4, len(value)) + b"".join(map(cbor, value))


def _cbor_head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes((major << 5 | number,))
    size = next(i for i in range(4) if number < 1 << (8 << i))
    return bytes((major << 5 | 24 + size,)) + number.to_bytes(1 << size, "big")


def _chained(encode: Callable[[Any], bytes]) -> tuple[bytes, BlockHasher]:
    """Parent of the first block, and the block hash, as vLLM defines both over `encode`."""

    def hash_block(parent: bytes, tokens: bytes, extra: ExtraKeys) -> bytes:
        return sha256(encode((parent, tuple(array("i", tokens)), extra))).digest()

    return sha256(encode("vllm-none-hash")).digest(), hash_block


def _hash_fast(parent: bytes, tokens: bytes, extra: ExtraKeys) -> bytes:
    return blake2b(parent + tokens + (repr(extra).encode() if extra else b"")).digest()


ALGORITHMS: dict[str, tuple[bytes, BlockHasher]] = {
    "sha256_cbor": _chained(cbor),
    "sha256": _chained(lambda value: pickle.dumps(value, protocol=5)),
    "fast": (bytes(64), _hash_fast),
}


def tokens_to_bytes(token_ids: Any) -> bytes:
    """Token ids as little-endian int32; `bytes` hold one token per byte."""
    if isinstance(token_ids, bytes):
        token_ids = list(token_ids)
    elif hasattr(token_ids, "tolist"):  # arrays and tensors
        token_ids = token_ids.tolist()
    try:
        data = array("i", token_ids).tobytes()
    except (TypeError, OverflowError):
        data = b""
    # A set sign bit shows in the top byte of a little-endian int32.
    if len(data) != TOKEN_BYTES * len(token_ids) or not data[3::4].isascii():
        raise _bad_token(token_ids)
    return data


def _bad_token(token_ids: Iterable[Any]) -> CacheError:
    for position, token in enumerate(token_ids):
        if not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            return CacheError(
                f"token {token!r} at position {position} is not an integer in 0..{MAX_TOKEN_ID}"
            )
    raise AssertionError("no bad token found")


class TokenSequence:
    """Tokens known only by their block hashes, which grow with them, and an unfinished block.

    Writes its own fields in `append`, nobody else does.
    """

    def __init__(
        self,
        manager: ReferenceManager,
        cache_salt: str | None,
        lora: str | None,
        extra: Sequence[Extra],
    ) -> None:
        self.manager = manager
        self._parent, self._hash_block = ALGORITHMS[manager.hash_algorithm]
        self._size = manager.block_size
        self._cache_salt = cache_salt
        self._lora = lora
        for start, stop, _ in extra:
            if not 0 <= start < stop:
                raise CacheError(f"an extra covers tokens {start} to {stop}")
        # Their order says nothing about the K/V, so it must not enter the hashes.
        self._extra = sorted((start, stop, sha256(b).hexdigest()) for start, stop, b in extra)
        self._tail = b""
        self.hashes: list[bytes] = []  # of the full blocks
        self.num_tokens = 0

    def append(self, token_ids: Any) -> None:
        new = tokens_to_bytes(token_ids)
        data = self._tail + new
        step = TOKEN_BYTES * self._size
        full = len(data) - len(data) % step
        blocks = iter_unpack(f"{step}s", data[:full])
        parent = self._parent
        if self._hash_block is _hash_fast and not (self._cache_salt or self._lora or self._extra):
            # The one loop that the speed of a request hangs on, hence written out.
            self.hashes += [parent := blake2b(parent + block).digest() for (block,) in blocks]
        else:
            for (block,) in blocks:
                parent = self._hash_block(parent, block, self._extra_keys(len(self.hashes)))
                self.hashes.append(parent)
        self._parent = parent
        self._tail = data[full:]
        self.num_tokens += len(new) // TOKEN_BYTES

    def _extra_keys(self, block: int) -> ExtraKeys:
        first = block * self._size
        keys: list[tuple[str, int | str]] = []
        if self._lora is not None:
            keys.append(("lora", self._lora))
        for start, stop, digest in self._extra:
            if start < first + self._size and first < stop:
                keys.append((digest, start - first))
        if self._cache_salt is not None and block == 0:
            keys.append(("cache_salt", self._cache_salt))
        return tuple(keys) or None


# ---------------------------------------------------------------------------------------- manager


class BlockTable:
    """Logical to physical blocks of one sequence. Only its manager writes it."""

    def __init__(self, manager: ReferenceManager, owner: str | None, group: int) -> None:
        self.manager: ReferenceManager | None = manager  # None once freed
        self.owner = owner
        self.group = group
        self.blocks: list[int] = []
        self.num_tokens = 0
        self.num_computed_tokens = 0

    def __del__(self) -> None:
        if self.manager is not None:
            self.manager.free(self)


class ReferenceManager:
    """Paged blocks with chained-hash prefix caching, exactly the rules of `hash`.

    Flat lists hold `_ref_cnt[block]`, `_key[block]` (None = blank) and `_owner[block]`, that of the
    table that took it last. A key is a block hash, with the group's id behind it in groups other
    than 0. `_index` maps a key to the block that serves it and `_copies` to the later copies of the
    same content. Of the free queue, `_blank` has the blank blocks, the front of the queue **last**,
    and `_cached` the cached ones behind them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        hash_algorithm: str = "fast",
        num_groups: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hash_algorithm = hash_algorithm
        self.num_groups = num_groups
        self._ref_cnt = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._owner: list[str | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        self._num_evictions = 0
        self._hash_size = len(ALGORITHMS[hash_algorithm][0])

    def sequence(
        self,
        token_ids: Any = (),
        cache_salt: str | None = None,
        lora: str | None = None,
        extra: Sequence[Extra] = (),
    ) -> TokenSequence:
        seq = TokenSequence(self, cache_salt, lora, extra)
        seq.append(token_ids)
        return seq

    def table(self, owner: str | None = None, group: int = 0) -> BlockTable:
        self._check_group(group)
        return BlockTable(self, owner, group)

    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        """The longest run of cached blocks from the start; changes nothing."""
        self._check_sequence(seq)
        self._check_group(group)
        # Never the block of the last token: its logits are needed, so it is computed.
        most = max(seq.num_tokens - 1, 0) // self.block_size
        keys = self._keys(seq, group, 0, most)
        blocks = []
        for block in map(self._index.get, keys):
            if block is None:
                break
            blocks.append(block)
        num_tokens = len(blocks) * self.block_size
        return Hit(blocks, num_tokens, self, group, keys, self._num_evictions)

    def allocate(self, table: BlockTable, num_tokens: int, hit: Hit | None = None) -> Grant | None:
        """Room for `num_tokens` in all, after the blocks of the hit; None leaves no trace."""
        self._check_table(table)
        if num_tokens < table.num_tokens:
            raise CacheError(f"num_tokens {num_tokens} is below the table's {table.num_tokens}")
        shared: list[int] = []
        if hit is not None:
            self._check_hit(table, num_tokens, hit)
            shared = hit.blocks
        need = -(-num_tokens // self.block_size) - len(table.blocks) - len(shared)
        if not self._has_room(need, shared):
            return None
        if shared:
            self._touch(shared)
            table.blocks += shared
            table.num_computed_tokens = len(shared) * self.block_size
        new = self._take(need, table.owner)
        table.blocks += new
        table.num_tokens = num_tokens
        return Grant(new, [])

    def commit(self, table: BlockTable, seq: TokenSequence, num_computed_tokens: int) -> None:
        """The K/V of the first `num_computed_tokens` is written: their full blocks are findable."""
        self._check_table(table)
        self._check_sequence(seq)
        start = table.num_computed_tokens // self.block_size
        stop = num_computed_tokens // self.block_size
        self._check_commit(table, seq, num_computed_tokens, start)
        key_of, copies = self._key, self._copies
        serve = self._index.setdefault
        for block, key in zip(
            table.blocks[start:stop], self._keys(seq, table.group, start, stop), strict=True
        ):
            key_of[block] = key
            if serve(key, block) != block:
                copies.setdefault(key, []).append(block)
        table.num_computed_tokens = num_computed_tokens

    def free(self, table: BlockTable) -> None:
        """Drop every count, last block first, so that of a prefix the deepest block goes first."""
        self._check_table(table)
        ref_cnt, key_of, cached = self._ref_cnt, self._key, self._cached
        blank = []
        for block in reversed(table.blocks):
            count = ref_cnt[block] = ref_cnt[block] - 1
            if not count:
                key = key_of[block]
                if key is None:
                    blank.append(block)
                else:
                    cached[block] = key
        self._blank += reversed(blank)
        table.blocks = []
        table.manager = None

    def reset(self) -> bool:
        """Forget all cached blocks, the queue's order kept; False while a block is held."""
        if self.num_free_blocks < self.num_blocks:
            return False
        self._blank = self.free_blocks()[::-1]
        self._cached.clear()
        self._index.clear()
        self._copies.clear()
        self._key = [None] * self.num_blocks
        self._num_evictions += 1
        return True

    @property
    def num_free_blocks(self) -> int:
        return len(self._blank) + len(self._cached)

    def free_blocks(self) -> list[int]:
        """Ids in the order of reuse."""
        return [*reversed(self._blank), *self._cached]

    def block(self, index: int) -> Block:
        if not 0 <= index < self.num_blocks:
            raise CacheError(f"block {index} is not in 0..{self.num_blocks - 1}")
        key = self._key[index]
        block_hash = None if key is None else key[: self._hash_size]
        return Block(self._ref_cnt[index], block_hash, key is not None, self._owner[index])

    # ------------------------------------------------------------------------------- steps of them

    def _keys(self, seq: TokenSequence, group: int, start: int, stop: int) -> list[bytes]:
        hashes = seq.hashes[start:stop]
        return [h + group.to_bytes(4) for h in hashes] if group else hashes

    def _has_room(self, need: int, shared: list[int]) -> bool:
        """Whether `need` blocks are free besides those that a touch takes out of the queue."""
        room = self.num_free_blocks - need
        return room >= len(shared) or room >= sum(not self._ref_cnt[block] for block in shared)

    def _touch(self, blocks: list[int]) -> None:
        ref_cnt, cached = self._ref_cnt, self._cached
        for block in blocks:
            count = ref_cnt[block]
            if not count:
                del cached[block]
            ref_cnt[block] = count + 1

    def _take(self, count: int, owner: str | None) -> list[int]:
        """The first blocks of the queue; a cached one loses its hash here, and only here."""
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
        ref_cnt, owner_of = self._ref_cnt, self._owner
        self._num_evictions += count
        evicted = []
        for _ in range(count):
            block, key = pop(False)
            key_of[block] = None
            if key in copies:
                self._evict_copy(key, block)
            else:
                del index[key]
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

    # -------------------------------------------------------------------------------------- misuse

    def _check_group(self, group: int) -> None:
        if not 0 <= group < self.num_groups:
            raise CacheError(f"group {group} is not in 0..{self.num_groups - 1}")

    def _check_table(self, table: BlockTable) -> None:
        if table.manager is not self:
            raise CacheError("the table was freed, or belongs to another manager")

    def _check_sequence(self, seq: TokenSequence) -> None:
        if seq.manager is not self:
            raise CacheError("the sequence belongs to another manager")

    def _check_hit(self, table: BlockTable, num_tokens: int, hit: Hit) -> None:
        if hit.manager is not self:
            raise CacheError("the hit belongs to another manager")
        if hit.group != table.group:
            raise CacheError(f"hit of group {hit.group} for a table of group {table.group}")
        if hit.blocks and table.blocks:
            raise CacheError(f"a hit starts a table, this one has {len(table.blocks)} blocks")
        if hit.num_tokens > num_tokens:
            raise CacheError(f"num_tokens {num_tokens} is below the hit's {hit.num_tokens}")
        if hit.num_evictions != self._num_evictions:
            held = [self._key[block] for block in hit.blocks]
            if held != hit.keys[: len(held)]:
                raise StaleHitError("a block of the hit was evicted since; look up again")

    def _check_commit(self, table: BlockTable, seq: TokenSequence, tokens: int, start: int) -> None:
        low, high = table.num_computed_tokens, min(table.num_tokens, seq.num_tokens)
        if not low <= tokens <= high:
            raise CacheError(f"num_computed_tokens {tokens} is not in {low}..{high}")
        if start and seq.hashes[start - 1] != self.block(table.blocks[start - 1]).block_hash:
            raise CacheError("the table was filled from another sequence")
