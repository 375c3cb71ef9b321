"""Which tokens the next step computes.

There is no prefill phase and no decode phase. A request knows ``num_tokens`` tokens and has K/V
for ``num_computed_tokens`` of them; a step lets the second catch up with the first, within a budget
of tokens. Chunked prefill is a long prompt that needs several steps, a prefix hit starts further
on, and preemption is ``free``: the request comes back later and usually finds its blocks cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixkv.cache import BlockTable, CacheManager, Hit
from prefixkv.config import SchedulerConfig
from prefixkv.engine.request_state import RequestState
from prefixkv.request import FinishReason


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part of a step: compute tokens [start, stop), give logits of the last ones."""

    request: RequestState
    table: BlockTable
    start: int
    stop: int
    num_logits: int

    @property
    def is_last(self) -> bool:
        """Whether this work reaches the request's last token."""
        return self.stop == self.request.num_tokens

    @property
    def samples(self) -> bool:
        """Whether a new token follows."""
        return self.is_last and not self.request.reserves


@dataclass(slots=True)
class Step:
    """One forward pass: the work, and block copies to run before it."""

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(work.stop - work.start for work in self.work)


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start."""

    prefix_queries: int = 0  # prompt tokens of admitted requests that looked for a prefix
    prefix_hits: int = 0  # of those, tokens that came from the cache
    prompt_tokens: int = 0  # of admitted requests, each counted once
    computed_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0


class Scheduler:
    """First come, first served, over one cache manager.

    Running requests go before waiting ones and older before younger. When the pool is empty the
    youngest running request is preempted, so the oldest always gets on: nothing starves. A waiting
    request is passed over while another computes a prefix that it shares, for ``max_hold_steps``
    steps at most.

    The only writer of ``RequestState``; in an engine, the only caller of the cache manager besides
    ``Reservations``.

    Args:
        prefix_cache: the cache's system.
    """

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, *, prefix_cache: str = "hash"
    ) -> None:
        self.config = config
        self.cache = cache
        self.stats = SchedulerStats()
        self._looks_up = prefix_cache != "off"
        # Where a commit makes nothing findable, there is nothing to wait for.
        self._holds_back = prefix_cache in ("hash", "radix")
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []  # oldest first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: RequestState) -> None:
        """Queue a request whose ``num_tokens`` and output fit the pool."""
        self._waiting.append(request)

    def schedule(self) -> Step:
        """The next step; its blocks are allocated. Empty when there is nothing to do."""
        step = Step()
        budget = self.config.token_budget
        preempted = self.stats.num_preemptions
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            if self._grow(request, budget, step):
                budget -= step.work[-1].stop - step.work[-1].start
                index += 1
        if self.stats.num_preemptions == preempted:
            self._admit(budget, step)
        return step

    def update(self, step: Step, tokens: Sequence[int | None]) -> None:
        """Take the step's results: its K/V is written, and these tokens were chosen.

        Args:
            tokens: for each work the new token, or None where none was sampled. Work of a request
                that has ended meanwhile is dropped.
        """
        for work, token in zip(step.work, tokens, strict=True):
            request = work.request
            if request.finish_reason is not None:
                continue
            self.stats.computed_tokens += work.stop - work.start
            self.cache.commit(work.table, request.seq, work.stop)
            if token is not None:
                self._append(request, token)

    def finish(
        self, request: RequestState, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """End a request wherever it is and give its blocks back; ended ones stay as they are."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.metrics.total = request.elapsed()
        if request.table is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._free(request)

    def _grow(self, request: RequestState, budget: int, step: Step) -> bool:
        """Give a running request its part of the step, at the cost of younger ones if need be.

        False when the request itself was the youngest and had to go.
        """
        table = request.table
        assert table is not None  # running requests hold a table
        start = table.num_computed_tokens
        stop = min(request.num_tokens, start + budget)
        while (grant := self.cache.allocate(table, stop)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        step.copies += grant.copies
        step.work.append(self._work(request, table, start, stop))
        return True

    def _admit(self, budget: int, step: Step) -> None:
        for request in tuple(self._waiting):
            if budget <= 0 or len(self._running) >= self.config.max_num_seqs:
                return
            hit = self._lookup(request)
            if hit is not None and self._is_held(request, hit):
                request.held_steps += 1
                continue
            start = 0 if hit is None else hit.num_tokens
            stop = min(request.num_tokens, start + budget)
            table = self.cache.table()
            grant = self.cache.allocate(table, stop, hit)
            if grant is None:
                self.cache.free(table)
                return
            self._waiting.remove(request)
            self._start(request, table, hit)
            step.copies += grant.copies
            step.work.append(self._work(request, table, start, stop))
            budget -= stop - start

    def _lookup(self, request: RequestState) -> Hit | None:
        # Logits of cached tokens do not exist, so a request that wants them computes them all.
        if not self._looks_up or request.params.prompt_logprobs is not None:
            return None
        return self.cache.lookup(request.seq)

    def _is_held(self, request: RequestState, hit: Hit) -> bool:
        """Whether a running request is computing blocks that this one would compute again."""
        if not self._holds_back or request.held_steps >= self.config.max_hold_steps:
            return False
        block_size = self.config.block_size
        most = (request.num_tokens - 1) // block_size * block_size
        if most <= hit.num_tokens:
            return False
        for other in self._running:
            shared = min(request.seq.shared_prefix(other.seq), most) // block_size * block_size
            if shared > hit.num_tokens and other.num_computed_tokens < shared:
                return True
        return False

    def _start(self, request: RequestState, table: BlockTable, hit: Hit | None) -> None:
        request.table = table
        self._running.append(request)
        # A preempted request comes back older than some that run now.
        if len(self._running) > 1 and self._running[-2].arrival > request.arrival:
            self._running.sort(key=lambda running: running.arrival)
        if request.metrics.queue is not None:
            return
        request.metrics.queue = request.elapsed()
        self.stats.prompt_tokens += request.num_prompt_tokens
        if hit is not None:
            request.num_cached_tokens = hit.num_tokens
            self.stats.prefix_queries += request.num_prompt_tokens
            self.stats.prefix_hits += hit.num_tokens

    def _work(self, request: RequestState, table: BlockTable, start: int, stop: int) -> Work:
        num_logits = 1 if stop == request.num_tokens and not request.reserves else 0
        if request.params.prompt_logprobs is not None and not request.output_token_ids:
            num_logits = stop - start
        return Work(request, table, start, stop, num_logits)

    def _preempt(self, request: RequestState) -> None:
        self._running.remove(request)
        self._free(request)
        request.metrics.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._waiting.appendleft(request)

    def _free(self, request: RequestState) -> None:
        assert request.table is not None
        self.cache.free(request.table)
        request.table = None

    def _append(self, request: RequestState, token: int) -> None:
        if request.metrics.time_to_first_token is None:
            request.metrics.time_to_first_token = request.elapsed()
        request.output_token_ids.append(token)
        request.seq.append([token])
        self.stats.generation_tokens += 1
