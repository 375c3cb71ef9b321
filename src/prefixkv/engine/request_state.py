"""A request as the engine holds it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prefixkv.cache import BlockTable, Sequence
from prefixkv.request import (
    BeamSearchParams,
    FinishReason,
    Params,
    RequestMetrics,
    SamplingParams,
)


class SequenceState:
    """One continuation of a request's prompt: a sample or a beam. The scheduler writes it.

    ``seq`` holds prompt and output tokens.
    """

    __slots__ = ("finish_reason", "index", "output_token_ids", "seq", "stop_reason")

    def __init__(self, index: int, seq: Sequence, output_token_ids: Iterable[int] = ()) -> None:
        self.index = index
        self.seq = seq
        self.output_token_ids = list(output_token_ids)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_tokens(self) -> int:
        return self.seq.num_tokens

    def fork(self) -> SequenceState:
        """The same tokens, in a sequence that goes on by itself."""
        return SequenceState(self.index, self.seq.fork(), self.output_token_ids)

    def append(self, token: int) -> None:
        self.output_token_ids.append(token)
        self.seq.append([token])


class Branch:
    """Sequences of one request that agree so far, and their one block table.

    ``num_tokens`` is how far they agree; the branch parts when its table has got there. ``table``
    is None while the request waits, and so is its claim on blocks.
    """

    __slots__ = ("num_tokens", "sequences", "table")

    def __init__(self, sequences: list[SequenceState]) -> None:
        self.sequences = sequences
        self.table: BlockTable | None = None
        self.num_tokens = 0
        self.compare()

    def compare(self) -> None:
        """Find out how far the sequences agree."""
        first, *others = self.sequences
        self.num_tokens = min(
            (first.seq.shared_prefix(other.seq) for other in others), default=first.num_tokens
        )

    @property
    def seq(self) -> Sequence:
        """One that has the branch's tokens, and maybe more."""
        return self.sequences[0].seq

    @property
    def num_computed_tokens(self) -> int:
        return 0 if self.table is None else self.table.num_computed_tokens

    def due(self) -> tuple[SequenceState, ...]:
        """Those that need a new token once the branch is computed."""
        if len(self.sequences) == 1:
            return (self.sequences[0],)
        return tuple(each for each in self.sequences if each.num_tokens == self.num_tokens)


class RequestState:
    """One request from arrival to end. The scheduler writes it; others read.

    It starts as one branch, its prompt, which parts as its sequences do; preempted, it comes back
    as one branch again. Beam search (``width`` beams, else None) begins with one sequence, of which
    the others are made. One that ``reserves`` computes its prompt, generates nothing and leaves a
    reservation. ``put_off`` are sequences that start when all others have ended, for want of room.
    """

    __slots__ = (
        "arrival",
        "arrival_time",
        "branches",
        "cache_salt",
        "held_steps",
        "max_tokens",
        "metrics",
        "num_cached_tokens",
        "params",
        "prompt",
        "put_off",
        "request_id",
        "reserves",
        "sequences",
        "wants_prompt_logprobs",
        "width",
    )

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: Params,
        seq: Sequence,
        *,
        arrival: int,
        max_tokens: int,
        cache_salt: str | None = None,
        reserves: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.cache_salt = cache_salt
        self.reserves = reserves
        self.sequences = [SequenceState(0, seq)]
        if not isinstance(params, BeamSearchParams):
            self.sequences += [SequenceState(i, seq.fork()) for i in range(1, params.n)]
        self.branches = [Branch(list(self.sequences))]
        self.put_off: list[SequenceState] = []
        self.width = params.width if isinstance(params, BeamSearchParams) else None
        self.wants_prompt_logprobs = (
            isinstance(params, SamplingParams) and params.prompt_logprobs is not None
        )
        self.num_cached_tokens = 0
        self.held_steps = 0
        self.arrival_time = time.perf_counter()
        self.metrics = RequestMetrics()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def may_part(self) -> bool:
        """Whether a branch has several sequences."""
        return len(self.sequences) > 1 and any(len(b.sequences) > 1 for b in self.branches)

    @property
    def num_seqs(self) -> int:
        """Sequences that it runs, or may come to run, at once."""
        return self.width or sum(len(branch.sequences) for branch in self.branches)

    @property
    def ended(self) -> bool:
        return not self.branches

    @property
    def waits(self) -> bool:
        """Whether it holds no blocks: it is new, preempted or has ended."""
        return all(branch.table is None for branch in self.branches)

    def live(self) -> list[SequenceState]:
        """Sequences that have not ended and are not put off, in the order of their branches."""
        return [sequence for branch in self.branches for sequence in branch.sequences]

    def elapsed(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.arrival_time
