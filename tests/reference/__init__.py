"""The cache library in plain Python: its rules to read, its twins to test against.

Each manager here has the interface of `prefixkv.cache.make_cache` and gives the same hits, block
ids, counts, orders and events as the native one; `RadixTree` is the twin of the public tree.
`ReferenceManager`, the twin of `hash`, is also the plain Python baseline of the benchmarks.
"""

from reference.base import Block, BlockTable, Event, Grant, Hit, Manager, Pin
from reference.hash_manager import ReferenceManager
from reference.paged_manager import OffManager, PagedManager
from reference.radix_manager import RadixManager
from reference.radix_tree import Match, RadixTree
from reference.tokens import TokenSequence, cbor

__all__ = [
    "Block",
    "BlockTable",
    "Event",
    "Grant",
    "Hit",
    "Manager",
    "Match",
    "OffManager",
    "PagedManager",
    "Pin",
    "RadixManager",
    "RadixTree",
    "ReferenceManager",
    "TokenSequence",
    "cbor",
]
