"""Seeded random traffic through one manager, or through two in lock step.

What is watched after every operation:

* the **comparison** with the second manager: hits, ids, counts, errors, queue order, block hashes;
* the **shadow K/V**, which holds for each slot what a model would have written there: the token
  with all that it depends on. A hit must bring exactly what the request would have computed itself,
  and nobody may overwrite a slot that a table holds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prefixkv.errors import CacheError

Outcome = Any


class Divergence(AssertionError):
    """The managers disagree, or a slot does not hold what it must."""


@dataclass
class Request:
    """A request on its way; handles hold one object for each manager."""

    tokens: list[int]
    namespace: dict[str, Any]
    group: int
    seqs: list[Any]
    hits: list[Any]
    tables: list[Any] = field(default_factory=list)

    def content(self, position: int, block_size: int) -> tuple[Any, ...]:
        """What the K/V at `position` depends on, and so what its slot must hold."""
        block_end = position - position % block_size + block_size
        extra = [(e[0], e[2]) for e in self.namespace.get("extra", ()) if e[0] < block_end]
        salt, lora = self.namespace.get("cache_salt"), self.namespace.get("lora")
        return self.group, salt, lora, tuple(extra), tuple(self.tokens[: position + 1])


@dataclass(frozen=True)
class Setting:
    """Sizes small enough for every rare case to be frequent."""

    num_blocks: int
    block_size: int
    num_groups: int
    vocabulary: int
    most_waiting: int
    most_new: int  # tokens that a prompt adds to an earlier one's beginning

    @staticmethod
    def of(seed: int) -> Setting:
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4])
        return Setting(
            num_blocks=rng.randint(4, 24),
            block_size=block_size,
            num_groups=rng.choice([1, 1, 2]),
            vocabulary=rng.choice([2, 2, 3]),
            most_waiting=rng.randint(1, 4),
            most_new=2 * block_size + 2,
        )

    def sizes(self) -> dict[str, Any]:
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "num_groups": self.num_groups,
        }


NAMESPACES: list[dict[str, Any]] = [
    {"cache_salt": "tenant-a"},
    {"lora": "tenant-a"},
    {"extra": [(1, 3, b"one")]},
    {"extra": [(1, 3, b"two")]},
    {"cache_salt": "tenant-a", "lora": "adapter", "extra": [(0, 1, b"one"), (2, 9, b"two")]},
]


class LockStep:
    """Drives `caches`, of which the first is under test and a second, if any, is right."""

    def __init__(
        self, caches: list[Any], setting: Setting, seed: int, *, shadow: bool = True
    ) -> None:
        self.caches = caches
        self.setting = setting
        self.rng = random.Random(f"traffic {seed}")
        self.shadow: list[Any] | None = None
        if shadow:
            self.shadow = [None] * (setting.num_blocks * setting.block_size)
        self.prompts: list[list[int]] = []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.seen: Counter[str] = Counter()

    def run(self, num_operations: int) -> Counter[str]:
        operations: list[tuple[Callable[[], None], int]] = [
            (self.arrive, 6),
            (self.place, 8),
            (self.grow, 3),
            (self.compute, 10),
            (self.finish, 4),
            (self.drop, 1),
            (self.reset, 1),
        ]
        names, weights = zip(*operations, strict=True)
        for operation in self.rng.choices(names, weights, k=num_operations):
            operation()
            self.compare_states()
        return self.seen

    # ---------------------------------------------------------------------------------- operations

    def arrive(self) -> None:
        """A request comes and is looked up; it may wait long enough for its hit to go stale."""
        if len(self.waiting) >= self.setting.most_waiting:
            return
        tokens = self.prompt()
        namespace = self.rng.choice([{}, {}, {}, self.rng.choice(NAMESPACES)])
        group = self.rng.randrange(self.setting.num_groups)
        seqs = [cache.sequence(tokens, **namespace) for cache in self.caches]
        self.waiting.append(Request(tokens, namespace, group, seqs, self.lookup(seqs, group)))

    def prompt(self) -> list[int]:
        """Often the beginning of an earlier one, with another end."""
        tokens: list[int] = []
        if self.prompts and self.rng.random() < 0.8:
            earlier = self.rng.choice(self.prompts[-8:])
            tokens = earlier[: self.rng.randint(0, len(earlier))]
        tokens = tokens + self.random_tokens(self.rng.randint(1, self.setting.most_new))
        self.prompts.append(tokens)
        return tokens

    def random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.setting.vocabulary) for _ in range(count)]

    def lookup(self, seqs: list[Any], group: int) -> list[Any]:
        hits = [cache.lookup(seq, group) for cache, seq in zip(self.caches, seqs, strict=True)]
        self.agree("lookup", [(hit.num_tokens, hit.blocks) for hit in hits])
        return hits

    def place(self) -> None:
        """Allocate for a waiting request, all of it or a first chunk."""
        if not self.waiting:
            return
        request = self.rng.choice(self.waiting)
        least = min(request.hits[0].num_tokens + 1, len(request.tokens))
        room = self.rng.choice([self.rng.randint(least, len(request.tokens)), len(request.tokens)])
        owner = f"request {self.rng.randrange(100)}"
        tables = [cache.table(owner=owner, group=request.group) for cache in self.caches]
        outcome = self.allocate(tables, room, request.hits)
        if isinstance(outcome, type):
            self.seen["stale hits"] += 1
            request.hits = self.lookup(request.seqs, request.group)
        elif outcome is None:
            self.seen["refusals"] += 1
        else:
            self.waiting.remove(request)
            request.tables = tables
            self.running.append(request)
            self.seen["hit blocks"] += len(request.hits[0].blocks)
            self.check_hit(request)

    def allocate(self, tables: list[Any], room: int, hits: list[Any] | None = None) -> Outcome:
        cached = [block for block in range(self.setting.num_blocks) if self.is_cached(block)]
        outcomes: list[Outcome] = []
        for i, cache in enumerate(self.caches):
            try:
                grant = cache.allocate(tables[i], room, None if hits is None else hits[i])
                outcomes.append(grant and (grant.new_blocks, grant.copies))
            except CacheError as error:
                outcomes.append(type(error))
        self.agree("allocate", outcomes)
        self.seen["evictions"] += sum(not self.is_cached(block) for block in cached)
        return outcomes[0]

    def is_cached(self, block: int) -> bool:
        cached: bool = self.caches[0].block(block).is_cached
        return cached

    def grow(self) -> None:
        """Append tokens to a running request, or make room for the next chunk of its prompt."""
        if not self.running:
            return
        request = self.rng.choice(self.running)
        if request.tables[0].num_tokens == len(request.tokens):
            more = self.random_tokens(self.rng.randint(1, 3))
            request.tokens = request.tokens + more
            for seq in request.seqs:
                seq.append(more)
        room = self.rng.randint(request.tables[0].num_tokens, len(request.tokens))
        if self.allocate(request.tables, room) is None:
            self.seen["refusals"] += 1

    def compute(self) -> None:
        """A step: read all K/V so far, write that of some tokens, and only then commit them."""
        if not self.running:
            return
        request = self.rng.choice(self.running)
        table = request.tables[0]
        stop = self.rng.choice(
            [self.rng.randint(table.num_computed_tokens, table.num_tokens), table.num_tokens]
        )
        self.check_held(request, table.num_computed_tokens)
        self.write(request, stop)
        for cache, one, seq in zip(self.caches, request.tables, request.seqs, strict=True):
            try:
                cache.commit(one, seq, stop)
            except CacheError as error:
                raise Divergence("a correct commit is refused") from error

    def finish(self) -> None:
        if self.running:
            request = self.take_running()
            for cache, table in zip(self.caches, request.tables, strict=True):
                cache.free(table)

    def drop(self) -> None:
        """Forget a table without a free."""
        if self.running:
            self.take_running()

    def take_running(self) -> Request:
        request = self.running.pop(self.rng.randrange(len(self.running)))
        self.check_held(request, request.tables[0].num_computed_tokens)
        return request

    def reset(self) -> None:
        done = [cache.reset() for cache in self.caches]
        self.agree("reset", done)
        self.seen["resets"] += done[0]

    # ---------------------------------------------------------------------------------- comparison

    def agree(self, what: str, outcomes: list[Outcome]) -> None:
        if outcomes.count(outcomes[0]) != len(outcomes):
            raise Divergence(f"{what}: {outcomes[0]}, not {outcomes[1]}")

    def compare_states(self) -> None:
        if hasattr(self.caches[0], "check"):
            self.caches[0].check()
        if len(self.caches) == 1:
            return
        self.agree("free_blocks", [cache.free_blocks() for cache in self.caches])
        self.agree("num_free_blocks", [cache.num_free_blocks for cache in self.caches])
        for index in range(self.setting.num_blocks):
            one, other = (cache.block(index) for cache in self.caches)
            self.agree(f"ref_cnt of {index}", [one.ref_cnt, other.ref_cnt])
            self.agree(f"is_cached of {index}", [one.is_cached, other.is_cached])
            self.agree(f"owner of {index}", [one.owner, other.owner])
            # xxh3 has a seed of its own: only that there is a hash can be compared.
            if one.block_hash and len(one.block_hash) == len(other.block_hash):
                self.agree(f"hash of {index}", [one.block_hash, other.block_hash])
        for request in self.running:
            self.agree(
                "table", [(t.blocks, t.num_tokens, t.num_computed_tokens) for t in request.tables]
            )
        self.seen["duplicates"] += self.has_duplicates()

    def has_duplicates(self) -> bool:
        hashes = [self.caches[1].block(i).block_hash for i in range(self.setting.num_blocks)]
        cached = [one for one in hashes if one]
        return len(set(cached)) < len(cached)

    # -------------------------------------------------------------------------------------- shadow

    def slots(self, request: Request, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Slot of each position in [start, stop) of a request, and what it must hold."""
        size, blocks = self.setting.block_size, request.tables[0].blocks
        for position in range(start, stop):
            slot = blocks[position // size] * size + position % size
            yield slot, request.content(position, size)

    def write(self, request: Request, stop: int) -> None:
        if self.shadow is not None:
            for slot, content in self.slots(request, request.tables[0].num_computed_tokens, stop):
                self.shadow[slot] = content

    def check_held(self, request: Request, stop: int) -> None:
        if self.shadow is not None:
            for slot, content in self.slots(request, 0, stop):
                if self.shadow[slot] != content:
                    raise Divergence(f"slot {slot} holds {self.shadow[slot]}, not {content}")

    def check_hit(self, request: Request) -> None:
        hit = request.hits[0].num_tokens
        if self.shadow is not None and hit >= len(request.tokens):
            raise Divergence("the hit leaves nothing to compute, so there are no logits")
        self.check_held(request, hit)
