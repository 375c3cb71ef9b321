"""The example of an engine of one's own: short, equal to plain generation, sharing prefixes."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_engine.py"
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_engine", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_engine"] = module  # where a dataclass looks for its types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    document = [rng.randrange(5, 250) for _ in range(42)]
    tails = [[rng.randrange(5, 250) for _ in range(count)] for count in (1, 9, 30)]
    return [document + tail for tail in tails] + [document, document[:21], [7]]


def continued(plain: Any, prompt: list[int]) -> list[int]:
    tokens: list[int] = plain.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )[0].tolist()
    return tokens


def test_it_has_less_than_100_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 400), (4, 60), (4, 22), (16, 20)])
@pytest.mark.parametrize("system", ["hash", "radix", "paged", "off"])
def test_it_equals_plain_generation(
    example: ModuleType, plain: Any, system: str, block_size: int, num_blocks: int
) -> None:
    engine = example.Engine(plain, system, num_blocks, block_size)
    expected = [continued(plain, prompt) for prompt in prompts()]
    for _ in range(2):
        requests = engine.generate(prompts(), NEW_TOKENS)
        assert [request.tokens for request in requests] == expected
    engine.cache.check()
    assert engine.cache.num_free_blocks == num_blocks


@pytest.mark.parametrize(
    ("system", "cached"),
    [("hash", [0, 40, 40, 40, 20, 0]), ("radix", [0, 40, 40, 40, 20, 0]), ("off", [0] * 6)],
)
def test_requests_that_run_together_share(
    example: ModuleType, plain: Any, system: str, cached: list[int]
) -> None:
    requests = example.Engine(plain, system, 100, 4).generate(prompts(), NEW_TOKENS)
    assert [request.num_cached_tokens for request in requests] == cached


def test_paged_shares_what_is_reserved_to_the_token(example: ModuleType, plain: Any) -> None:
    engine = example.Engine(plain, "paged", 100, 4)
    first = engine.admit(prompts()[3], 1)
    engine.cache.reserve(first.table, 42)
    engine.cache.free(first.table)
    requests = engine.generate(prompts(), NEW_TOKENS)
    assert [request.tokens for request in requests] == [continued(plain, p) for p in prompts()]
    assert [request.num_cached_tokens for request in requests] == [42, 42, 42, 41, 20, 0]


def test_a_request_that_never_fits_is_an_error(example: ModuleType, plain: Any) -> None:
    with pytest.raises(MemoryError):
        example.Engine(plain, "hash", 4, 4).generate([[5] * 20], NEW_TOKENS)
