"""The default chat model: bit-equal answers with the cache on, and agreement with transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from beams import check_equal, search_ours, search_theirs
from harness import Answer, Ask, Bench, same_bits
from prefixkv import LLM
from prefixkv.model.default_model import wheel_model_directory
from prefixkv.model.loader import load_model

pytestmark = pytest.mark.model

NEW_TOKENS = 8

SYSTEM = (
    "You answer questions about a small harbour. The harbour has four piers. Fishing boats use the "
    "north pier, ferries the east pier, and visitors the south pier. The lighthouse was built in "
    "1887 and is painted red and white. The harbour office opens at seven in the morning."
)
QUESTIONS = (
    "How many piers are there?",
    "Which pier do the ferries use?",
    "When was the lighthouse built?",
    "What colours is the lighthouse?",
    "When does the office open?",
    "Who uses the south pier?",
)
OTHERS = (
    "Once upon a time",
    "def fibonacci(n):",
    "1, 2, 3, 4, 5,",
    "Die Hauptstadt von Frankreich ist",
    "The three laws of motion are",
    "Übrigens: naïve café, 東京, 🙂",
)


@cache
def prompts() -> list[list[int]]:
    tokenizer = load_model(None).tokenizer
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        )
        for question in QUESTIONS
    ]
    return chats + [tokenizer.encode(text) for text in OTHERS]


def ask_all(bench: Bench, *, gap: int = 0) -> list[Answer]:
    asks = [Ask(prompt, NEW_TOKENS, at=gap * i) for i, prompt in enumerate(prompts())]
    return bench.serve(asks)


@cache
def reference(dtype: str) -> list[Answer]:
    bench = Bench(None, dtype=dtype, prefix_cache="off", num_blocks=64)
    return [bench.serve([Ask(prompt, NEW_TOKENS)])[0] for prompt in prompts()]


SETTINGS: dict[str, dict[str, Any]] = {
    "small chunks, block size 4": {"token_budget": 16, "block_size": 4, "num_blocks": 400},
    "large chunks, block size 16": {"token_budget": 512, "block_size": 16, "num_blocks": 100},
    "almost too small a pool": {"token_budget": 64, "block_size": 16, "num_blocks": 10},
}
MORE_SETTINGS: dict[str, dict[str, Any]] = {
    f"budget {budget}, block size {block_size}": {
        "token_budget": budget,
        "block_size": block_size,
        "num_blocks": 2048 // block_size,
    }
    for budget in (1, 7, 64, 512)
    for block_size in (1, 4, 16, 64)
}


def check_bits(dtype: str, setting: dict[str, Any]) -> None:
    assert len(prompts()) == 12
    bench = Bench(None, dtype=dtype, **setting)
    together, apart = ask_all(bench), ask_all(bench, gap=3)
    assert same_bits(together, reference(dtype))
    assert same_bits(apart, reference(dtype))
    assert sum(answer.output.num_cached_tokens for answer in together + apart) > 0


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_hit_never_changes_an_answer(setting: dict[str, Any]) -> None:
    check_bits("float32", setting)


def test_a_hit_never_changes_an_answer_in_bfloat16() -> None:
    check_bits("bfloat16", SETTINGS["small chunks, block size 4"])


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("setting", MORE_SETTINGS.values(), ids=MORE_SETTINGS.keys())
def test_a_hit_never_changes_an_answer_at_length(dtype: str, setting: dict[str, Any]) -> None:
    check_bits(dtype, setting)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoModelForCausalLM

    directory = wheel_model_directory()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def test_logits_and_greedy_tokens_agree_with_transformers(
    theirs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    worst, unsure, tokens = 0.0, 0, 0
    for prompt, answer in zip(prompts(), reference("float32"), strict=True):
        output = answer.output.token_ids
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        for row, expected, token in zip(answer.logits, logits, output, strict=True):
            worst = max(worst, float((row - expected).abs().max()))
            first, second = expected.topk(2).values.tolist()
            tokens += 1
            if first - second > 1e-2:
                assert token == int(expected.argmax())
            else:
                unsure += 1
    with capsys.disabled():
        print(f"\n  largest difference {worst:.1e}; {unsure} of {tokens} tokens too close to call")
    assert worst < 1e-3


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_beam_search_agrees_with_transformers(theirs: Any, early_stopping: bool | str) -> None:
    llm = LLM(dtype="float32", num_blocks=64)
    params = {
        "width": 4,
        "early_stopping": early_stopping,
        "length_penalty": 1.0,
        "max_tokens": 20,
    }
    ends = sorted(llm.engine.tokenizer.eos_token_ids)
    ties = 0
    for prompt in (prompts()[1], prompts()[4], prompts()[7]):
        mine = search_ours(llm, prompt, ends, params)
        ties += check_equal(mine, search_theirs(theirs, prompt, ends, params), 1.0)
    assert ties == 0
