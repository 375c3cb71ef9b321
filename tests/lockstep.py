"""Seeded random traffic through one manager, or through two in lock step.

What must hold after every operation is in `watch`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from misuse import MISUSES, World
from prefixkv.errors import CacheError
from shadow import Divergence, Request
from watch import Watch, agree

__all__ = ["Divergence", "LockStep", "Setting"]

Outcome = Any
MOST_RUNNING = 8
MOST_PINS = 3


@dataclass(frozen=True)
class Setting:
    """Sizes small enough for every rare case to be frequent."""

    num_blocks: int
    block_size: int
    num_groups: int
    vocabulary: int
    most_waiting: int
    most_new: int  # tokens that a prompt adds to an earlier one's beginning
    events: bool = True

    @staticmethod
    def of(seed: int, block_size: int | None = None) -> Setting:
        rng = random.Random(seed)
        size = block_size or rng.choice([1, 2, 4])
        return Setting(
            num_blocks=rng.randint(4, 24),
            block_size=size,
            num_groups=rng.choice([1, 1, 2]),
            vocabulary=rng.choice([2, 2, 3]),
            most_waiting=rng.randint(1, 4),
            most_new=2 * size + 2,
        )

    def sizes(self) -> dict[str, Any]:
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "num_groups": self.num_groups,
            "events": self.events,
        }


NAMESPACES: list[dict[str, Any]] = [
    {"cache_salt": "tenant-a"},
    {"lora": "tenant-a"},
    {"extra": [(1, 3, b"one")]},
    {"extra": [(1, 3, b"two")]},
    {"cache_salt": "tenant-a", "lora": "adapter", "extra": [(0, 1, b"one"), (2, 9, b"two")]},
]


class LockStep:
    """Drives the managers made, of which the first is under test and a second, if any, is right.

    `reserves`: whether they can reserve. `hashes`: whether equal hashes mean equal content.
    """

    def __init__(
        self,
        makers: list[Callable[..., Any]],
        setting: Setting,
        seed: int,
        *,
        shadow: bool = True,
        reserves: bool = True,
        hashes: bool = True,
    ) -> None:
        self.caches = [make(**setting.sizes()) for make in makers]
        self.cache = self.caches[0]
        self.setting = setting
        self.rng = random.Random(f"traffic {seed}")
        self.prompts: list[list[int]] = []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pinned: list[Request] = []
        self.seen: Counter[str] = Counter()
        self.watch = Watch(self.caches, shadow=shadow, hashes=hashes, events=setting.events)
        self.shadow = self.watch.shadow
        self.operations: list[tuple[Callable[[], None], int]] = [
            (self.arrive, 6),
            (self.place, 8),
            (self.grow, 3),
            (self.compute, 8),
            (self.decode, 4),
            (self.fork, 3),
            (self.finish, 5),
            (self.drop, 1),
            (self.reset, 1),
        ]
        self.worlds: list[World] = []
        if reserves:
            strangers = [make(**setting.sizes()) for make in makers]
            self.worlds = [World(*pair) for pair in zip(self.caches, strangers, strict=True)]
            self.operations += [(self.reserve, 2), (self.release, 2), (self.misuse, 2)]

    def run(self, num_operations: int) -> Counter[str]:
        operations, weights = zip(*self.operations, strict=True)
        for operation in self.rng.choices(operations, weights, k=num_operations):
            operation()
            self.watch.check(self.running, self.pinned, self.seen)
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
        agree("lookup", [(hit.num_tokens, hit.blocks) for hit in hits])
        return hits

    def place(self) -> None:
        """Allocate for a waiting request, all of it or a first chunk."""
        if not self.waiting or len(self.running) >= MOST_RUNNING:
            return
        request = self.rng.choice(self.waiting)
        least = min(request.hits[0].num_tokens, len(request.tokens))
        room = self.rng.choice([self.rng.randint(least, len(request.tokens)), len(request.tokens)])
        owner = f"request {self.rng.randrange(100)}"
        tables = [cache.table(owner=owner, group=request.group) for cache in self.caches]
        outcome = self.allocate(tables, room, request.hits)
        if isinstance(outcome, type):
            self.seen["stale hits"] += 1
            request.hits = self.lookup(request.seqs, request.group)
        elif outcome is not None:
            self.waiting.remove(request)
            request.tables = tables
            self.running.append(request)
            self.seen["hits"] += bool(request.hits[0].blocks)
            self.check_hit(request)

    def check_hit(self, request: Request) -> None:
        hit = request.hits[0].num_tokens
        if self.shadow is not None:
            if hit >= len(request.tokens):
                raise Divergence("the hit leaves nothing to compute, so there are no logits")
            self.shadow.check(request, hit)

    def allocate(self, tables: list[Any], room: int, hits: list[Any] | None = None) -> Outcome:
        cached = self.cached_blocks()
        outcomes: list[Outcome] = []
        for i, cache in enumerate(self.caches):
            try:
                grant = cache.allocate(tables[i], room, None if hits is None else hits[i])
                outcomes.append(grant and (grant.new_blocks, grant.copies))
            except CacheError as error:
                outcomes.append(type(error))
        agree("allocate", outcomes)
        self.seen["evictions"] += len(cached - self.cached_blocks())
        self.follow(outcomes[0])
        return outcomes[0]

    def follow(self, outcome: Outcome) -> None:
        """Run the copies of a grant; they come before the next write."""
        if outcome is None:
            self.seen["refusals"] += 1
        elif not isinstance(outcome, type):
            self.seen["copies"] += len(outcome[1])
            if self.shadow is not None:
                self.shadow.copy(outcome[1])

    def cached_blocks(self) -> set[int]:
        blocks = range(self.setting.num_blocks)
        return {block for block in blocks if self.cache.block(block).is_cached}

    def grow(self) -> None:
        """Append tokens to a running request, or make room for the next chunk of its prompt."""
        if not self.running:
            return
        request = self.rng.choice(self.running)
        if request.table.num_tokens >= len(request.tokens):
            self.append(request, self.random_tokens(self.rng.randint(1, 3)))
        self.allocate(
            request.tables, self.rng.randint(request.table.num_tokens, len(request.tokens))
        )

    def append(self, request: Request, more: list[int]) -> None:
        request.tokens = request.tokens + more
        for seq in request.seqs:
            seq.append(more)

    def compute(self) -> None:
        """A step: read all K/V so far, write that of some tokens, and only then commit them."""
        if not self.running:
            return
        request = self.rng.choice(self.running)
        most = min(request.table.num_tokens, len(request.tokens))
        stop = self.rng.choice([self.rng.randint(request.table.num_computed_tokens, most), most])
        if self.is_shared(request, stop):
            self.refused(lambda i: self.commit(i, request, stop), "a commit to a shared block")
            if self.allocate(request.tables, request.table.num_tokens) is None:
                return
        self.write(request, stop)
        for i in range(len(self.caches)):
            self.commit(i, request, stop)

    def commit(self, i: int, request: Request, stop: int) -> None:
        self.caches[i].commit(request.tables[i], request.seqs[i], stop)

    def is_shared(self, request: Request, stop: int) -> bool:
        """Whether a block that it would write has other holders."""
        start, size = request.table.num_computed_tokens, self.setting.block_size
        blocks = request.table.blocks[start // size : -(-stop // size)] if stop > start else []
        return any(self.cache.block(block).ref_cnt > 1 for block in blocks)

    def write(self, request: Request, stop: int) -> None:
        if self.shadow is not None:
            self.shadow.check(request, request.table.num_computed_tokens)
            self.shadow.write(request, stop)

    def decode(self) -> None:
        """A step of several requests, one token each."""
        count = self.rng.randint(0, len(self.running))
        chosen = self.rng.sample(self.running, count)
        rooms = [max(r.table.num_tokens, r.table.num_computed_tokens + 1) for r in chosen]
        grants: list[list[Outcome]] = []
        for i, cache in enumerate(self.caches):
            answer = cache.allocate_many([request.tables[i] for request in chosen], rooms)
            grants.append([grant and (grant.new_blocks, grant.copies) for grant in answer])
        agree("allocate_many", grants)
        for grant in grants[0]:
            self.follow(grant)
        step = [request for request, grant in zip(chosen, grants[0], strict=True) if grant]
        tokens = self.random_tokens(len(step))
        for request, token in zip(step, tokens, strict=True):
            request.tokens = [*request.tokens, token]
            self.write(request, request.table.num_computed_tokens + 1)
        for i, cache in enumerate(self.caches):
            tables, seqs = [r.tables[i] for r in step], [r.seqs[i] for r in step]
            cache.commit_many(tables, seqs, tokens)
        agree("num_tokens", [[r.seqs[i].num_tokens for r in step] for i in range(len(self.caches))])
        self.seen["decoded"] += len(step)

    def fork(self) -> None:
        """The child goes on with the same tokens, or with others from where K/V ends."""
        if not self.running or len(self.running) >= MOST_RUNNING:
            return
        parent = self.rng.choice(self.running)
        tables = [cache.fork(one) for cache, one in zip(self.caches, parent.tables, strict=True)]
        if self.rng.random() < 0.5:
            tokens, seqs = parent.tokens, [seq.fork() for seq in parent.seqs]
        else:
            tokens = parent.tokens[: parent.table.num_computed_tokens]
            missing = max(parent.table.num_tokens - len(tokens), 1)
            tokens = tokens + self.random_tokens(missing + self.rng.randint(0, 2))
            seqs = [cache.sequence(tokens, **parent.namespace) for cache in self.caches]
        child = Request(tokens, parent.namespace, parent.group, seqs, [], tables)
        self.running.append(child)
        self.seen["forks"] += 1

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
        return self.running.pop(self.rng.randrange(len(self.running)))

    def reset(self) -> None:
        done = [cache.reset() for cache in self.caches]
        agree("reset", done)
        self.seen["resets"] += done[0]

    def reserve(self) -> None:
        """Tokens of a running request, to be found and kept beyond it."""
        computed = [request for request in self.running if request.table.num_computed_tokens]
        if not computed or len(self.pinned) >= MOST_PINS:
            return
        request = self.rng.choice(computed)
        num_tokens = self.rng.randint(1, request.table.num_computed_tokens)
        pins = [
            cache.reserve(table, num_tokens)
            for cache, table in zip(self.caches, request.tables, strict=True)
        ]
        agree("reserve", [(pin.num_tokens, pin.blocks, pin.group) for pin in pins])
        tokens = request.tokens[: pins[0].num_tokens]
        self.pinned.append(Request(tokens, request.namespace, request.group, [], [], pins))
        self.prompts.append(tokens)
        self.seen["pins"] += 1

    def release(self) -> None:
        if self.pinned:
            pinned = self.pinned.pop(self.rng.randrange(len(self.pinned)))
            for world, pin in zip(self.worlds, pinned.tables, strict=True):
                world.cache.release(pin)
                world.released = pin

    def misuse(self) -> None:
        if not self.running:
            return
        for i, world in enumerate(self.worlds):
            world.running = [(request.tables[i], request.seqs[i]) for request in self.running]
        misuse, seed = self.rng.choice(MISUSES), self.rng.random()
        self.refused(lambda i: misuse(self.worlds[i], random.Random(seed)), misuse.__name__)
        for world in self.worlds:
            world.running = []  # or a dropped table would live on
        self.seen["misuses"] += 1

    def refused(self, call: Callable[[int], object], what: str) -> None:
        """It must raise, and nothing that can be seen may change."""
        for i in range(len(self.caches)):
            before = self.watch.visible(i, self.running)
            try:
                call(i)
            except CacheError:
                pass
            else:
                raise Divergence(f"{what} is not refused")
            if self.watch.visible(i, self.running) != before:
                raise Divergence(f"{what} is refused, but leaves a trace")
