"""Native core of prefixkv."""

from collections.abc import Iterable
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray


def isa() -> str:
    """Instruction set that the CPU kernels use: 'avx512', 'avx2' or 'base'."""

def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""

class ThreadPool:
    """
    Threads for the CPU kernels, the caller's included. One caller at a time.
    """

    def __init__(self, threads: int) -> None: ...

    @property
    def size(self) -> int: ...

class Sequence:
    """
    Tokens of one request and the hashes of its full blocks, which grow with it.
    """

    def append(self, token_ids: object) -> None:
        """
        Append token ids: a list, array, bytes (a token a byte), or an int32 or int64 NumPy array or torch tensor. A CacheError names the first that is no token id; none is appended then.
        """

    def fork(self) -> Sequence:
        """
        A sequence with the same tokens and namespace, that grows by itself from here on.
        """

    def shared_prefix(self, other: Sequence) -> int:
        """Leading tokens that both would share, namespace included."""

    def __repr__(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far."""

class Hit:
    """
    What a lookup found: leading tokens of the sequence whose K/V is there.
    """

    @property
    def num_tokens(self) -> int:
        """
        Tokens covered: whole blocks in `hash` and `radix`, any number in `paged`.
        """

    def __repr__(self) -> str: ...

    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks that hold them, in order."""

class Grant:
    """What an allocation gave."""

    def __repr__(self) -> str: ...

    @property
    def new_blocks(self) -> list[int]:
        """
        Ids new to the table that are neither of the hit nor targets of a copy.
        """

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(source, target) block copies to run, in order, before the next write."""

class BlockTable:
    """
    One sequence's logical to physical map; only the manager writes it. A table that is dropped without `free` gives its blocks back.
    """

    def __repr__(self) -> str: ...

    @property
    def blocks(self) -> list[int]:
        """Block ids in logical order; empty once freed."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the table has room for."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K/V exists: from the hit, then as committed."""

    @property
    def group(self) -> int:
        """Kind of layers that its blocks are for."""

    @property
    def owner(self) -> str | None:
        """Who it is for, as given to `table`, or None."""

class Pin:
    """
    Computed tokens that are held without a table, until `release`; also when this object is gone.
    """

    def __repr__(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """
        Tokens held: those asked for in `paged`, of those the full blocks in `hash` and `radix`.
        """

    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks held, in order."""

    @property
    def group(self) -> int:
        """Kind of layers that its blocks are for."""

class Block:
    """State of one block at the time of the call."""

    def __repr__(self) -> str: ...

    @property
    def ref_cnt(self) -> int:
        """Tables and pins that hold it."""

    @property
    def block_hash(self) -> bytes | None:
        """
        Hash of its content: 16 bytes for xxh3, 32 for SHA-256. None when it is blank, in `radix` without events, and in `paged`.
        """

    @property
    def is_cached(self) -> bool:
        """Whether a lookup can find it."""

    @property
    def owner(self) -> str | None:
        """Owner of the table that took it last, or None."""

class Event:
    """Something became findable, or stopped being so."""

    def __repr__(self) -> str: ...

    @property
    def kind(self) -> str:
        """
        'stored': contents are findable that were not; 'evicted': contents are not any more; 'cleared': nothing is.
        """

    @property
    def block_hashes(self) -> list[bytes]:
        """
        Hashes of the blocks' contents: stored, in order of the prefix; evicted, the deepest first.
        """

    @property
    def parent_block_hash(self) -> bytes | None:
        """
        Stored: hash of the block before the first one; None when that starts the prefix.
        """

    @property
    def token_ids(self) -> list[int]:
        """Stored: tokens of all these blocks, len(block_hashes) * block_size."""

    @property
    def group(self) -> int:
        """Kind of layers that the blocks are for."""

    @property
    def lora(self) -> str | None:
        """Stored: the adapter, or None."""

    @property
    def cache_salt(self) -> str | None:
        """Stored: the salt, or None."""

class BlockManager:
    """One pool of blocks under one of the systems; see make_cache."""

    def __init__(self, *, system: str = 'hash', num_blocks: int, block_size: int = 16, hash_algorithm: str = 'xxh3', num_groups: int = 1, events: bool = False, hash_bits: int = 128) -> None: ...

    def sequence(self, token_ids: object, cache_salt: str | None = None, lora: str | None = None, extra: object = ()) -> Sequence:
        """
        A sequence for this cache. `extra` lists (start, stop, content) for content that is not in the tokens, such as an image over tokens [start, stop).
        """

    def lookup(self, seq: Sequence, group: int = 0) -> Hit:
        """
        The longest prefix that is there; never covers the last token. Changes nothing.
        """

    def table(self, owner: str | None = None, group: int = 0) -> BlockTable:
        """An empty block table."""

    def fork(self, table: BlockTable) -> BlockTable:
        """
        A table with the same blocks, all shared. Allocates nothing and cannot be refused; whoever writes next calls `allocate` first, which copies what is shared.
        """

    def allocate(self, table: BlockTable, num_tokens: int, hit: Hit | None = None) -> Grant | None:
        """
        Room for num_tokens in all, the hit's blocks first; None, and no trace, when the pool cannot give it. Raises StaleHitError when a block of the hit was evicted meanwhile.
        """

    def allocate_many(self, tables: Iterable[BlockTable], num_tokens: Iterable[int]) -> list[Grant | None]:
        """
        `allocate` for each table in order, in one call. From the first that is refused on, all are None and untouched. An error leaves every table as it was.
        """

    def commit(self, table: BlockTable, seq: Sequence, num_computed_tokens: int) -> None:
        """
        K/V of the first num_computed_tokens is written: their full blocks become findable.
        """

    def commit_many(self, tables: Iterable[BlockTable], seqs: Iterable[Sequence], token_ids: object) -> None:
        """
        After a decode step, for each table: append its token to its sequence and commit one token more, in one call. An error leaves every table and sequence as it was.
        """

    def free(self, table: BlockTable) -> None:
        """
        Drop the table's blocks, last first; cached ones stay findable until they are reused.
        """

    def reserve(self, table: BlockTable, num_tokens: int) -> Pin:
        """
        Hold the first num_tokens computed tokens beyond the life of the table, so that they are found and not evicted until `release`. Refused by `off`.
        """

    def release(self, pin: Pin) -> None:
        """End a reservation; CacheError when it has ended."""

    def reset(self) -> bool:
        """
        Forget every cached block; False, and nothing done, while any block is held.
        """

    def block(self, block_id: int) -> Block:
        """State of one block."""

    def free_blocks(self) -> list[int]:
        """Ids of the free blocks (blank and evictable), in the order of reuse."""

    def drain_events(self) -> list[Event]:
        """
        What became findable or stopped being so since the last call, in order; always empty unless make_cache was given events=True.
        """

    def check(self) -> None:
        """
        Recount every invariant; a CacheError names the first that fails. Costs time with the pool.
        """

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table and no pin holds: blank and evictable."""

    @property
    def block_size(self) -> int:
        """Tokens a block."""

def step_arrays(seqs: Iterable[Sequence], tables: Iterable[BlockTable], starts: Iterable[int], stops: Iterable[int]) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))]]:
    """
    Arrays of one step that computes tokens [start, stop) of each of S sequences, T in all: token_ids [T] and positions [T] (int64); query_start [S+1], num_computed [S], table_start [S+1] and block_ids (int32).
    """

class Match:
    """Where a walk down a RadixTree ended; it holds nothing unless locked."""

    def __repr__(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens found; a multiple of the page size."""

    @property
    def slots(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """Their slots in order, int32 [num_tokens]."""

class RadixTree:
    """
    Slots of tokens by the tokens before them, for engines that keep their own slots: the compressed radix tree of RadixAttention. Only whole pages are stored and found.
    """

    def __init__(self, page_size: int) -> None:
        """page_size: tokens a page, 1 to 1024 (else ConfigError)."""

    def insert(self, tokens: object, slots: object, namespace: str | None = None) -> int:
        """
        Store the slots of tokens, one of 0 to 2^31 - 1 for each (else CacheError). Returns how many leading tokens were there already: those keep the slots that the tree has. Tokens short of a page at the end are ignored.
        """

    def match(self, tokens: object, namespace: str | None = None) -> Match:
        """
        The longest stored prefix of the tokens; what is on the way becomes the most recently used.
        """

    def lock(self, match: Match) -> None:
        """
        Keep what the match found from eviction until it is unlocked as often as locked. Raises StaleHitError when it was evicted meanwhile.
        """

    def unlock(self, match: Match) -> None:
        """Take one lock of the match back; CacheError when it has none."""

    def evict(self, num_tokens: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        Evict whole leaves that are not locked, the least recently used first, until at least num_tokens tokens are gone or no leaf is left. Returns their slots, int32 [tokens].
        """

    def check(self) -> None:
        """Recount every invariant; a CacheError names the first that fails."""

    @property
    def page_size(self) -> int:
        """Tokens a page."""

    @property
    def evictable_size(self) -> int:
        """Tokens that no lock holds."""

    @property
    def protected_size(self) -> int:
        """Tokens that a lock holds."""

class WeightType(enum.Enum):
    """Element type of a source weight."""

    float32 = 0

    bfloat16 = 1

    float16 = 2

class Scratch:
    """Memory that kernels reuse from call to call; grows as needed."""

    def __init__(self) -> None: ...

    @property
    def num_bytes(self) -> int: ...

class PackedLinear:
    """A weight [n, k] packed for the CPU kernels."""

    def __init__(self, n: int, k: int, bfloat16: bool, bias: bool, scratch: Scratch, pool: ThreadPool) -> None: ...

    @property
    def num_bytes(self) -> int: ...

    def pack(self, first: int, rows: int, source: int, stride: int, type: WeightType) -> None:
        """Fills rows [first, first + rows)."""

    def set_bias(self, first: int, rows: int, source: int) -> None: ...

    def multiply(self, x: int, x_stride: int, rows: int, y: int) -> None: ...

    def read_rows(self, ids: int, count: int, out: int) -> None: ...

def rms_norm(x: int, count: int, inner: int, stride: int, inner_stride: int, k: int, weight: int, eps: float, out: int, pool: ThreadPool) -> None: ...

def add_rms_norm(x: int, x_stride: int, residual: int, residual_stride: int, count: int, k: int, weight: int, eps: float, out: int, pool: ThreadPool) -> None: ...

def rope(q: int, q_heads: int, q_stride: int, q_head_stride: int, k: int, k_heads: int, k_stride: int, k_head_stride: int, count: int, cos: int, sin: int, max_positions: int, half: int, positions: int, pool: ThreadPool) -> None: ...

def silu_mul(gate_up: int, stride: int, count: int, k: int, out: int, pool: ThreadPool) -> None: ...

def check_layout(query_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_computed: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_blocks: int, block_size: int) -> None:
    """Raises ValueError that names the first fault of a step's layout."""

class PagedAttention:
    """Attention over blocks of K/V on the CPU (prefixkv.model.attention)."""

    def __init__(self, pool: ThreadPool, num_heads: int, num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int, bfloat16: bool, scale: float) -> None: ...

    def begin(self, query_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_computed: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Plans a step. Raises ValueError that names the first fault of the layout.
        """

    def run(self, k_cache: int, v_cache: int, q: int, q_stride: int, k: int, k_stride: int, v: int, v_stride: int, out: int) -> None:
        """
        One layer of the planned step. Addresses; strides in elements from row to row.
        """
