"""One forward pass, as the scheduler plans it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixkv.cache import BlockTable
from prefixkv.cache import Sequence as TokenSequence
from prefixkv.engine.request_state import Branch, RequestState, SequenceState


@dataclass(slots=True)  # frozen, it would take three times as long to make
class Work:
    """One branch's part of a step: compute tokens [start, stop), give logits of the last ones.

    ``due`` are the sequences whose next token those logits give.
    """

    request: RequestState
    branch: Branch
    table: BlockTable
    start: int
    stop: int
    num_logits: int
    due: Sequence[SequenceState] = ()

    @property
    def seq(self) -> TokenSequence:
        return self.branch.seq

    @property
    def is_last(self) -> bool:
        """Whether this work reaches the branch's last token."""
        return self.stop == self.branch.num_tokens


@dataclass(slots=True)
class Step:
    """One forward pass: the work, and block copies to run before it."""

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(work.stop - work.start for work in self.work)
