"""The seam between an engine and a cache manager."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

from prefixkv import _core
from prefixkv._core import Block, BlockTable, Event, Grant, Hit, Pin, Sequence
from prefixkv.config import CACHE_SYSTEMS, HASH_ALGORITHMS
from prefixkv.errors import ConfigError

# A list, tuple, array, bytes (a token a byte), int32 or int64 NumPy array or torch tensor.
TokenIds: TypeAlias = Any


class CacheManager(Protocol):
    """Block tables over one pool of blocks, with prefix sharing.

    A token's K/V depends on the tokens before it only, so sequences with equal leading tokens and
    namespace may share the blocks that hold it. A block is findable only after ``commit`` (in
    ``paged`` only while reserved), a held block is never reused, a refused call leaves no trace.
    Calls must come from one thread at a time; the GIL sees to that.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table and no pin holds: blank and evictable."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        ...

    def sequence(
        self,
        token_ids: TokenIds,
        cache_salt: str | None = None,
        lora: str | None = None,
        extra: tuple[tuple[int, int, bytes], ...] = (),
    ) -> Sequence:
        """Tokens of one request, from which on ``append`` makes it grow.

        Sequences share nothing if their ``cache_salt`` or ``lora`` differ. ``extra`` lists (start,
        stop, content) for content that is not in the tokens, such as an image over tokens [start,
        stop). Raises CacheError for what is no token id.
        """
        ...

    def lookup(self, seq: Sequence, group: int = 0) -> Hit:
        """The longest prefix of it that is there, without its last token. Changes nothing."""
        ...

    def table(self, owner: str | None = None, group: int = 0) -> BlockTable:
        """An empty block table; the owner's name is shown by ``block``."""
        ...

    def allocate(self, table: BlockTable, num_tokens: int, hit: Hit | None = None) -> Grant | None:
        """Room for ``num_tokens`` in all, the hit's blocks first; None if there is not enough.

        Shared blocks that tokens [num_computed_tokens, num_tokens) would be written to are
        replaced: run ``grant.copies`` before the next write. Raises StaleHitError when a block of
        the hit was evicted or its reservation released since the lookup.
        """
        ...

    def commit(self, table: BlockTable, seq: Sequence, num_computed_tokens: int) -> None:
        """The K/V of the first ``num_computed_tokens`` is written, so full blocks are findable.

        Raises CacheError when the table has not that room, the sequence not those tokens, when it
        is not the sequence that filled the table so far, or when a block written to is shared.
        """
        ...

    def allocate_many(
        self, tables: Iterable[BlockTable], num_tokens: Iterable[int]
    ) -> list[Grant | None]:
        """``allocate`` in order, without hits; all None from the first that is refused on."""
        ...

    def commit_many(
        self, tables: Iterable[BlockTable], seqs: Iterable[Sequence], token_ids: TokenIds
    ) -> None:
        """One more token computed in each table, and one appended to each sequence first."""
        ...

    def fork(self, table: BlockTable) -> BlockTable:
        """A table of the same blocks, all of them shared; it cannot be refused."""
        ...

    def free(self, table: BlockTable) -> None:
        """Drop the table's blocks; cached ones stay findable until they are reused."""
        ...

    def reserve(self, table: BlockTable, num_tokens: int) -> Pin:
        """Hold the first computed tokens until ``release``, also when the table is gone.

        ``hash`` and ``radix`` hold full blocks, ``paged`` every token, and there nothing else is
        findable. ``off`` raises CacheError.
        """
        ...

    def release(self, pin: Pin) -> None:
        """End a reservation."""
        ...

    def reset(self) -> bool:
        """Forget what is cached; False, and nothing done, while a block is held."""
        ...

    def block(self, block_id: int) -> Block:
        """State of one block."""
        ...

    def free_blocks(self) -> list[int]:
        """Ids of the free blocks in the order of reuse."""
        ...

    def drain_events(self) -> list[Event]:
        """What became findable or stopped being so since the last call."""
        ...

    def check(self) -> None:
        """Recount every invariant; a CacheError names the first that fails."""
        ...


def make_cache(
    system: str = "hash",
    *,
    num_blocks: int,
    block_size: int = 16,
    hash_algorithm: str = "xxh3",
    num_groups: int = 1,
    events: bool = False,
) -> CacheManager:
    """A cache manager.

    Args:
        system: ``"hash"``: automatic prefix caching with chained block hashes, as vLLM V1 does it.
            ``"radix"``: RadixAttention, a radix tree that evicts least recent leaves, as SGLang
            does it. ``"paged"``: PagedAttention as in its paper; only reserved prefixes are shared,
            and forks. ``"off"``: only forks are shared.
        num_blocks: blocks in the pool.
        block_size: tokens a block, 1 to 1024. ``hash`` and ``radix`` share full blocks only.
        hash_algorithm: ``"xxh3"``, fastest, verified against the tokens themselves;
            ``"sha256_cbor"``, for hashes that leave the process; ``"sha256"``, the same over
            Python's pickle, for interoperation only. The two equal vLLM's for tokens and salts,
            not with an adapter or extra content. All give the same hits. Other systems than
            ``hash`` use it for events only.
        num_groups: kinds of layers whose K/V differ though the tokens are the same.
        events: whether to collect what ``drain_events`` gives; drain them, or they pile up.

    Raises:
        ConfigError: a value is out of its limits.
    """
    if system not in CACHE_SYSTEMS:
        raise ConfigError(f"system is {system!r}; it must be one of {', '.join(CACHE_SYSTEMS)}")
    if hash_algorithm not in HASH_ALGORITHMS:
        raise ConfigError(
            f"hash_algorithm is {hash_algorithm!r}; it must be one of {', '.join(HASH_ALGORITHMS)}"
        )
    return _core.BlockManager(
        system=system,
        num_blocks=num_blocks,
        block_size=block_size,
        hash_algorithm=hash_algorithm,
        num_groups=num_groups,
        events=events,
    )
