"""Native `hash` manager and plain Python twin in lock step, and faults that this must catch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lockstep import Divergence, LockStep, Setting
from managers import MAKERS
from reference import BlockTable, Grant, Hit, ReferenceManager, TokenSequence

NUM_OPERATIONS = 300
TWIN_OF = {"xxh3": "fast", "colliding": "fast", "sha256_cbor": "sha256_cbor", "sha256": "sha256"}


def lock_step(name: str, seed: int, setting: Setting | None = None) -> Counter[str]:
    """Random traffic through the native manager and its twin; the twin is right."""
    setting = setting or Setting.of(seed)
    native = MAKERS[name](**setting.sizes())
    twin = ReferenceManager(hash_algorithm=TWIN_OF[name], **setting.sizes())
    return LockStep([native, twin], setting, seed).run(NUM_OPERATIONS)


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("name", TWIN_OF)
def test_native_and_twin_agree(name: str, seed: int) -> None:
    lock_step(name, seed)


@pytest.mark.parametrize("name", TWIN_OF)
def test_they_agree_in_a_larger_pool(name: str) -> None:
    """Long chains and many entries, so that the native hash table wraps and shifts."""
    setting = Setting(
        num_blocks=150, block_size=1, num_groups=2, vocabulary=3, most_waiting=40, most_new=40
    )
    seen = lock_step(name, 0, setting)
    assert seen["evictions"] > 150


def test_the_traffic_reaches_every_rare_case() -> None:
    seen = sum((lock_step("xxh3", seed) for seed in range(20)), Counter[str]())
    cases = ["hit blocks", "stale hits", "refusals", "evictions", "duplicates", "resets"]
    assert {case: seen[case] for case in cases if seen[case] < 20} == {}


# -------------------------------------------------------------------------------- deliberate faults


class HeadFirstFree(ReferenceManager):
    def free(self, table: BlockTable) -> None:
        table.blocks.reverse()
        super().free(table)


class NoTouchOnHit(ReferenceManager):
    def _touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self._ref_cnt[block] += 1  # but it stays in the free queue


class HashKeptAfterEviction(ReferenceManager):
    def _evict(self, count: int, owner: str | None) -> list[int]:
        evicted = [self._cached.popitem(False)[0] for _ in range(count)]
        for block in evicted:
            self._ref_cnt[block] = 1
            self._owner[block] = owner
        return evicted


class HitCoversTheWholePrompt(ReferenceManager):
    def lookup(self, seq: TokenSequence, group: int = 0) -> Hit:
        seq.num_tokens += 1
        hit = super().lookup(seq, group)
        seq.num_tokens -= 1
        return hit


class RefusalKeepsReferences(ReferenceManager):
    def allocate(self, table: BlockTable, num_tokens: int, hit: Hit | None = None) -> Grant | None:
        grant = super().allocate(table, num_tokens, hit)
        if grant is None and hit is not None:
            self._touch(hit.blocks)
        return grant


class CommitBeforeTheStep(ReferenceManager):
    def allocate(self, table: BlockTable, num_tokens: int, hit: Hit | None = None) -> Grant | None:
        grant = super().allocate(table, num_tokens, hit)
        if grant is not None and hit is not None:
            full = num_tokens // self.block_size
            for block, key in zip(table.blocks[:full], hit.keys, strict=False):
                if key not in self._index:
                    self._index[key] = block
                    self._key[block] = key
        return grant


class LaterCopyServes(ReferenceManager):
    def commit(self, table: BlockTable, seq: TokenSequence, num_computed_tokens: int) -> None:
        super().commit(table, seq, num_computed_tokens)
        for key, others in self._copies.items():
            self._index[key], others[-1] = others[-1], self._index[key]


class GroupsShare(ReferenceManager):
    def _keys(self, seq: TokenSequence, *where: int) -> list[bytes]:
        return super()._keys(seq, 0, *where[1:])


class NamespacesShare(ReferenceManager):
    def sequence(self, token_ids: Any = (), *_: Any, **__: Any) -> TokenSequence:
        return super().sequence(token_ids)


class StaleHitIsTaken(ReferenceManager):
    def _check_hit(self, table: BlockTable, num_tokens: int, hit: Hit) -> None:
        fresh = hit._replace(num_evictions=self._num_evictions)
        super()._check_hit(table, num_tokens, fresh)

    def _touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self._ref_cnt[block]:
                self._cached.pop(block, None)
                if block in self._blank:
                    self._blank.remove(block)
            self._ref_cnt[block] += 1


class BlankGoesToTheBack(ReferenceManager):
    def free(self, table: BlockTable) -> None:
        before = len(self._blank)
        super().free(table)
        self._blank = self._blank[before:] + self._blank[:before]


FAULTS = [
    HeadFirstFree,
    NoTouchOnHit,
    HashKeptAfterEviction,
    HitCoversTheWholePrompt,
    RefusalKeepsReferences,
    CommitBeforeTheStep,
    LaterCopyServes,
    GroupsShare,
    NamespacesShare,
    StaleHitIsTaken,
    BlankGoesToTheBack,
]
# Those that would hand a request another's K/V, or no logits: seen with no second manager to ask.
WRONG_ANSWERS = [
    NoTouchOnHit,
    HashKeptAfterEviction,
    HitCoversTheWholePrompt,
    CommitBeforeTheStep,
    GroupsShare,
    NamespacesShare,
    StaleHitIsTaken,
]


def run_alone(manager: type[ReferenceManager], seed: int) -> None:
    """With the shadow only."""
    setting = Setting.of(seed)
    LockStep([manager(**setting.sizes())], setting, seed).run(NUM_OPERATIONS)


def run_compared(manager: type[ReferenceManager], seed: int) -> None:
    """With the comparison only."""
    setting = Setting.of(seed)
    caches = [manager(**setting.sizes()), ReferenceManager(**setting.sizes())]
    LockStep(caches, setting, seed, shadow=False).run(NUM_OPERATIONS)


def catches(run: Callable[..., None], fault: type[ReferenceManager]) -> bool:
    for seed in range(20):
        try:
            run(fault, seed)
        except Divergence:
            return True
    return False


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_catches(fault: type[ReferenceManager]) -> None:
    assert catches(run_compared, fault)


@pytest.mark.parametrize("fault", WRONG_ANSWERS)
def test_the_shadow_catches(fault: type[ReferenceManager]) -> None:
    assert catches(run_alone, fault)


@pytest.mark.parametrize("run", [run_compared, run_alone])
def test_nothing_is_caught_without_a_fault(run: Callable[..., None]) -> None:
    assert not catches(run, ReferenceManager)
