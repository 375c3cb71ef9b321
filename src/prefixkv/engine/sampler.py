"""From logits to tokens.

Each row is treated alone, with the request's own random stream, so neither token nor
log-probability depends on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from prefixkv.request import SamplingParams, TokenLogprobs


class TokenSampler:
    """Chooses the tokens of one request; its random stream lives as long as the request.

    Args:
        end_token_ids: tokens that end the request; not chosen before ``params.min_tokens``.
    """

    def __init__(self, params: SamplingParams, end_token_ids: Collection[int]) -> None:
        self.params = params
        self._end = torch.tensor(sorted(end_token_ids), dtype=torch.int64)
        seed = None if params.seed is None else params.seed % 2**64
        self._random = np.random.Generator(np.random.PCG64(seed))

    def sample(self, logits: Tensor, num_output_tokens: int) -> int:
        """The next token.

        Args:
            logits: float32 [vocab], of the model.
            num_output_tokens: tokens generated so far.
        """
        params = self.params
        if num_output_tokens < params.min_tokens and len(self._end):
            logits = logits.index_fill(0, self._end.to(logits.device), -torch.inf)
        if params.temperature == 0.0:
            return int(logits.argmax())
        return self._draw(logits)

    def _draw(self, logits: Tensor) -> int:
        """Temperature, min_p, top_k, top_p in this order, then inverse transform, in float64."""
        params = self.params
        probs = torch.softmax(logits.double() / params.temperature, dim=0)
        if params.min_p > 0.0:
            probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
        tokens = None
        if params.top_k or params.top_p < 1.0:
            count = min(params.top_k or len(probs), len(probs))
            probs, tokens = probs.topk(count)  # sorted, the most likely first
            sums = probs.cumsum(0)
            # Those before which top_p is not yet reached; the most likely one always stays.
            probs = torch.where(sums - probs < params.top_p * sums[-1], probs, 0.0)
        sums = probs.cumsum(0)
        total = float(sums[-1])
        target = min(self._random.random() * total, float(np.nextafter(total, 0.0)))
        index = int(torch.searchsorted(sums, target, right=True))
        return index if tokens is None else int(tokens[index])


def token_logprobs(logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens under the model.

    Args:
        logits: float32 [n, vocab].
        token_ids: n tokens, one a row.
        top: how many most likely alternatives to give, 0 for none.
    """
    result = []
    for row, token in zip(logits, token_ids, strict=True):
        logprobs = torch.log_softmax(row, dim=-1)
        best: tuple[tuple[int, float], ...] = ()
        if top:
            values, ids = logprobs.topk(top)
            best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        result.append(TokenLogprobs(token, float(logprobs[token]), best))
    return result
