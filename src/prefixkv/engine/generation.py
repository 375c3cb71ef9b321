"""What a request makes of its logits: samples, or the hypotheses of beam search."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from prefixkv.engine.beam_search import BeamSearch, Hypothesis
from prefixkv.engine.output import TextStream
from prefixkv.engine.request_state import RequestState, SequenceState
from prefixkv.engine.sampler import Row, TokenSampler, token_logprobs
from prefixkv.engine.scheduler import Scheduler
from prefixkv.engine.step import Work
from prefixkv.model.tokenizer import Tokenizer
from prefixkv.request import BeamSearchParams, FinishReason, SampleOutput, SamplingParams

End = tuple[FinishReason, str | int | None]


class Generation(Protocol):
    """One request's way from logits to output."""

    def choose(self, work: Work, logits: Row) -> Sequence[int]:
        """The next token of each sequence that is due, or none yet."""
        ...

    def take(
        self, scheduler: Scheduler, work: Work, tokens: Sequence[int], logits: Row
    ) -> list[SampleOutput]:
        """What is new, once the tokens are in their sequences; ends what has come to its end."""
        ...


class Samples:
    """Samples of a prompt, each with a random stream and a text of its own."""

    def __init__(
        self, params: SamplingParams, end_token_ids: Collection[int], tokenizer: Tokenizer
    ) -> None:
        self._params = params
        self._end_token_ids = end_token_ids
        self._samplers = [TokenSampler(params, end_token_ids, i) for i in range(params.n)]
        self._texts = [
            TextStream(
                tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens), params.stop
            )
            for _ in range(params.n)
        ]

    def choose(self, work: Work, logits: Row) -> list[int]:
        return [
            self._samplers[each.index].sample(logits, len(each.output_token_ids))
            for each in work.due
        ]

    def take(
        self, scheduler: Scheduler, work: Work, tokens: Sequence[int], logits: Row
    ) -> list[SampleOutput]:
        outputs = []
        for sequence, token in zip(work.due, tokens, strict=True):
            output = SampleOutput(sequence.index, token_ids=[token])
            if self._params.logprobs is not None:
                output.logprobs = token_logprobs(logits[None], [token], self._params.logprobs)
            output.text, end = self._text(work.request, sequence, token)
            if end is not None:
                scheduler.finish_sequence(work.request, sequence, *end)
                output.finish_reason, output.stop_reason = end
            outputs.append(output)
        return outputs

    def _text(
        self, request: RequestState, sequence: SequenceState, token: int
    ) -> tuple[str, End | None]:
        """The text that a token brings, and why the sample ends if it does."""
        stream, params = self._texts[sequence.index], self._params
        count = len(sequence.output_token_ids)
        may_stop = count >= params.min_tokens
        if may_stop and token in self._end_token_ids:
            stop_reason = token if token in params.stop_token_ids else None
            return _flushed(stream, "", ("stop", stop_reason))
        text, stopped_by = stream.push(token, may_stop=may_stop)
        if stopped_by is not None:
            return text, ("stop", stopped_by)
        if count >= request.max_tokens:
            return _flushed(stream, text, ("length", None))
        return text, None


def _flushed(stream: TextStream, text: str, end: End) -> tuple[str, End]:
    rest, stopped_by = stream.flush()
    return text + rest, end if stopped_by is None else ("stop", stopped_by)


class Beams:
    """Beam search: nothing is given before its end, and then its hypotheses, the best first."""

    def __init__(
        self,
        params: BeamSearchParams,
        end_token_ids: Collection[int],
        tokenizer: Tokenizer,
        request: RequestState,
    ) -> None:
        self._params = params
        self._tokenizer = tokenizer
        (sequence,) = request.sequences
        self._search = BeamSearch(params, sequence, end_token_ids, request.max_tokens)

    def choose(self, work: Work, logits: Row) -> Sequence[int]:
        (beam,) = work.due
        self._search.see(beam, logits)
        return ()

    def take(
        self,
        scheduler: Scheduler,
        work: Work,
        tokens: Sequence[int],  # noqa: ARG002 - the search chooses when it has seen all beams
        logits: Row,  # noqa: ARG002
    ) -> list[SampleOutput]:
        if not self._search.ready:
            return []
        choices = self._search.advance()
        if choices:
            self._search.go_on(scheduler.continue_beams(work.request, choices))
            return []
        found = self._search.hypotheses[: self._params.n]
        outputs = [self._output(index, each) for index, each in enumerate(found)]
        scheduler.finish(work.request, outputs[0].finish_reason or "length")
        return outputs

    def _output(self, index: int, hypothesis: Hypothesis) -> SampleOutput:
        params, tokens, ended = self._params, hypothesis.token_ids, hypothesis.at_end_token
        return SampleOutput(
            index,
            self._tokenizer.decode(
                tokens[:-1] if ended else tokens, skip_special_tokens=params.skip_special_tokens
            ),
            tokens,
            "stop" if ended else "length",
            tokens[-1] if ended and tokens[-1] in params.stop_token_ids else None,
            None if params.logprobs is None else hypothesis.logprobs,
            hypothesis.score,
        )
