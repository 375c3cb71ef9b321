"""Sampling: distributions against their definitions, random streams against company."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefixkv.engine.sampler import TokenSampler, token_logprobs
from prefixkv.request import SamplingParams

PROBS = [0.4, 0.3, 0.15, 0.1, 0.05]


def logits(probs: list[float] = PROBS) -> NDArray[np.float32]:
    return np.log(np.array(probs, dtype=np.float32))


def draw(count: int, **params: Any) -> Counter[int]:
    sampler = TokenSampler(SamplingParams(seed=1, **params), ())
    return Counter(sampler.sample(logits(), i) for i in range(count))


def test_temperature_0_takes_the_most_likely() -> None:
    assert draw(5, temperature=0.0) == {0: 5}


def test_greedy_takes_the_first_of_equals() -> None:
    sampler = TokenSampler(SamplingParams(temperature=0.0), ())
    assert sampler.sample(np.array([0.0, 3.0, 3.0, 1.0], dtype=np.float32), 0) == 1


def test_frequencies_follow_the_probabilities() -> None:
    counts = draw(20_000)
    for token, probability in enumerate(PROBS):
        assert counts[token] / 20_000 == pytest.approx(probability, abs=0.015)


def test_temperature_sharpens() -> None:
    weights = [p**2 for p in PROBS]  # temperature 0.5
    counts = draw(20_000, temperature=0.5)
    for token, weight in enumerate(weights):
        assert counts[token] / 20_000 == pytest.approx(weight / sum(weights), abs=0.015)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
    ],
)
def test_truncation_keeps_exactly(params: dict[str, Any], kept: set[int]) -> None:
    assert set(draw(2_000, **params)) == kept


def test_kept_tokens_share_the_rest_in_proportion() -> None:
    assert draw(20_000, top_k=2)[0] / 20_000 == pytest.approx(0.4 / 0.7, abs=0.015)


def test_a_seed_repeats_and_another_differs() -> None:
    def tokens(seed: int) -> list[int]:
        sampler = TokenSampler(SamplingParams(seed=seed), ())
        return [sampler.sample(logits(), i) for i in range(50)]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)
    assert tokens(-3) == tokens(-3)


def test_tokens_that_would_end_are_not_chosen_before_min_tokens() -> None:
    sampler = TokenSampler(SamplingParams(temperature=0.0, min_tokens=2), {0, 1})
    assert [sampler.sample(logits(), i) for i in range(4)] == [2, 2, 0, 0]


def test_the_given_logits_stay_as_they_are() -> None:
    row = logits()
    TokenSampler(SamplingParams(min_tokens=2, top_p=0.5, min_p=0.1), {0}).sample(row, 0)
    assert np.array_equal(row, logits())


def test_logprobs_are_of_the_model_and_best_first() -> None:
    (result,) = token_logprobs(logits()[None], [2], 3)
    assert result.token_id == 2
    assert result.logprob == pytest.approx(math.log(0.15), abs=1e-6)
    assert [token for token, _ in result.top] == [0, 1, 2]
    assert [math.exp(value) for _, value in result.top] == pytest.approx([0.4, 0.3, 0.15], abs=1e-6)


def test_equally_likely_alternatives_come_in_the_order_of_their_ids() -> None:
    row = np.array([[1.0, 2.0, 2.0, 2.0, 0.0]], dtype=np.float32)
    assert [token for token, _ in token_logprobs(row, [0], 2)[0].top] == [1, 2]


def test_more_alternatives_than_tokens_gives_them_all() -> None:
    assert len(token_logprobs(logits()[None], [2], 20)[0].top) == len(PROBS)
