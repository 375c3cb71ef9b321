"""Block hashes: golden values, every form of input, and what makes two blocks differ."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from prefixkv.cache import make_cache
from prefixkv.errors import CacheError
from reference import ReferenceManager

NATIVE = ["xxh3", "sha256_cbor", "sha256"]
TWIN = ["fast", "sha256_cbor", "sha256"]
MAKERS: dict[str, Callable[..., Any]] = {"native": make_cache, "twin": ReferenceManager}
MANAGERS = [("native", name) for name in NATIVE] + [("twin", name) for name in TWIN]

GOLDEN = {  # vLLM 0.33: tokens 0..39, block size 16; the first 8 bytes of blocks 0 and 1
    ("sha256_cbor", None): ["dc918a88b139e5af", "c300ec275d7bf08a"],
    ("sha256_cbor", "tenant-a"): ["4e31e1ced73eb044", "dd153a6b48192c90"],
    ("sha256", None): ["fe8fa5dda3210d0c", "8be7aaa33831156d"],
    ("sha256", "tenant-a"): ["255b152c89e76327"],
}
TOKENS = list(range(40))
POOL = 1 << 14


@pytest.fixture(params=MANAGERS, ids=lambda param: "-".join(param))
def cache(request: pytest.FixtureRequest) -> Any:
    where, algorithm = request.param
    return MAKERS[where](num_blocks=64, block_size=4, hash_algorithm=algorithm)


def block_hashes(cache: Any, seq: Any) -> list[bytes]:
    """Hashes of the full blocks of `seq`, as the cache shows them once they are cached."""
    table = cache.table()
    cache.allocate(table, seq.num_tokens)
    cache.commit(table, seq, seq.num_tokens)
    full = seq.num_tokens // cache.block_size
    hashes = [cache.block(block).block_hash for block in table.blocks[:full]]
    cache.free(table)
    return hashes


@pytest.mark.parametrize("where", MAKERS)
@pytest.mark.parametrize(("algorithm", "salt"), GOLDEN)
def test_hashes_are_those_of_vllm(where: str, algorithm: str, salt: str | None) -> None:
    cache = MAKERS[where](num_blocks=8, block_size=16, hash_algorithm=algorithm)
    hashes = block_hashes(cache, cache.sequence(TOKENS, cache_salt=salt))
    golden = GOLDEN[algorithm, salt]
    assert [h.hex()[:16] for h in hashes][: len(golden)] == golden
    assert [len(h) for h in hashes] == [32, 32]


@pytest.mark.parametrize("where", MAKERS)
def test_the_64_bit_form_is_the_last_8_bytes(where: str) -> None:
    cache = MAKERS[where](num_blocks=8, block_size=16, hash_algorithm="sha256_cbor")
    hashes = block_hashes(cache, cache.sequence(TOKENS))
    assert [int.from_bytes(h[-8:], "big") for h in hashes] == [
        2233398808101521225,
        17911472383915781900,
    ]


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "sha256"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 64, 300, 1024])
def test_native_and_twin_hash_alike(algorithm: str, block_size: int) -> None:
    rng = random.Random(block_size)
    edges = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1]
    tokens = [rng.choice(edges) for _ in range(3 * block_size)]
    extra = [(1, 2, b"one"), (0, 3 * block_size, b"all"), (block_size, block_size + 1, b"")]
    hashes = []
    for make in MAKERS.values():
        cache = make(num_blocks=4, block_size=block_size, hash_algorithm=algorithm)
        seq = cache.sequence(tokens, cache_salt="s\u00e4lt" * 9, lora="adapter", extra=extra)
        hashes.append(block_hashes(cache, seq))
    assert hashes[0] == hashes[1]


def test_xxh3_is_16_bytes_and_seeded_for_each_manager() -> None:
    caches = [make_cache(num_blocks=4, block_size=4) for _ in range(2)]
    first, second = (block_hashes(cache, cache.sequence(range(4)))[0] for cache in caches)
    assert len(first) == 16
    assert first != second


@pytest.mark.parametrize("seed", range(10))
def test_growing_gives_the_hashes_of_all_at_once(cache: Any, seed: int) -> None:
    rng = random.Random(seed)
    namespace = {"cache_salt": "s", "extra": [(3, 30, b"image")]} if seed % 2 else {}
    seq = cache.sequence([], **namespace)
    at = 0
    while at < len(TOKENS):
        step = rng.randint(0, 9)
        seq.append(TOKENS[at : at + step])
        at += step
        if rng.random() < 0.3:
            cache.lookup(seq)  # hashes what is there; must not matter
    assert seq.num_tokens == len(TOKENS)
    assert block_hashes(cache, seq) == block_hashes(cache, cache.sequence(TOKENS, **namespace))


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "tuple": tuple,
    "array i": lambda tokens: array("i", tokens),
    "array q": lambda tokens: array("q", tokens),
    "bytes": bytes,
    "numpy int32": lambda tokens: np.array(tokens, np.int32),
    "numpy int64": lambda tokens: np.array(tokens, np.int64),
    "numpy strided": lambda tokens: np.repeat(np.array(tokens, np.int64), 2)[::2],
    "numpy unaligned": lambda tokens: np.frombuffer(
        b"-" + np.array(tokens, np.int32).tobytes(), np.int32, offset=1
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_tokens_hashes_alike(cache: Any, form: str) -> None:
    tokens = [0, 1, 127, 128, 200, 255, 7, 8, 9]
    seq = cache.sequence(FORMS[form](tokens[:5]))
    seq.append(FORMS[form](tokens[5:]))
    assert seq.num_tokens == len(tokens)
    assert block_hashes(cache, seq) == block_hashes(cache, cache.sequence(tokens))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_torch_tensors_hash_like_lists(cache: Any, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    seq = cache.sequence(torch.tensor(TOKENS, dtype=getattr(torch, dtype)))
    assert block_hashes(cache, seq) == block_hashes(cache, cache.sequence(TOKENS))


def changed(position: int) -> list[int]:
    return [*TOKENS[:position], 99, *TOKENS[position + 1 :]]


IMAGE = [(9, 14, b"image")]
# Tokens and namespace of one, of the other, and the first block that differs.
DIFFERENCES: dict[str, tuple[Any, ...]] = {
    "first token": (TOKENS, {}, changed(0), {}, 0),
    "last token of a block": (TOKENS, {}, changed(11), {}, 2),
    "first token of a block": (TOKENS, {}, changed(12), {}, 3),
    "position": (TOKENS[:8], {}, TOKENS[4:12], {}, 0),
    "equal blocks at two positions": ([5] * 8, {}, [5] * 4 + [6] * 4, {}, 1),
    "salt": (TOKENS, {}, TOKENS, {"cache_salt": "a"}, 0),
    "another salt": (TOKENS, {"cache_salt": "b"}, TOKENS, {"cache_salt": "a"}, 0),
    "adapter": (TOKENS, {}, TOKENS, {"lora": "a"}, 0),
    "another adapter": (TOKENS, {"lora": "b"}, TOKENS, {"lora": "a"}, 0),
    "adapter or salt": (TOKENS, {"lora": "x"}, TOKENS, {"cache_salt": "x"}, 0),
    "extra": (TOKENS, {}, TOKENS, {"extra": IMAGE}, 2),
    "content of the extra": (TOKENS, {"extra": [(9, 14, b"")]}, TOKENS, {"extra": IMAGE}, 2),
    "start of the extra": (TOKENS, {"extra": [(10, 14, b"image")]}, TOKENS, {"extra": IMAGE}, 2),
    "extra that reaches one block more": (
        *(TOKENS, {"extra": IMAGE}),
        *(TOKENS, {"extra": [(9, 17, b"image")]}),
        4,
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_difference_changes_every_hash_from_its_block_on(cache: Any, difference: str) -> None:
    tokens, namespace, other_tokens, other_namespace, first = DIFFERENCES[difference]
    one = block_hashes(cache, cache.sequence(tokens, **namespace))
    other = block_hashes(cache, cache.sequence(other_tokens, **other_namespace))
    assert one[:first] == other[:first]
    assert not set(one[first:]) & set(other[first:])


def test_equal_blocks_of_one_sequence_have_hashes_of_their_own(cache: Any) -> None:
    hashes = block_hashes(cache, cache.sequence([5] * 16))
    assert len(set(hashes)) == 4


BAD_TOKENS: dict[str, tuple[Any, str]] = {  # and what the message says of value and position
    "negative": ([1, 2, -3, 4], r"-3\b.*\b2\b"),
    "too large": ([1, 2**31], r"2147483648\b.*\b1\b"),
    "far too large": ([2**70, 1], r"1180591620717411303424\b.*\b0\b"),
    "float": ([1, 2.5], r"2\.5\b.*\b1\b"),
    "string": (["7"], r"7\b.*\b0\b"),
    "none": ([1, 2, 3, None], r"None\b.*\b3\b"),
    "numpy negative": (np.array([4, -1], np.int64), r"-1\b.*\b1\b"),
    "numpy too large": (np.array([4, 2**31], np.int64), r"2147483648\b.*\b1\b"),
    "array negative": (array("i", [5, 6, -7]), r"-7\b.*\b2\b"),
}


@pytest.mark.parametrize("bad", BAD_TOKENS)
def test_a_bad_token_is_named_and_nothing_is_appended(cache: Any, bad: str) -> None:
    tokens, message = BAD_TOKENS[bad]
    seq = cache.sequence(TOKENS[:6])
    with pytest.raises(CacheError, match=message):
        seq.append(tokens)
    assert seq.num_tokens == 6
    seq.append(TOKENS[6:])
    assert block_hashes(cache, seq) == block_hashes(cache, cache.sequence(TOKENS))


@pytest.mark.parametrize("bad", BAD_TOKENS)
def test_a_sequence_does_not_start_with_a_bad_token(cache: Any, bad: str) -> None:
    tokens, message = BAD_TOKENS[bad]
    with pytest.raises(CacheError, match=message):
        cache.sequence(tokens)


@pytest.mark.parametrize("algorithm", ["xxh3", "sha256_cbor", "sha256"])
def test_the_order_in_which_extras_are_listed_says_nothing(algorithm: str) -> None:
    extras = [(9, 10, b"a"), (9, 10, b"b"), (2, 6, b"c")]
    cache = make_cache("hash", num_blocks=8, block_size=4, hash_algorithm=algorithm)
    mine = cache.sequence(range(13), extra=extras)
    other = cache.sequence(range(13), extra=extras[::-1])
    table = cache.table()
    cache.allocate(table, 13)
    cache.commit(table, mine, 13)
    assert mine.shared_prefix(other) == 13
    assert cache.lookup(other).num_tokens == 12


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_native_and_twin_find_the_extras_of_a_block_alike(block_size: int) -> None:
    """Nested, overlapping and equal ones, and such as reach over many blocks."""
    rng = random.Random(block_size)
    for _ in range(50):
        starts = [rng.randrange(45) for _ in range(rng.randint(1, 8))]
        extras = [(s, s + rng.choice([1, 2, 5, 30]), bytes([rng.randrange(3)])) for s in starts]
        hashes = [
            block_hashes(cache, cache.sequence(TOKENS, extra=extras))
            for cache in (
                make(num_blocks=64, block_size=block_size, hash_algorithm="sha256_cbor")
                for make in MAKERS.values()
            )
        ]
        assert hashes[0] == hashes[1]


def best_time(call: Callable[[], object], rounds: int = 7) -> float:
    """CPU time in seconds."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def test_the_cost_of_extras_grows_with_their_number_and_no_faster() -> None:
    def cost(count: int) -> float:
        cache = make_cache("hash", num_blocks=count, block_size=4)
        extras = [(4 * i, 4 * i + 4, b"frame") for i in range(count)]
        seq = cache.sequence([1] * (4 * count), extra=extras)
        table = cache.table()
        cache.allocate(table, 4 * count)
        cache.commit(table, seq, 4 * count)
        return best_time(lambda: cache.lookup(seq))

    assert cost(16_000) <= 40 * cost(1000)  # 256 times, if each block looked at each extra


