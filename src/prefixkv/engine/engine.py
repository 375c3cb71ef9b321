"""The synchronous core: requests in, outputs out, one step at a time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkv.config import EngineOptions
from prefixkv.engine.build import build_parts
from prefixkv.engine.output import PromptLogprobs, TextStream
from prefixkv.engine.request_state import RequestState
from prefixkv.engine.reservations import Reservations
from prefixkv.engine.sampler import TokenSampler, token_logprobs
from prefixkv.engine.scheduler import Scheduler, Work
from prefixkv.errors import ContextLengthError, RequestError, brief
from prefixkv.request import FinishReason, RequestOutput, Reservation, SamplingParams

logger = logging.getLogger(__name__)

MAX_SALT_LENGTH = 1024

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
    sampler: TokenSampler
    text: TextStream
    end_token_ids: frozenset[int]
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
        self._reservations = Reservations(parts.cache, options.prefix_cache, self.max_model_len)
        self._live: dict[str, _Live] = {}
        self._arrivals = itertools.count()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def validate(
        self, prompt: list[int], params: SamplingParams, cache_salt: str | None = None
    ) -> None:
        """Raise RequestError or ContextLengthError if the request could not be served."""
        if not prompt:
            raise RequestError("the prompt is empty; it needs a token or more", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; with one to generate at most "
                f"{self.max_model_len} fit here, so shorten it by "
                f"{len(prompt) - self.max_model_len + 1}"
            )
        self._check_ids("prompt", prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if params.min_tokens > 0 and len(self._end_token_ids(params)) >= self.vocab_size:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, and every token of the vocabulary would end "
                "the request; leave some out of stop_token_ids",
                param="min_tokens",
            )
        if cache_salt is not None:
            _check_salt(cache_salt)

    def _end_token_ids(self, params: SamplingParams) -> frozenset[int]:
        end = frozenset(params.stop_token_ids)
        return end if params.ignore_eos else end | self.tokenizer.eos_token_ids

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if not ids or (
            set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) < self.vocab_size
        ):
            return
        for at, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{name} holds {brief(token)} at position {at}; token ids of this model are "
                    f"whole numbers from 0 to {self.vocab_size - 1}",
                    param=name,
                )

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
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
        room = self.max_model_len - len(prompt)
        state = RequestState(
            request_id,
            prompt,
            params,
            seq,
            arrival=arrival,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            reserves=reserve,
        )
        end = self._end_token_ids(params)
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        self._live[request_id] = _Live(
            state,
            TokenSampler(params, end),
            TextStream(detokenizer, params.stop),
            end,
            None if params.prompt_logprobs is None else PromptLogprobs(len(prompt)),
        )
        self.scheduler.add(state)
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its blocks return. None if there is no such request any more."""
        live = self._live.get(request_id)
        if live is None:
            return None
        return self._finish(live, RequestOutput(request_id), "abort", flush=False)

    def step(self) -> list[RequestOutput]:
        """Run one step: the new pieces of every request that got one.

        If the forward pass fails, the requests in it end with ``finish_reason`` "error"; if
        choosing a token fails, that request alone does. Nothing that a failed pass may have half
        written is findable.
        """
        step = self.scheduler.schedule()
        if not step.work:
            return []
        try:
            logits = self.runner.run(step).numpy(force=True)
        except Exception as error:  # these requests end, the engine goes on
            logger.exception("a step of %d requests failed", len(step.work))
            return [self._fail(work, error) for work in step.work]
        tokens: list[int | None] = []
        outputs: list[RequestOutput] = []
        row = 0
        for work in step.work:
            rows = logits[row : row + work.num_logits]
            row += work.num_logits
            output = RequestOutput(work.request.request_id)
            try:
                tokens.append(self._sample(work, rows, output))
            except Exception as error:  # so does this one, alone
                logger.exception("choosing a token of %s failed", work.request.request_id)
                tokens.append(None)
                output = self._fail(work, error)
            outputs.append(output)
        self.scheduler.update(step, tokens)
        pieces = []
        for work, token, output in zip(step.work, tokens, outputs, strict=True):
            if token is not None:
                pieces.append(self._piece(work, token, output))
            elif work.request.reserves and work.is_last:
                pieces.append(self._reserve(work, output))
            elif output.finished:
                pieces.append(output)
        return pieces

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

    def _sample(self, work: Work, rows: NDArray[np.float32], output: RequestOutput) -> int | None:
        """The new token, if one follows; log-probabilities go into ``output``."""
        live = self._live[work.request.request_id]
        if live.prompt_logprobs is not None and not live.prompt_logprobs.complete:
            self._add_prompt_logprobs(live, live.prompt_logprobs, work, rows)
        if not work.samples:
            return None
        token = live.sampler.sample(rows[-1], len(work.request.output_token_ids))
        if work.request.params.logprobs is not None:
            output.logprobs = token_logprobs(rows[-1:], [token], work.request.params.logprobs)
        return token

    def _add_prompt_logprobs(
        self, live: _Live, gathered: PromptLogprobs, work: Work, rows: NDArray[np.float32]
    ) -> None:
        """Row i of a prompt is about its token i + 1; a preempted request sees some rows twice."""
        prompt = live.state.prompt
        first = max(work.start, len(gathered.values) - 1)
        last = min(work.stop, len(prompt) - 1)
        if first < last:
            new = rows[first - work.start : last - work.start]
            top = live.state.params.prompt_logprobs or 0
            gathered.values += token_logprobs(new, prompt[first + 1 : last + 1], top)

    def _piece(self, work: Work, token: int, output: RequestOutput) -> RequestOutput:
        try:
            return self._output(work, token, output)
        except Exception as error:  # and so does this one
            logger.exception("the text of %s failed", work.request.request_id)
            return self._fail(work, error)

    def _reserve(self, work: Work, output: RequestOutput) -> RequestOutput:
        live = self._live[work.request.request_id]
        try:
            output.reservation = self._reservations.hold(work.request)
        except RequestError as error:
            output.error = str(error)
        return self._finish(live, output, "length", flush=False)

    def _output(self, work: Work, token: int, output: RequestOutput) -> RequestOutput:
        """Fill in the text, and finish the request if this token ends it."""
        live = self._live[work.request.request_id]
        state = work.request
        count = len(state.output_token_ids)
        may_stop = count >= state.params.min_tokens
        output.token_ids = [token]
        if may_stop and token in live.end_token_ids:
            stop_reason = token if token in state.params.stop_token_ids else None
            return self._finish(live, output, "stop", stop_reason)
        output.text, stopped_by = live.text.push(token, may_stop=may_stop)
        if stopped_by is not None:
            return self._finish(live, output, "stop", stopped_by, flush=False)
        if count >= state.max_tokens:
            return self._finish(live, output, "length")
        return self._describe(live, output)

    def _finish(
        self,
        live: _Live,
        output: RequestOutput,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        *,
        flush: bool = True,
    ) -> RequestOutput:
        if flush:
            rest, stopped_by = live.text.flush()
            output.text += rest
            if stopped_by is not None:
                reason, stop_reason = "stop", stopped_by
        self.scheduler.finish(live.state, reason, stop_reason)
        del self._live[live.state.request_id]
        return self._describe(live, output)

    def _fail(self, work: Work, error: Exception) -> RequestOutput:
        live = self._live[work.request.request_id]
        output = self._finish(live, RequestOutput(work.request.request_id), "error", flush=False)
        output.error = f"{type(error).__name__}: {error}"
        return output

    def _describe(self, live: _Live, output: RequestOutput) -> RequestOutput:
        state = live.state
        output.num_prompt_tokens = state.num_prompt_tokens
        output.num_cached_tokens = state.num_cached_tokens
        output.finish_reason = state.finish_reason
        output.stop_reason = state.stop_reason
        output.metrics = state.metrics
        if live.prompt_logprobs is not None and live.prompt_logprobs.complete:
            output.prompt_logprobs = live.prompt_logprobs.values
        return output


def _check_salt(cache_salt: str) -> None:
    if not isinstance(cache_salt, str):
        raise RequestError(
            f"cache_salt is {brief(cache_salt)}; it must be a string", param="cache_salt"
        )
    if not 1 <= len(cache_salt) <= MAX_SALT_LENGTH:
        raise RequestError(
            f"cache_salt has {len(cache_salt)} characters; 1 to {MAX_SALT_LENGTH} are allowed",
            param="cache_salt",
        )
    try:
        cache_salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"cache_salt is {brief(cache_salt)}, which is no valid text: {error.reason}",
            param="cache_salt",
        ) from None
