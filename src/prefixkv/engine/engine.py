"""The synchronous core: requests in, outputs out, one step at a time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from prefixkv.config import EngineOptions, blocks_for
from prefixkv.engine.admission import Admission, blocks_for_beams
from prefixkv.engine.build import build_parts
from prefixkv.engine.generation import Beams, Generation, Samples
from prefixkv.engine.output import PromptLogprobs
from prefixkv.engine.request_state import RequestState
from prefixkv.engine.reservations import Reservations
from prefixkv.engine.scheduler import Scheduler
from prefixkv.engine.step import Step, Work
from prefixkv.errors import RequestError
from prefixkv.request import (
    BeamSearchParams,
    FinishReason,
    Params,
    RequestOutput,
    Reservation,
    SampleOutput,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Rows = NDArray[np.float32]

# stage, units done, units in all
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts now (the first four), and totals since the start, in tokens or times."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    computed_tokens: int
    generation_tokens: int


@dataclass(slots=True)
class _Live:
    """What the engine keeps for a request beside the scheduler's state."""

    state: RequestState
    generation: Generation
    prompt_logprobs: PromptLogprobs | None


class Engine:
    """Serves requests over one model, one block pool and one thread.

    Not thread-safe: ``AsyncEngine`` gives it a thread of its own.
    """

    def __init__(self, options: EngineOptions, progress: Progress | None = None) -> None:
        """Load the model and set up the pool.

        Raises:
            ModelError: the model cannot be found, read or served.
            ConfigError: the options do not fit the model or the machine.
        """
        parts = build_parts(options, progress)
        self.options = options
        self.model_name = parts.model_name
        self.tokenizer = parts.tokenizer
        self.vocab_size = parts.vocab_size
        self.max_model_len = parts.scheduler_config.max_model_len
        self.summary = parts.summary
        self.cache = parts.cache
        self.runner = parts.runner
        self.scheduler = Scheduler(
            parts.scheduler_config, parts.cache, prefix_cache=options.prefix_cache
        )
        self._reservations = Reservations(parts.cache, options.prefix_cache, self._most_blocks)
        self._admission = Admission(
            parts.scheduler_config,
            vocab_size=parts.vocab_size,
            eos_token_ids=parts.tokenizer.eos_token_ids,
            blocks_left=lambda: parts.cache.num_blocks - self._reservations.num_blocks,
        )
        self._live: dict[str, _Live] = {}
        self._arrivals = itertools.count()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def validate(self, prompt: list[int], params: Params, cache_salt: str | None = None) -> None:
        """Raise RequestError or ContextLengthError if the request could not be served."""
        self._admission.check(prompt, params, cache_salt)

    def add(
        self,
        prompt: list[int],
        params: Params,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        reserve: bool = False,
    ) -> str:
        """Queue a request; returns its id.

        Args:
            prompt: token ids.
            cache_salt: prefixes are shared only between requests with the same salt.
            reserve: compute the prompt, generate nothing and hold its K/V until ``release``; the
                output has the reservation, whose id is the request's.

        Raises:
            RequestError, ContextLengthError: it could not be served.
        """
        self.validate(prompt, params, cache_salt)
        arrival = next(self._arrivals)
        request_id = f"request-{arrival}" if request_id is None else request_id
        if request_id in self._live:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        seq = self.cache.sequence(prompt, cache_salt=cache_salt)
        if reserve:
            self._reservations.check(request_id, seq)
        state = RequestState(
            request_id,
            prompt,
            params,
            seq,
            arrival=arrival,
            max_tokens=self._admission.max_tokens(prompt, params),
            cache_salt=cache_salt,
            reserves=reserve,
        )
        end = self._admission.end_token_ids(params)
        generation: Generation
        prompt_logprobs = None
        if isinstance(params, BeamSearchParams):
            generation = Beams(params, end, self.tokenizer, state)
        else:
            generation = Samples(params, end, self.tokenizer)
            if params.prompt_logprobs is not None:
                prompt_logprobs = PromptLogprobs(prompt, params.prompt_logprobs)
        self._live[request_id] = _Live(state, generation, prompt_logprobs)
        self.scheduler.add(state)
        return request_id

    def abort(self, request_id: str, sample: int | None = None) -> RequestOutput | None:
        """End a request now, or one of its samples; their blocks return.

        Returns:
            What has ended; None if there is no such request, or sample, any more.

        Raises:
            RequestError: a sample of beam search, whose beams are one search.
        """
        live = self._live.get(request_id)
        if live is None:
            return None
        output = RequestOutput(request_id)
        if sample is None:
            return self._end(live, output, "abort")
        if isinstance(live.state.params, BeamSearchParams):
            raise RequestError("beams are one search; abort the request", param="sample")
        for sequence in live.state.sequences:
            if sequence.index == sample and sequence.finish_reason is None:
                self.scheduler.finish_sequence(live.state, sequence, "abort")
                output.samples.append(SampleOutput(sample, finish_reason="abort"))
                return self._describe(live, output)
        return None

    def step(self) -> list[RequestOutput]:
        """Run one step: the new pieces of every request that got one.

        If the forward pass fails, the requests in it end with ``finish_reason`` "error"; if
        choosing a token fails, that request alone does. Nothing that a failed pass may have half
        written is findable.
        """
        step = self.scheduler.schedule()
        if not step.work:
            return []
        outputs = {
            work.request.request_id: RequestOutput(work.request.request_id) for work in step.work
        }
        try:
            logits = self.runner.run(step).numpy(force=True)
        except Exception as error:  # these requests end, the engine goes on
            logger.exception("a step of %d requests failed", len(outputs))
            return [self._fail(output, error) for output in outputs.values()]
        rows = _rows(step, logits)
        tokens = [
            self._guarded(self._choose, work, each, outputs) or ()
            for work, each in zip(step.work, rows, strict=True)
        ]
        self.scheduler.update(step, tokens)
        for work, chosen, each in zip(step.work, tokens, rows, strict=True):
            take = partial(self._take, chosen=chosen)
            self._guarded(take, work, each, outputs)
        return [each for each in outputs.values() if each.samples or each.finished]

    @property
    def reservations(self) -> list[Reservation]:
        """What is reserved, the oldest first; may be read from any thread."""
        return self._reservations.listed()

    def release(self, reservation_id: str) -> Reservation:
        """End a reservation.

        Raises:
            RequestError: there is none of this id.
        """
        return self._reservations.release(reservation_id)

    def stats(self) -> EngineStats:
        totals = self.scheduler.stats
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_blocks=self.cache.num_blocks,
            num_free_blocks=self.cache.num_free_blocks,
            num_preemptions=totals.num_preemptions,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            prompt_tokens=totals.prompt_tokens,
            computed_tokens=totals.computed_tokens,
            generation_tokens=totals.generation_tokens,
        )

    def _most_blocks(self) -> int:
        """Blocks that the longest request needs, be it still to come or a search that runs."""
        most = blocks_for(self.max_model_len, self.cache.block_size)
        for state in (live.state for live in self._live.values()):
            if isinstance(state.params, BeamSearchParams):
                search = blocks_for_beams(
                    state.params.width, len(state.prompt), state.max_tokens, self.cache.block_size
                )
                most = max(most, search)
        return most

    def _guarded(
        self,
        part: Callable[[Work, Rows, RequestOutput], T],
        work: Work,
        rows: Rows,
        outputs: dict[str, RequestOutput],
    ) -> T | None:
        """Do a part of a request's step; if it fails, that request alone ends."""
        output = outputs[work.request.request_id]
        if output.finished:
            return None
        try:
            return part(work, rows, output)
        except Exception as error:
            logger.exception("a step of %s failed", output.request_id)
            self._fail(output, error)
            return None

    def _choose(self, work: Work, rows: Rows, _: RequestOutput) -> Sequence[int]:
        live = self._live[work.request.request_id]
        if live.prompt_logprobs is not None and not live.prompt_logprobs.complete:
            live.prompt_logprobs.add(work.start, work.stop, rows)
        return live.generation.choose(work, rows[-1]) if work.due else ()

    def _take(
        self, work: Work, rows: Rows, output: RequestOutput, *, chosen: Sequence[int]
    ) -> None:
        live = self._live[work.request.request_id]
        if work.request.reserves and work.is_last:
            try:
                output.reservation = self._reservations.hold(work.request)
            except RequestError as error:
                output.error = str(error)
            self._end(live, output, "length")
        elif work.due:
            output.samples += live.generation.take(self.scheduler, work, chosen, rows[-1])
            self._describe(live, output)

    def _fail(self, output: RequestOutput, error: Exception) -> RequestOutput:
        output.error = f"{type(error).__name__}: {error}"
        return self._end(self._live[output.request_id], output, "error")

    def _end(self, live: _Live, output: RequestOutput, reason: FinishReason) -> RequestOutput:
        """End a request; ``output`` gets what had not ended."""
        going = {each.index for each in live.state.sequences if each.finish_reason is None}
        self.scheduler.finish(live.state, reason)
        got = {sample.index: sample for sample in output.samples}
        for index in sorted(going):
            if index not in got:
                got[index] = SampleOutput(index)
                output.samples.append(got[index])
            got[index].finish_reason = reason
        return self._describe(live, output)

    def _describe(self, live: _Live, output: RequestOutput) -> RequestOutput:
        state = live.state
        output.num_prompt_tokens = state.num_prompt_tokens
        output.num_cached_tokens = state.num_cached_tokens
        output.metrics = state.metrics
        if live.prompt_logprobs is not None and live.prompt_logprobs.complete:
            output.prompt_logprobs = live.prompt_logprobs.values
        if state.ended:
            output.finished = True
            del self._live[state.request_id]
        return output


def _rows(step: Step, logits: Rows) -> list[Rows]:
    """Each work's rows of the logits."""
    stops = itertools.accumulate(work.num_logits for work in step.work)
    return [
        logits[stop - work.num_logits : stop] for work, stop in zip(step.work, stops, strict=True)
    ]
