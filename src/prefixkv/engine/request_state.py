"""A request as the engine holds it."""

from __future__ import annotations

import time

from prefixkv.cache import BlockTable, Sequence
from prefixkv.request import FinishReason, RequestMetrics, SamplingParams


class RequestState:
    """One request from arrival to end. The scheduler writes it; others read.

    One that ``reserves`` computes its prompt, generates nothing and leaves a reservation. ``seq``
    holds prompt and output tokens. ``table`` is None while the request waits, and so is its
    claim on blocks: waiting, preempted and finished requests hold none.
    """

    __slots__ = (
        "arrival",
        "arrival_time",
        "finish_reason",
        "held_steps",
        "max_tokens",
        "metrics",
        "num_cached_tokens",
        "num_prompt_tokens",
        "output_token_ids",
        "params",
        "prompt",
        "request_id",
        "reserves",
        "seq",
        "stop_reason",
        "table",
    )

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        seq: Sequence,
        *,
        arrival: int,
        max_tokens: int,
        reserves: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.seq = seq
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.reserves = reserves
        self.num_prompt_tokens = len(prompt)
        self.output_token_ids: list[int] = []
        self.table: BlockTable | None = None
        self.num_cached_tokens = 0
        self.held_steps = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.arrival_time = time.perf_counter()
        self.metrics = RequestMetrics()

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return 0 if self.table is None else self.table.num_computed_tokens

    def elapsed(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.arrival_time
