"""Beam search over rows of logits; it knows nothing of blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from prefixkv.engine.request_state import SequenceState
from prefixkv.engine.sampler import Row, largest, log_softmax, most_likely, token_logprobs
from prefixkv.request import BeamSearchParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that has ended."""

    score: float
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    at_end_token: bool


@dataclass(slots=True)
class _Beam:
    """A sequence that goes on; ``score`` is the sum of its tokens' log-probabilities."""

    sequence: SequenceState
    score: float
    logprobs: list[TokenLogprobs]
    row: Row | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A beam and a token after it."""

    score: float
    beam: _Beam
    token: int
    ends: bool


class BeamSearch:
    """The search of one request: ``see`` the logits of every beam, then ``advance``.

    It chooses as ``transformers`` does (``GenerationMixin._beam_search`` of 5.24): of all
    continuations the ``width`` best that do not end go on, and those that end become hypotheses if
    they are among the ``width`` best of all. Scores are float64.

    Args:
        sequence: the prompt.
        end_token_ids: tokens that end a hypothesis; not chosen before ``params.min_tokens``.
        max_tokens: a hypothesis ends with this many tokens.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        sequence: SequenceState,
        end_token_ids: Collection[int],
        max_tokens: int,
    ) -> None:
        self.params = params
        self.hypotheses: list[Hypothesis] = []  # the best first, at most `width`
        self._end = np.array(sorted(end_token_ids), dtype=np.int64)
        self._max_tokens = max_tokens
        self._beams = [_Beam(sequence, 0.0, [])]

    def see(self, sequence: SequenceState, logits: Row) -> None:
        """Take the logits, float32 [vocab], of the token after a beam.

        Raises:
            ArithmeticError: they are no numbers.
        """
        most_likely(logits)
        next(beam for beam in self._beams if beam.sequence is sequence).row = logits

    @property
    def ready(self) -> bool:
        """Whether the logits of every beam have been seen."""
        return all(beam.row is not None for beam in self._beams)

    def advance(self) -> list[tuple[SequenceState, int]]:
        """One step of the search, once it is ready.

        Returns:
            The beams that go on with their next tokens, the best first; none when it is over. The
            sequences that come of them are to be told with ``go_on``.

        Raises:
            ArithmeticError: no token may follow.
        """
        candidates = [each for beam in self._beams for each in self._candidates(beam)]
        if not candidates:
            raise ArithmeticError("no token can follow: the logits of all that may are infinite")
        candidates.sort(key=lambda each: -each.score)  # stable: of equals the first
        width = self.params.width
        length = len(self._beams[0].sequence.output_token_ids) + 1
        is_last = length >= self._max_tokens
        for each in candidates[:width]:
            if each.ends or is_last:
                self._add_hypothesis(each, length)
        going = [each for each in candidates if not each.ends][:width]
        if is_last or not going or self._is_over(going[0].score, length):
            return []
        self._beams = [
            _Beam(each.beam.sequence, each.score, self._logprobs(each)) for each in going
        ]
        return [(each.beam.sequence, each.token) for each in going]

    def go_on(self, sequences: Sequence[SequenceState]) -> None:
        """The beams' sequences from here on, in the order of ``advance``."""
        for beam, sequence in zip(self._beams, sequences, strict=True):
            beam.sequence = sequence

    def _candidates(self, beam: _Beam) -> list[_Candidate]:
        """All tokens after a beam that can be among the best: ``width`` of each kind."""
        assert beam.row is not None  # `ready`
        values = log_softmax(beam.row)
        ending = values[self._end]
        if len(beam.sequence.output_token_ids) < self.params.min_tokens:
            ending[:] = -np.inf
        values[self._end] = -np.inf
        width = self.params.width
        others = largest(values, width)
        found = [(int(token), values[token], False) for token in others]
        found += [(int(self._end[at]), ending[at], True) for at in largest(ending, width)]
        return [
            _Candidate(beam.score + float(value), beam, token, ends)
            for token, value, ends in found
            if value > -np.inf
        ]

    def _add_hypothesis(self, ended: _Candidate, length: int) -> None:
        tokens = [*ended.beam.sequence.output_token_ids, ended.token]
        score = ended.score / length**self.params.length_penalty
        new = Hypothesis(score, tokens, self._logprobs(ended), ended.ends)
        self.hypotheses.append(new)
        self.hypotheses.sort(key=lambda each: -each.score)
        del self.hypotheses[self.params.width :]

    def _is_over(self, best_score: float, length: int) -> bool:
        """Whether no beam is to go on, ``best_score`` being that of the best, unnormalised."""
        params = self.params
        if len(self.hypotheses) < params.width:
            return False
        if params.early_stopping is True:
            return True
        longest = params.early_stopping == "never" and params.length_penalty > 0
        at = self._max_tokens if longest else length
        best_possible: float = best_score / at**params.length_penalty
        return best_possible <= self.hypotheses[-1].score

    def _logprobs(self, chosen: _Candidate) -> list[TokenLogprobs]:
        top, row = self.params.logprobs, chosen.beam.row
        if top is None or row is None:
            return []
        return chosen.beam.logprobs + token_logprobs(row[None], [chosen.token], top)
