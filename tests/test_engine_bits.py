"""A hit never changes an answer: every token is chosen from the same logits, to the bit.

The reference is each prompt alone, whole in one step, without a cache. All else must equal it:
the cache on and off, any chunk size and block size, any company, after preemption and eviction,
arrivals in the middle of others.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from harness import Answer, Ask, Bench, same_bits

DTYPES = ("float32", "bfloat16")
BLOCK_SIZES = (1, 4, 16, 64)
LONGEST = 150
NEW_TOKENS = 6


def make_prompts() -> list[list[int]]:
    """Prompts that share a document, half of it, or nothing; short and long, some equal."""
    rng = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(5, 250) for _ in range(count)]

    document = tokens(130)
    prompts = [document + tokens(LONGEST - 130), document + tokens(3), document, document[:64]]
    prompts += [document[:70] + tokens(40), tokens(1), tokens(2), tokens(65), tokens(100)]
    return [*prompts, list(prompts[0])]


PROMPTS = make_prompts()


@cache
def reference(model: Path, dtype: str) -> list[Answer]:
    bench = Bench(model, dtype=dtype, prefix_cache="off", token_budget=4096, num_blocks=64)
    return [bench.serve([Ask(prompt, NEW_TOKENS)])[0] for prompt in PROMPTS]


def alone(bench: Bench) -> list[Answer]:
    return [bench.serve([Ask(prompt, NEW_TOKENS)])[0] for prompt in PROMPTS]


def together(bench: Bench) -> list[Answer]:
    return bench.serve([Ask(prompt, NEW_TOKENS) for prompt in PROMPTS])


def in_the_middle(bench: Bench) -> list[Answer]:
    return bench.serve([Ask(prompt, NEW_TOKENS, at=5 * i) for i, prompt in enumerate(PROMPTS)])


def cached_tokens(answers: list[Answer]) -> int:
    return sum(answer.output.num_cached_tokens for answer in answers)


@pytest.fixture(params=[(d, b, t) for d in DTYPES for b in BLOCK_SIZES for t in (1, 7, b, 4096)])
def setting(request: pytest.FixtureRequest) -> tuple[str, int, int]:
    return request.param  # type: ignore[no-any-return]


def options(setting: tuple[str, int, int]) -> dict[str, object]:
    dtype, block_size, budget = setting
    return {"dtype": dtype, "block_size": block_size, "token_budget": budget}


def test_chunks(model: Path, setting: tuple[str, int, int]) -> None:
    bench = Bench(model, prefix_cache="off", num_blocks=2048, **options(setting))
    assert same_bits(alone(bench), reference(model, setting[0]))


def test_hits(model: Path, setting: tuple[str, int, int]) -> None:
    bench = Bench(model, num_blocks=2048, **options(setting))
    first = alone(bench)
    again = alone(bench)
    assert same_bits(first, reference(model, setting[0]))
    assert same_bits(again, reference(model, setting[0]))
    block_size = setting[1]
    assert [answer.output.num_cached_tokens for answer in again] == [
        (len(prompt) - 1) // block_size * block_size for prompt in PROMPTS
    ]


@pytest.mark.parametrize("prefix_cache", ["hash", "off"])
def test_company(model: Path, setting: tuple[str, int, int], prefix_cache: str) -> None:
    bench = Bench(model, num_blocks=2048, prefix_cache=prefix_cache, **options(setting))
    assert same_bits(together(bench), reference(model, setting[0]))


def test_arrivals_in_the_middle_of_others(model: Path, setting: tuple[str, int, int]) -> None:
    bench = Bench(model, num_blocks=2048, **options(setting))
    answers = in_the_middle(bench)
    assert same_bits(answers, reference(model, setting[0]))
    assert cached_tokens(answers) > 0


def test_preemption_and_eviction(model: Path, setting: tuple[str, int, int]) -> None:
    block_size = setting[1]
    enough_for_one = -(-(LONGEST + NEW_TOKENS) // block_size)
    bench = Bench(model, num_blocks=enough_for_one + 1, **options(setting))
    rounds = [together(bench), in_the_middle(bench)]
    for answers in rounds:
        assert same_bits(answers, reference(model, setting[0]))
    assert cached_tokens(rounds[0] + rounds[1]) > 0


def test_the_small_pool_does_preempt_and_evict(model: Path) -> None:
    bench = Bench(model, num_blocks=12, block_size=16)
    together(bench)
    assert bench.engine.stats().num_preemptions > 0


def test_the_native_kernel_ran(model: Path) -> None:
    bench = Bench(model, num_blocks=64)
    together(bench)
    attention = bench.engine.runner.attention
    assert attention.backend == "native"
    assert attention.num_calls > 0


def test_a_corrupted_block_changes_the_bits(model: Path) -> None:
    bench = Bench(model, num_blocks=64)
    alone(bench)
    attention, cache = bench.engine.runner.attention, bench.engine.cache
    block = cache.lookup(cache.sequence(PROMPTS[0])).blocks[2]
    attention.v_cache[0, block, 5] += 0.01
    assert not same_bits(alone(bench), reference(model, "float32"))


def test_threads_do_not_matter(model: Path) -> None:
    for threads in (1, 2, 3):
        bench = Bench(model, num_blocks=64, threads=threads)
        assert same_bits(together(bench), reference(model, "float32"))


def test_the_torch_backend_agrees_closely(model: Path) -> None:
    bench = Bench(model, num_blocks=64, attention="torch")
    for answer, expected in zip(alone(bench), reference(model, "float32"), strict=True):
        for ours, theirs in zip(answer.logits, expected.logits, strict=True):
            assert (ours - theirs).abs().max() < 1e-3
