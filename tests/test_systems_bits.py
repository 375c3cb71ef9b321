"""Whatever system finds the prefixes, every token is chosen from the same logits, to the bit.

As in test_engine_bits, whose reference and prompts are used: each prompt alone, without a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import Ask, Bench, same_bits
from test_engine_bits import (
    DTYPES,
    LONGEST,
    NEW_TOKENS,
    PROMPTS,
    alone,
    cached_tokens,
    in_the_middle,
    reference,
    together,
)

SYSTEMS = ("hash", "radix", "paged", "off")
DOCUMENT = PROMPTS[2]
SIZES = [(1, 7), (4, 4096), (16, 7), (16, 4096), (64, 16)]


@pytest.fixture(params=SIZES, ids=str)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    block_size, token_budget = request.param
    return {"block_size": block_size, "token_budget": token_budget, "max_model_len": 512}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_reserved(model: Path, system: str, dtype: str, options: dict[str, Any]) -> None:
    bench = Bench(model, prefix_cache=system, dtype=dtype, num_blocks=2048, **options)
    rounds = [together(bench), in_the_middle(bench), alone(bench)]
    for answers in rounds:
        assert same_bits(answers, reference(model, dtype))
    cached = [cached_tokens(answers) for answers in rounds]
    assert (min(cached) > 0) is (system in ("hash", "radix"))
    assert (max(cached) > 0) is (system in ("hash", "radix"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("system", ["hash", "radix", "paged"])
def test_with_a_reserved_document(
    model: Path, system: str, dtype: str, options: dict[str, Any]
) -> None:
    bench = Bench(model, prefix_cache=system, dtype=dtype, num_blocks=2048, **options)
    held = bench.reserve(DOCUMENT)
    answers = together(bench)
    assert same_bits(answers, reference(model, dtype))
    assert held.num_tokens > 0
    for prompt, answer in zip(PROMPTS[:2], answers[:2], strict=True):
        assert prompt[: len(DOCUMENT)] == DOCUMENT
        assert answer.output.num_cached_tokens >= held.num_tokens
    assert same_bits(in_the_middle(bench), reference(model, dtype))


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_paged_finds_the_reserved_to_the_token(model: Path, block_size: int) -> None:
    bench = Bench(
        model, prefix_cache="paged", block_size=block_size, num_blocks=1024, max_model_len=512
    )
    assert bench.reserve(DOCUMENT).num_tokens == len(DOCUMENT)
    shared = [130, 130, 129, 63, 70, 0, 0, 0, 0, 130]  # of the document, and never the last token
    for answers in (alone(bench), together(bench)):
        assert [answer.output.num_cached_tokens for answer in answers] == shared


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_preemption_and_eviction(model: Path, system: str, block_size: int) -> None:
    blocks = -(-(LONGEST + NEW_TOKENS) // block_size) + 1
    options: dict[str, Any] = {"block_size": block_size, "token_budget": 7, "num_blocks": blocks}
    bench = Bench(model, prefix_cache=system, max_model_len=LONGEST + NEW_TOKENS, **options)
    for answers in (together(bench), in_the_middle(bench)):
        assert same_bits(answers, reference(model, "float32"))
    assert bench.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("system", ["hash", "radix", "paged"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_preemption_beside_a_reservation(model: Path, system: str, block_size: int) -> None:
    longest = LONGEST + NEW_TOKENS
    blocks = -(-longest // block_size) + -(-len(DOCUMENT) // block_size)
    options: dict[str, Any] = {"block_size": block_size, "token_budget": 7, "num_blocks": blocks}
    bench = Bench(model, prefix_cache=system, max_model_len=longest, **options)
    held = bench.reserve(DOCUMENT)
    for answers in (together(bench), in_the_middle(bench)):
        assert same_bits(answers, reference(model, "float32"))
        assert answers[0].output.num_cached_tokens >= held.num_tokens
    bench.engine.release(held.id)
    assert bench.engine.cache.num_free_blocks == blocks


@pytest.mark.parametrize("system", SYSTEMS)
def test_requests_that_are_aborted_leave_the_others_alone(model: Path, system: str) -> None:
    bench = Bench(model, prefix_cache=system, block_size=4, token_budget=7, num_blocks=256)
    for steps in range(30):
        asked = [bench.add(Ask(prompt)) for prompt in (PROMPTS[0], PROMPTS[4])]
        for _ in range(steps):
            bench.step()
        for answer in asked:
            bench.engine.abort(answer.output.request_id)
        bench.engine.cache.check()
    assert same_bits(together(bench), reference(model, "float32"))
