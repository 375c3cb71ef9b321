"""Token sequences and the chained hashes of their blocks."""

from __future__ import annotations

import copy
import pickle
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b, sha256
from struct import iter_unpack
from typing import Any

from prefixkv.errors import CacheError

Extra = tuple[int, int, bytes]  # [start, stop) in tokens, and the content that they stand for
ExtraKeys = tuple[tuple[str, int | str], ...] | None
BlockHasher = Callable[[bytes, bytes, ExtraKeys], bytes]  # parent, int32 tokens, extra keys

MAX_TOKEN_ID = 2**31 - 1
TOKEN_BYTES = 4


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
    """Tokens and the hashes of their full blocks, which grow with them.

    Writes its own fields in `append`, nobody else does.
    """

    def __init__(
        self,
        manager: object,
        block_size: int,
        hash_algorithm: str,
        cache_salt: str | None,
        lora: str | None,
        extra: Sequence[Extra],
    ) -> None:
        self.manager = manager
        self.cache_salt = cache_salt
        self.lora = lora
        for start, stop, _ in extra:
            if not 0 <= start < stop:
                raise CacheError(f"an extra covers tokens {start} to {stop}")
        # Their order says nothing about the K/V, so it must not enter the hashes.
        self._extra = sorted((start, stop, sha256(b).hexdigest()) for start, stop, b in extra)
        self._parent, self._hash_block = ALGORITHMS[hash_algorithm]
        self._size = block_size
        self._tail = b""
        self._data = bytearray()
        self.hashes: list[bytes] = []  # of the full blocks
        self.num_tokens = 0

    def append(self, token_ids: Any) -> None:
        new = tokens_to_bytes(token_ids)
        data = self._tail + new
        step = TOKEN_BYTES * self._size
        full = len(data) - len(data) % step
        blocks = iter_unpack(f"{step}s", data[:full])
        parent = self._parent
        if self._hash_block is _hash_fast and not (self.cache_salt or self.lora or self._extra):
            # The one loop that the speed of a request hangs on, hence written out.
            self.hashes += [parent := blake2b(parent + block).digest() for (block,) in blocks]
        else:
            for (block,) in blocks:
                parent = self._hash_block(parent, block, self._extra_keys(len(self.hashes)))
                self.hashes.append(parent)
        self._parent = parent
        self._tail = data[full:]
        self._data += new
        self.num_tokens += len(new) // TOKEN_BYTES

    def fork(self) -> TokenSequence:
        twin = copy.copy(self)
        twin.hashes = self.hashes.copy()
        twin._data = self._data.copy()
        return twin

    def tokens(self, start: int, stop: int) -> list[int]:
        return array("i", bytes(self._data[TOKEN_BYTES * start : TOKEN_BYTES * stop])).tolist()

    def shared_prefix(self, other: TokenSequence) -> int:
        """Leading tokens whose K/V is the same in both."""
        if (self.cache_salt, self.lora) != (other.cache_salt, other.lora):
            return 0
        most = min(self.num_tokens, other.num_tokens)
        pairs = zip(self.tokens(0, most), other.tokens(0, most), strict=True)
        shared = next((i for i, (mine, its) in enumerate(pairs) if mine != its), most)
        # An extra that only one of them has parts them where it begins.
        different = set(self._extra) ^ set(other._extra)
        return min([shared, *(start for start, _, _ in different)])

    def page(self, block: int) -> tuple[Any, ...]:
        """What a block must have in common with another to be it, namespace apart."""
        first = block * self._size
        return (*self.tokens(first, first + self._size), *self._overlapping(first))

    def _overlapping(self, first: int) -> list[tuple[str, int]]:
        return [
            (digest, start - first)
            for start, stop, digest in self._extra
            if start < first + self._size and first < stop
        ]

    def _extra_keys(self, block: int) -> ExtraKeys:
        keys: list[tuple[str, int | str]] = []
        if self.lora is not None:
            keys.append(("lora", self.lora))
        keys += self._overlapping(block * self._size)
        if self.cache_salt is not None and block == 0:
            keys.append(("cache_salt", self.cache_salt))
        return tuple(keys) or None
