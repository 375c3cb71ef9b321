"""From tokens to text: one request's output, stop strings and log-probabilities included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefixkv.engine.sampler import token_logprobs
from prefixkv.request import TokenLogprobs


class Detokenizer(Protocol):
    """Text of a stream of tokens; holds back bytes until they make a character."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class TextStream:
    """Text of one request, given out no sooner than it is sure to stay.

    A piece that could be the start of a stop string is held back until it is not. The text ends
    before the first stop string.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._pending = ""  # decoded, not given out

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Text that is now sure, and the stop string that ended it, if one did.

        Args:
            may_stop: False while ``min_tokens`` is not reached: stop strings are not looked for.
        """
        self._pending += self._detokenizer.push(token_id)
        if not may_stop:
            return self._give(len(self._pending)), None
        return self._match()

    def flush(self) -> tuple[str, str | None]:
        """The rest, at the end of the request."""
        self._pending += self._detokenizer.flush()
        text, stop = self._match()
        return text + self._give(len(self._pending)), stop

    def _match(self) -> tuple[str, str | None]:
        found = [(at, stop) for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            text = self._pending[:at]
            self._pending = ""
            return text, stop
        return self._give(len(self._pending) - self._held()), None

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-length:]) for stop in self._stop):
                return length
        return 0

    def _give(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        return text


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, gathered over the chunks that compute it."""

    def __init__(self, prompt: Sequence[int], top: int) -> None:
        self._prompt = prompt
        self._top = top
        self.values: list[TokenLogprobs | None] = [None]  # nothing precedes the first token

    @property
    def complete(self) -> bool:
        return len(self.values) == len(self._prompt)

    def add(self, start: int, stop: int, rows: NDArray[np.float32]) -> None:
        """Take the logits of tokens [start, stop); a preempted request sees some of them twice.

        Row i of a prompt is about its token i + 1.
        """
        first = max(start, len(self.values) - 1)
        last = min(stop, len(self._prompt) - 1)
        if first < last:
            tokens = self._prompt[first + 1 : last + 1]
            self.values += token_logprobs(rows[first - start : last - start], tokens, self._top)
