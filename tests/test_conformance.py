"""All systems under random traffic: native and twin in lock step, over a shadow K/V."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from lockstep import LockStep, Setting
from managers import HASH, OFF, PAGED, RADIX, Make
from reference import OffManager, PagedManager, RadixManager, ReferenceManager

NUM_OPERATIONS = 300
SHA256 = {"hash_algorithm": "sha256_cbor"}
# Native manager, its twin, and what does not hold for them.
PAIRS: dict[str, tuple[Make, Make, dict[str, Any]]] = {
    "hash xxh3": (HASH["xxh3"], ReferenceManager, {}),
    "hash sha256_cbor": (HASH["sha256_cbor"], partial(ReferenceManager, **SHA256), {}),
    "hash sha256": (HASH["sha256"], partial(ReferenceManager, hash_algorithm="sha256"), {}),
    "hash colliding": (HASH["colliding"], ReferenceManager, {"hashes": False}),
    "radix": (RADIX["radix"], RadixManager, {}),
    "radix sha256_cbor": (partial(RADIX["radix"], **SHA256), partial(RadixManager, **SHA256), {}),
    "paged": (PAGED["paged"], PagedManager, {}),
    "off": (OFF["off"], OffManager, {"reserves": False}),
}


def lock_step(pair: str, seed: int, setting: Setting) -> Counter[str]:
    native, twin, limits = PAIRS[pair]
    return LockStep([native, twin], setting, seed, **limits).run(NUM_OPERATIONS)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("pair", PAIRS)
def test_native_and_twin_agree(pair: str, block_size: int, seed: int) -> None:
    lock_step(pair, seed, Setting.of(seed, block_size))


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS)
def test_native_and_twin_agree_at_length(pair: str) -> None:
    for seed in range(1000, 1500):
        lock_step(pair, seed, Setting.of(seed))


@pytest.mark.parametrize("pair", ["hash xxh3", "hash colliding", "radix"])
def test_they_agree_in_a_larger_pool(pair: str) -> None:
    """Long chains and many entries, so that native tables wrap, shift and grow."""
    setting = Setting(
        num_blocks=120, block_size=1, num_groups=2, vocabulary=3, most_waiting=30, most_new=30
    )
    seen = lock_step(pair, 0, setting)
    assert seen["evictions"] > 80


@pytest.mark.parametrize("pair", PAIRS)
def test_nothing_changes_without_events(pair: str) -> None:
    setting = Setting(
        num_blocks=12,
        block_size=2,
        num_groups=1,
        vocabulary=2,
        most_waiting=3,
        most_new=6,
        events=False,
    )
    assert lock_step(pair, 0, setting)["events"] == 0


EVERYWHERE = ["forks", "copies", "decoded", "refusals", "resets"]
RARE_CASES = {
    "hash xxh3": [*EVERYWHERE, "hits", "stale hits", "evictions", "duplicates", "pins", "misuses"],
    "radix": [*EVERYWHERE, "hits", "stale hits", "evictions", "pins", "misuses"],
    "paged": [*EVERYWHERE, "hits", "stale hits", "pins", "misuses"],
    "off": EVERYWHERE,
}


@pytest.mark.parametrize("pair", RARE_CASES)
def test_the_traffic_reaches_every_rare_case(pair: str) -> None:
    seen = sum((lock_step(pair, seed, Setting.of(seed)) for seed in range(40)), Counter[str]())
    assert {case: seen[case] for case in RARE_CASES[pair] if seen[case] < 15} == {}
