"""Makers of every manager, native and plain Python twin, and what their tests have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from prefixkv import _core
from prefixkv.cache import make_cache
from reference import OffManager, PagedManager, RadixManager, ReferenceManager

Make = Callable[..., Any]

HASH: dict[str, Make] = {
    "xxh3": partial(make_cache, "hash"),
    "sha256_cbor": partial(make_cache, "hash", hash_algorithm="sha256_cbor"),
    "sha256": partial(make_cache, "hash", hash_algorithm="sha256"),
    "colliding": partial(_core.BlockManager, hash_algorithm="xxh3", hash_bits=0),
    "twin": ReferenceManager,
}
RADIX: dict[str, Make] = {"radix": partial(make_cache, "radix"), "radix twin": RadixManager}
PAGED: dict[str, Make] = {"paged": partial(make_cache, "paged"), "paged twin": PagedManager}
OFF: dict[str, Make] = {"off": partial(make_cache, "off"), "off twin": OffManager}
# Each system once, by all of which the rules of the seam must hold.
SYSTEMS: dict[str, Make] = {"hash": HASH["xxh3"], "hash twin": HASH["twin"], **RADIX, **PAGED}


def admit(cache: Any, seq: Any, num_tokens: int | None = None, group: int = 0) -> Any:
    """A table with room for `num_tokens` (all of `seq`) that starts with what is cached of it."""
    table = cache.table(group=group)
    room = seq.num_tokens if num_tokens is None else num_tokens
    assert cache.allocate(table, room, cache.lookup(seq, group)) is not None
    return table


def fill(cache: Any, tokens: Any, *, group: int = 0, **namespace: Any) -> Any:
    """Admit a request and commit all of it: its table."""
    seq = cache.sequence(tokens, **namespace)
    table = admit(cache, seq, group=group)
    cache.commit(table, seq, seq.num_tokens)
    return table


def found(cache: Any, tokens: Any, *, group: int = 0, **namespace: Any) -> list[int]:
    blocks: list[int] = cache.lookup(cache.sequence(tokens, **namespace), group).blocks
    return blocks


def state(cache: Any) -> tuple[Any, ...]:
    """All that can be seen of a manager."""
    blocks = [cache.block(i) for i in range(cache.num_blocks)]
    seen = [(b.ref_cnt, b.block_hash, b.is_cached, b.owner) for b in blocks]
    return seen, cache.free_blocks(), cache.num_free_blocks


def counts(cache: Any) -> list[int]:
    return [cache.block(i).ref_cnt for i in range(cache.num_blocks)]


def shape(table: Any) -> tuple[Any, ...]:
    return table.blocks, table.num_tokens, table.num_computed_tokens
