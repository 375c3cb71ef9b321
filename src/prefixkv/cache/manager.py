"""The seam between an engine and a cache manager."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from prefixkv import _core
from prefixkv._core import Block, BlockTable, Grant, Hit, Sequence
from prefixkv.config import CACHE_SYSTEMS, HASH_ALGORITHMS
from prefixkv.errors import ConfigError

# A list, tuple, array, bytes (a token a byte), int32 or int64 NumPy array or torch tensor.
TokenIds: TypeAlias = Any


class CacheManager(Protocol):
    """Block tables over one pool of blocks, with prefix sharing.

    A token's K/V depends on the tokens before it only, so sequences with equal leading tokens and
    namespace may share the blocks that hold it. A block is findable only after ``commit``, a held
    block is never reused, and a refused call leaves no trace. Calls must come from one thread at a
    time; the GIL sees to that.
    """

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds: blank and evictable."""
        ...

    @property
    def block_size(self) -> int: ...

    def sequence(
        self,
        token_ids: TokenIds,
        cache_salt: str | None = None,
        lora: str | None = None,
        extra: tuple[tuple[int, int, bytes], ...] = (),
    ) -> Sequence: ...
    def lookup(self, seq: Sequence, group: int = 0) -> Hit: ...
    def table(self, owner: str | None = None, group: int = 0) -> BlockTable: ...
    def allocate(
        self, table: BlockTable, num_tokens: int, hit: Hit | None = None
    ) -> Grant | None: ...
    def commit(self, table: BlockTable, seq: Sequence, num_computed_tokens: int) -> None: ...
    def free(self, table: BlockTable) -> None: ...
    def reset(self) -> bool: ...
    def block(self, block_id: int) -> Block: ...
    def free_blocks(self) -> list[int]: ...
    def check(self) -> None: ...


def make_cache(
    system: str = "hash",
    *,
    num_blocks: int,
    block_size: int = 16,
    hash_algorithm: str = "xxh3",
    num_groups: int = 1,
) -> CacheManager:
    """A cache manager.

    Args:
        system: ``"hash"``: automatic prefix caching with chained block hashes, as vLLM V1 does it.
            ``"off"``: block tables without sharing.
        num_blocks: blocks in the pool.
        block_size: tokens a block, 1 to 1024. Only full blocks are shared.
        hash_algorithm: ``"xxh3"``, fastest, verified against the tokens themselves;
            ``"sha256_cbor"``, equal to vLLM's, for hashes that leave the process; ``"sha256"``,
            vLLM's over Python's pickle, for interoperation only. All give the same hits.
        num_groups: kinds of layers whose K/V differ though the tokens are the same.

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
        num_blocks=num_blocks,
        block_size=block_size,
        hash_algorithm=hash_algorithm if system == "hash" else "none",
        num_groups=num_groups,
    )
