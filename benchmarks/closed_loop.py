"""Runs a workload on one side, keeping its number of requests in flight, and measures from outside.

Only the standard library is imported here, so that a side may run in any Python environment.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workloads import Turn, Workload


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one request; the last piece tells how many prompt tokens were cached.

    ``cached_tokens`` is None where a side cannot tell.
    """

    request_id: str
    token_ids: list[int]
    finished: bool = False
    cached_tokens: int | None = None


class Side(Protocol):
    """An engine under test: greedy, and an end-of-sequence token does not end a request."""

    def describe(self) -> dict[str, Any]:
        """What it is: versions, dtype, settings; ``summary`` is one line for people."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""

    def reset(self, common: list[int]) -> None:
        """Forget every cached prefix; nothing is in flight.

        ``common`` is what all prompts will begin with: a side that reserves prefixes may do so now.
        """

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """Queue a request; returns its id."""

    def step(self) -> list[Piece]:
        """Get on; returns what came out, maybe nothing yet."""

    def computed_tokens(self) -> int | None:
        """Tokens computed since the start, generated ones included; None if it cannot tell."""


@dataclass(slots=True)
class Measurement:
    """One run of a workload. Seconds, tokens; lists are by request, in the order of their ends."""

    run_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)  # mean time between tokens of a request
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    computed_tokens: int | None = None  # of prompts
    answers: list[list[list[int]]] = field(default_factory=list)  # by chain and turn

    def summary(self) -> dict[str, float | int | None]:
        return {
            "run_s": self.run_s,
            "ttft_median_s": statistics.median(self.ttft_s),
            "ttft_p95_s": percentile(self.ttft_s, 95),
            "output_tokens_per_s": self.output_tokens / self.run_s,
            "prompt_tokens_per_s": self.prompt_tokens / self.run_s,
            "ms_per_token": 1e3 * statistics.median(self.token_s) if self.token_s else None,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not below ``percent`` of all (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


@dataclass(slots=True)
class _Flight:
    chain: int
    prompt: list[int]
    added: float
    tokens: list[int] = field(default_factory=list)
    first: float | None = None


class ClosedLoop:
    """Takes the next turn as soon as one ends; a chain goes to the back of the queue meanwhile."""

    def __init__(self, side: Side, workload: Workload) -> None:
        self._side = side
        self._concurrency = workload.concurrency
        self._common = workload.common
        self._turns = [deque(chain) for chain in workload.chains]
        self._history: list[list[int]] = [[] for _ in workload.chains]
        self._ready = deque(range(len(workload.chains)))
        self._flights: dict[str, _Flight] = {}
        self._result = Measurement(answers=[[] for _ in workload.chains])

    def run(self) -> Measurement:
        """Run the workload from an empty cache."""
        side, result = self._side, self._result
        side.reset(self._common)
        computed = side.computed_tokens()
        start = time.perf_counter()
        self._fill()
        while self._flights:
            pieces = side.step()
            now = time.perf_counter()
            for piece in pieces:
                self._take(piece, now)
            self._fill()
        result.run_s = time.perf_counter() - start
        if computed is not None:
            # All of an answer but its last token is computed as well.
            decoded = result.output_tokens - len(result.ttft_s)
            result.computed_tokens = (side.computed_tokens() or 0) - computed - decoded
        return result

    def _fill(self) -> None:
        while self._ready and len(self._flights) < self._concurrency:
            chain = self._ready.popleft()
            turn: Turn = self._turns[chain].popleft()
            prompt = self._history[chain] + turn.tokens
            added = time.perf_counter()
            self._flights[self._side.add(prompt, turn.max_tokens)] = _Flight(chain, prompt, added)

    def _take(self, piece: Piece, now: float) -> None:
        flight = self._flights[piece.request_id]
        if flight.first is None and piece.token_ids:
            flight.first = now
        flight.tokens += piece.token_ids
        if not piece.finished:
            return
        del self._flights[piece.request_id]
        self._record(flight, piece, now)
        self._history[flight.chain] = flight.prompt + flight.tokens
        if self._turns[flight.chain]:
            self._ready.append(flight.chain)

    def _record(self, flight: _Flight, piece: Piece, now: float) -> None:
        result = self._result
        if flight.first is None:
            raise RuntimeError(f"request {piece.request_id} ended without a token")
        result.ttft_s.append(flight.first - flight.added)
        if len(flight.tokens) > 1:
            result.token_s.append((now - flight.first) / (len(flight.tokens) - 1))
        result.prompt_tokens += len(flight.prompt)
        result.output_tokens += len(flight.tokens)
        if piece.cached_tokens is not None:
            result.cached_tokens = (result.cached_tokens or 0) + piece.cached_tokens
        result.answers[flight.chain].append(flight.tokens)
