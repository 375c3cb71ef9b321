"""From logits to tokens.

Each row is treated alone, with the request's own random stream, so neither token nor
log-probability depends on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from prefixkv.request import SamplingParams, TokenLogprobs

Row = NDArray[np.float32]


class TokenSampler:
    """Chooses the tokens of one sample; its random stream lives as long as the sample.

    Args:
        index: of the sample, which has a seed of its own.
        end_token_ids: tokens that end the request; not chosen before ``params.min_tokens``.
    """

    def __init__(
        self, params: SamplingParams, end_token_ids: Collection[int], index: int = 0
    ) -> None:
        self.params = params
        self._end = np.array(sorted(end_token_ids), dtype=np.int64)
        seed = params.seed_of(index)
        self._random = np.random.Generator(np.random.PCG64(None if seed is None else seed % 2**64))

    def sample(self, logits: Row, num_output_tokens: int) -> int:
        """The next token; of equally likely ones the first.

        Args:
            logits: float32 [vocab], of the model.
            num_output_tokens: tokens generated so far.

        Raises:
            ArithmeticError: the logits are no numbers.
        """
        params = self.params
        if num_output_tokens < params.min_tokens and len(self._end):
            logits = logits.copy()
            logits[self._end] = -np.inf
        best = most_likely(logits)
        return best if params.temperature == 0.0 else self._draw(logits)

    def _draw(self, logits: Row) -> int:
        """Temperature, min_p, top_k, top_p in this order, then inverse transform, in float64."""
        params = self.params
        weights = logits.astype(np.float64)
        weights -= weights.max()
        with np.errstate(over="ignore"):  # a tiny temperature: all but the most likely weigh 0
            weights = np.exp(weights / params.temperature)  # the most likely one has weight 1
        if params.min_p > 0.0:
            weights[weights < params.min_p] = 0.0
        tokens = None
        if params.top_k or params.top_p < 1.0:
            # The most likely first, of equals the first; those that weigh nothing left out.
            tokens = np.flatnonzero(weights)
            tokens = tokens[np.argsort(-weights[tokens], kind="stable")]
            tokens = tokens[: params.top_k or len(tokens)]
            weights = weights[tokens]
            sums = weights.cumsum()
            # Those before which top_p is not yet reached; the most likely one always stays.
            weights[sums - weights >= params.top_p * sums[-1]] = 0.0
        sums = weights.cumsum()
        target = min(self._random.random() * sums[-1], np.nextafter(sums[-1], 0.0))
        index = int(np.searchsorted(sums, target, side="right"))
        return index if tokens is None else int(tokens[index])


def most_likely(logits: Row) -> int:
    """The most likely token, of equals the first.

    Raises:
        ArithmeticError: the logits are no numbers.
    """
    best = int(logits.argmax())  # the first NaN, if there is one
    if not np.isfinite(logits[best]):
        raise ArithmeticError(f"the model's logits hold {logits[best]} for token {best}")
    return best


def log_softmax(logits: Row) -> NDArray[np.float64]:
    """Log-probabilities of all tokens, in float64."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return values


def largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Where the ``count`` largest values are, the largest first, of equals the first."""
    count = min(count, len(values))
    if not count:
        return np.empty(0, dtype=np.int64)
    found = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return found[np.argsort(-values[found], kind="stable")][:count]


def token_logprobs(
    logits: NDArray[np.float32], token_ids: Sequence[int], top: int
) -> list[TokenLogprobs]:
    """Log-probabilities of tokens under the model.

    Args:
        logits: float32 [n, vocab].
        token_ids: n tokens, one a row.
        top: how many most likely alternatives to give, 0 for none.
    """
    return [_logprobs(row, token, top) for row, token in zip(logits, token_ids, strict=True)]


def _logprobs(logits: Row, token: int, top: int) -> TokenLogprobs:
    values = log_softmax(logits)
    best = tuple((int(each), float(values[each])) for each in largest(values, top))
    return TokenLogprobs(token, float(values[token]), best)
