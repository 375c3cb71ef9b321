"""A shadow of the K/V: what each slot holds, for each token all that its K/V depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


class Divergence(AssertionError):
    """The managers disagree, or one of them breaks a promise of the seam."""


@dataclass(eq=False)
class Request:
    """A request on its way, or a reserved prefix; handles hold one object for each manager."""

    tokens: list[int]
    namespace: dict[str, Any]
    group: int
    seqs: list[Any]
    hits: list[Any] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)  # or pins, which have blocks as well

    @property
    def table(self) -> Any:
        return self.tables[0]

    def content(self, position: int) -> tuple[Any, ...]:
        """What the K/V at `position` depends on, and so what its slot must hold."""
        extra = {(e[0], e[2]) for e in self.namespace.get("extra", ()) if e[0] <= position}
        salt, lora = self.namespace.get("cache_salt"), self.namespace.get("lora")
        return self.group, salt, lora, tuple(sorted(extra)), tuple(self.tokens[: position + 1])


class Shadow:
    """Follows every write and copy, asks whether a block may be written, and what it holds."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.slots: list[Any] = [None] * (cache.num_blocks * cache.block_size)

    def write(self, request: Request, stop: int) -> None:
        """The K/V of all tokens up to `stop` that are not computed yet."""
        start = request.table.num_computed_tokens
        for block in self.blocks(request, start, stop):
            state = self.cache.block(block)
            if state.ref_cnt != 1 or state.is_cached:
                raise Divergence(f"block {block} is written, which is shared or findable")
        for slot, content in self._slots(request, start, stop):
            self.slots[slot] = content

    def copy(self, copies: list[tuple[int, int]]) -> None:
        size = self.cache.block_size
        for source, target in copies:
            run = self.slots[source * size : (source + 1) * size]
            self.slots[target * size : (target + 1) * size] = run

    def check(self, request: Request, stop: int) -> None:
        for slot, content in self._slots(request, 0, stop):
            if self.slots[slot] != content:
                raise Divergence(f"slot {slot} holds {self.slots[slot]}, not {content}")

    def blocks(self, request: Request, start: int, stop: int) -> list[int]:
        """Those that have tokens [start, stop) of the request."""
        size = self.cache.block_size
        blocks: list[int] = request.table.blocks[start // size : -(-stop // size)]
        return blocks if stop > start else []

    def _slots(self, request: Request, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        size, blocks = self.cache.block_size, request.table.blocks
        for position in range(start, stop):
            slot = blocks[position // size] * size + position % size
            yield slot, request.content(position)
