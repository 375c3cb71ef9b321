"""The cache library: block hashing, block tables, reference counts and eviction, without torch.

from prefixkv.cache import make_cache

cache = make_cache("hash", num_blocks=1024, block_size=16)
seq = cache.sequence(token_ids)
hit = cache.lookup(seq)                                # tokens [0, hit.num_tokens) are cached
table = cache.table()
grant = cache.allocate(table, seq.num_tokens, hit)     # None: no room now
...                                                    # compute K/V of the rest into table.blocks
cache.commit(table, seq, seq.num_tokens)               # from now on others find it
cache.free(table)
"""

from prefixkv._core import (
    Block,
    BlockTable,
    Event,
    Grant,
    Hit,
    Match,
    Pin,
    RadixTree,
    Sequence,
    step_arrays,
)
from prefixkv.cache.manager import CacheManager, make_cache

__all__ = [
    "Block",
    "BlockTable",
    "CacheManager",
    "Event",
    "Grant",
    "Hit",
    "Match",
    "Pin",
    "RadixTree",
    "Sequence",
    "make_cache",
    "step_arrays",
]
