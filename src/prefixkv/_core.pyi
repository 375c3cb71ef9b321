"""Native core of prefixkv."""

from collections.abc import Sequence as _Sequence
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

    def shared_prefix(self, other: Sequence) -> int:
        """Leading tokens that both would share, namespace included."""

    def __repr__(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

class Hit:
    """
    What a lookup found: leading tokens of the sequence whose K/V is cached.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens covered; a multiple of the block size."""

    def __repr__(self) -> str: ...

    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks that hold them, in order."""

class Grant:
    """What an allocation gave."""

    def __repr__(self) -> str: ...

    @property
    def new_blocks(self) -> list[int]:
        """Ids appended to the table that are not of the hit."""

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(source, target) block copies to run before the next write."""

class BlockTable:
    """One sequence's logical to physical map; only the manager writes it."""

    def __repr__(self) -> str: ...

    @property
    def blocks(self) -> list[int]:
        """Block ids in logical order."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the table has room for."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K/V exists: from the hit, then as committed."""

    @property
    def group(self) -> int: ...

    @property
    def owner(self) -> str | None: ...

class Block:
    """State of one block at the time of the call."""

    def __repr__(self) -> str: ...

    @property
    def ref_cnt(self) -> int:
        """Tables that hold it."""

    @property
    def block_hash(self) -> bytes | None:
        """
        Hash of its content (16 bytes for xxh3, 32 for SHA-256), or None when it is blank.
        """

    @property
    def is_cached(self) -> bool:
        """Whether a lookup can find it."""

    @property
    def owner(self) -> str | None:
        """Owner of the table that took it last, or None."""

class BlockManager:
    """
    Block tables, reference counts, block hashes and eviction over one pool.
    """

    def __init__(self, *, num_blocks: int, block_size: int = 16, hash_algorithm: str = 'xxh3', num_groups: int = 1, hash_bits: int = 128) -> None: ...

    def sequence(self, token_ids: object, cache_salt: str | None = None, lora: str | None = None, extra: object = ()) -> Sequence:
        """
        A sequence for this cache. `extra` lists (start, stop, content) for content that is not in the tokens, such as an image over tokens [start, stop).
        """

    def lookup(self, seq: Sequence, group: int = 0) -> Hit:
        """
        The longest cached prefix of full blocks; never covers the last token. Changes nothing.
        """

    def table(self, owner: str | None = None, group: int = 0) -> BlockTable:
        """An empty block table."""

    def allocate(self, table: BlockTable, num_tokens: int, hit: Hit | None = None) -> Grant | None:
        """
        Room for num_tokens in all, the hit's blocks first; None, and no trace, when the pool cannot give it. Raises StaleHitError when a block of the hit was evicted meanwhile.
        """

    def commit(self, table: BlockTable, seq: Sequence, num_computed_tokens: int) -> None:
        """
        K/V of the first num_computed_tokens is written: their full blocks become findable.
        """

    def free(self, table: BlockTable) -> None:
        """
        Drop the table's blocks, last first; cached ones stay findable until they are reused.
        """

    def reset(self) -> bool:
        """
        Forget every cached block; False, and nothing done, while any block is held.
        """

    def block(self, block_id: int) -> Block:
        """State of one block."""

    def free_blocks(self) -> list[int]:
        """Ids of the free blocks (blank and evictable), in the order of reuse."""

    def check(self) -> None:
        """
        Recount every invariant; a CacheError names the first that fails. Costs time with the pool.
        """

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds: blank and evictable."""

    @property
    def block_size(self) -> int: ...

def step_arrays(seqs: _Sequence[Sequence], tables: _Sequence[BlockTable], starts: _Sequence[int], stops: _Sequence[int]) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))]]:
    """
    Arrays of one step that computes tokens [start, stop) of each of S sequences, T in all: token_ids [T] and positions [T] (int64); query_start [S+1], num_computed [S], table_start [S+1] and block_ids (int32).
    """

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