@pytest.fixture(scope="module")
def low_words() -> list[int]:
    """Of the SHA-256 of each block of one token: its first 8 bytes."""
    words = []
    for start in range(0, 1 << 17, POOL):
        cache = cache_of(range(start, start + POOL))
        hashes = [cache.block(i).block_hash for i in range(POOL)]
        words += [int.from_bytes(h[:8], "little") for h in hashes]
    return words


def cache_of(tokens: Iterable[int]) -> Any:
    cache = make_cache("hash", num_blocks=POOL, block_size=1, hash_algorithm="sha256_cbor")
    for token in tokens:
        seq, table = cache.sequence([token]), cache.table()
        cache.allocate(table, 1)
        cache.commit(table, seq, 1)
        cache.free(table)
    return cache


@pytest.mark.parametrize(
    "tag", [lambda word: word, lambda word: word ^ word >> 32], ids=["plain", "folded"]
)
def test_nobody_can_choose_blocks_that_crowd_the_table(
    low_words: list[int], tag: Callable[[int], int]
) -> None:
    """SHA-256 has no seed, so the place in a table must not follow from it alone."""
    crowd = [token for token, word in enumerate(low_words) if not tag(word) >> 12 & 15]

    def cost(tokens: list[int]) -> float:
        cache = cache_of(tokens)
        seqs = [cache.sequence([token, 0]) for token in tokens]
        return best_time(lambda: [cache.lookup(seq) for seq in seqs])

    assert cost(crowd) <= 2 * cost(list(range(len(crowd))))
