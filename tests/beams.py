"""One beam search by both: ours, and that of ``transformers`` (5.24)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from prefixkv import LLM, BeamSearchParams

TIE = 1e-5  # of scores


@dataclass
class Found:
    """What a search found: token ids and scores, the best first."""

    token_ids: list[list[int]]
    scores: list[float]


def search_ours(llm: LLM, prompt: list[int], end: list[int], params: dict[str, Any]) -> Found:
    asked = BeamSearchParams(ignore_eos=True, stop_token_ids=end, **params)
    samples = llm.generate(prompt, asked)[0].samples
    assert [sample.index for sample in samples] == list(range(len(samples)))
    return Found([s.token_ids for s in samples], [s.score for s in samples])


def search_theirs(
    model: PreTrainedModel, prompt: list[int], end: list[int], params: dict[str, Any]
) -> Found:
    least = params.get("min_tokens", 0)
    out = model.generate(
        torch.tensor([prompt]),
        num_beams=params["width"],
        num_return_sequences=params["width"],
        max_new_tokens=params["max_tokens"],
        min_new_tokens=least or None,
        length_penalty=params["length_penalty"],
        early_stopping=params["early_stopping"],
        eos_token_id=end,
        pad_token_id=0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    rows = out.sequences[:, len(prompt) :].tolist()
    return Found([_cut(row, end, least) for row in rows], out.sequences_scores.tolist())


def _cut(row: list[int], end: list[int], least: int) -> list[int]:
    """A row without its padding."""
    ends = (at + 1 for at, token in enumerate(row) if token in end and at + 1 > least)
    return row[: next(ends, len(row))]


def check_equal(mine: Found, reference: Found, penalty: float) -> bool:
    """Whether they differ by a tie alone: of hypotheses with the same score rounding chose another.

    Asserts that they do not differ otherwise: the same hypotheses in the same order, scores within
    1e-4. A negative penalty multiplies the sum of log-probabilities, and with it the rounding of
    both sides; there the sum is within 1e-4.
    """
    pairs = list(zip(mine.token_ids, mine.scores, reference.scores, strict=True))
    if mine.token_ids != reference.token_ids:
        assert all(abs(a - b) < TIE for _, a, b in pairs), (mine, reference)
        return True
    for tokens, a, b in pairs:
        assert abs(a - b) <= 1e-4 * max(1.0, len(tokens) ** -penalty), (mine, reference)
    return False
