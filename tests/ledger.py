"""What the events of a cache say is findable, and whether they can be true."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shadow import Divergence

Content = tuple[int, bytes]  # group and block hash


class Ledger:
    """A consumer of events, such as a router that knows what each server has cached."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.parents: dict[Content, Content | None] = {}  # of all that is findable

    def follow(self, events: Iterable[Any]) -> None:
        for event in events:
            match event.kind:
                case "stored":
                    self._store(event)
                case "evicted":
                    self._evict(event)
                case "cleared":
                    self.parents.clear()
                case kind:
                    raise Divergence(f"an event of kind {kind!r}")

    @property
    def hashes(self) -> set[bytes]:
        return {block_hash for _, block_hash in self.parents}

    def _store(self, event: Any) -> None:
        if len(event.token_ids) != self.block_size * len(event.block_hashes):
            raise Divergence("stored tokens do not fill the blocks")
        parent_hash = event.parent_block_hash
        parent = None if parent_hash is None else (event.group, parent_hash)
        for block_hash in event.block_hashes:
            content = event.group, block_hash
            if content in self.parents:
                raise Divergence("stored, but it was findable already")
            if parent is not None and parent not in self.parents:
                raise Divergence("stored below a parent that nobody can find")
            self.parents[content] = parent
            parent = content

    def _evict(self, event: Any) -> None:
        for block_hash in event.block_hashes:
            content = event.group, block_hash
            if content not in self.parents:
                raise Divergence("evicted, but it was not findable")
            if content in self.parents.values():
                raise Divergence("evicted before what is below it")
            del self.parents[content]
