"""What is watched in random traffic through one manager, or through two in lock step.

* The **comparison** with the second manager: hits, ids, counts, errors, orders, hashes, events.
* The **shadow K/V**: a hit must bring exactly what the request would have computed itself, nobody
  may write a slot that another can see, and what a table or a pin holds must stay.
* The **books**: counts recounted from live tables and pins, no block lost or there twice, and the
  events true.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ledger import Ledger
from shadow import Divergence, Request, Shadow

Outcome = Any


def agree(what: str, outcomes: list[Outcome]) -> None:
    if outcomes.count(outcomes[0]) != len(outcomes):
        raise Divergence(f"{what}: {outcomes[0]}, not {outcomes[1]}")


class Watch:
    """Over `caches`, of which the first is under test and a second, if any, is right."""

    def __init__(self, caches: list[Any], *, shadow: bool, hashes: bool, events: bool) -> None:
        self.caches = caches
        self.cache = caches[0]
        self.hashes = hashes
        self.shadow = Shadow(self.cache) if shadow else None
        follows = shadow and hashes and events
        self.ledger = Ledger(self.cache.block_size) if follows else None
        self.hash_of: dict[Any, Any] = {}  # from each manager's to the other's

    def visible(self, i: int, running: list[Request]) -> Outcome:
        cache = self.caches[i]
        blocks = [cache.block(block) for block in range(cache.num_blocks)]
        holders = [request.tables[i] for request in running]
        return (
            [(block.ref_cnt, block.block_hash, block.is_cached, block.owner) for block in blocks],
            cache.free_blocks(),
            [(t.blocks, t.num_tokens, t.num_computed_tokens) for t in holders],
            [request.seqs[i].num_tokens for request in running],
        )

    def check(self, running: list[Request], pinned: list[Request], seen: Counter[str]) -> None:
        if hasattr(self.cache, "check"):
            self.cache.check()
        if self.shadow is not None:
            self.check_books(running + pinned)
            for request in running:
                self.shadow.check(request, request.table.num_computed_tokens)
            for prefix in pinned:
                self.check_pinned(prefix)
        events = [cache.drain_events() for cache in self.caches]
        if self.ledger is not None:
            self.check_events(events[0])
        if len(self.caches) == 2:
            self.compare_states(running, seen)
            self.compare_events(*events)
        seen["events"] += len(events[0])

    def check_books(self, held: list[Request]) -> None:
        """Every block is held by those that say so, or free; none is both, or neither."""
        holders: Counter[int] = Counter()
        for request in held:
            holders.update(request.table.blocks)
        counts = [self.cache.block(block).ref_cnt for block in range(self.cache.num_blocks)]
        for block, count in enumerate(counts):
            if count != holders[block]:
                raise Divergence(f"block {block} has {holders[block]} holders, not {count}")
        free = self.cache.free_blocks()
        if sorted(free) != [block for block, count in enumerate(counts) if not count]:
            raise Divergence(f"{free} are free, but counts are {counts}")
        if self.cache.num_free_blocks != len(free):
            raise Divergence(f"{self.cache.num_free_blocks} free blocks, not {len(free)}")

    def check_pinned(self, pinned: Request) -> None:
        """It holds what it held, and who has the same tokens finds them."""
        assert self.shadow is not None
        num_tokens = pinned.table.num_tokens
        self.shadow.check(pinned, num_tokens)
        seq = self.cache.sequence([*pinned.tokens, 0], **pinned.namespace)
        found = self.cache.lookup(seq, pinned.group).num_tokens
        if found < num_tokens:
            raise Divergence(f"{found} tokens are found of {num_tokens} reserved")

    def check_events(self, events: list[Any]) -> None:
        assert self.ledger is not None
        self.ledger.follow(events)
        cached = [self.cache.block(i) for i in range(self.cache.num_blocks)]
        cached = [block for block in cached if block.is_cached]
        hashes = {block.block_hash for block in cached}
        if None not in hashes and hashes != self.ledger.hashes:  # `paged` shows none
            raise Divergence(f"by events, {len(self.ledger.hashes)} are cached, not {len(hashes)}")

    def compare_states(self, running: list[Request], seen: Counter[str]) -> None:
        states = [self.visible(i, running) for i in range(2)]
        for one, other in zip(*(state[0] for state in states), strict=True):
            agree("block", [one[:1] + one[2:], other[:1] + other[2:]])
            self.same_hashes([one[1]], [other[1]])
        agree("free_blocks", [state[1] for state in states])
        agree("tables", [state[2] for state in states])
        agree("num_free_blocks", [cache.num_free_blocks for cache in self.caches])
        hashes = [block[1] for block in states[1][0] if block[1]]
        seen["duplicates"] += len(set(hashes)) < len(hashes)

    def compare_events(self, events: list[Any], right: list[Any]) -> None:
        def but_hashes(event: Any) -> Outcome:
            tokens = list(event.token_ids)
            return event.kind, tokens, event.group, event.lora, event.cache_salt

        agree("events", [[but_hashes(event) for event in some] for some in (events, right)])
        for one, other in zip(events, right, strict=True):
            self.same_hashes(one.block_hashes, other.block_hashes)
            self.same_hashes([one.parent_block_hash], [other.parent_block_hash])

    def same_hashes(self, hashes: list[Any], right: list[Any]) -> None:
        """Each algorithm has hashes of its own, so the same ones must always go together."""
        agree("hashes", [[h is None for h in some] for some in (hashes, right)])
        if self.hashes:
            for one, other in zip(hashes, right, strict=True):
                agree("hash", [self.hash_of.setdefault((0, one), other), other])
                agree("hash", [self.hash_of.setdefault((1, other), one), one])
