"""The Python API on a tiny model: text and ids in, outputs, counts, ends and errors out."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixkv import LLM, RequestOutput, SamplingParams
from prefixkv.errors import ConfigError, ContextLengthError, ModelError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def llm(model: Path) -> LLM:
    return LLM(model, num_blocks=64)


def free(llm: LLM) -> int:
    return llm.engine.cache.num_free_blocks


def test_one_prompt_gives_one_output(llm: LLM) -> None:
    (output,) = llm.generate("Hello there", GREEDY)
    assert output.num_prompt_tokens == len(llm.engine.tokenizer.encode("Hello there"))
    assert len(output.token_ids) == 8
    assert output.text == llm.engine.tokenizer.decode(output.token_ids)
    assert output.finish_reason == "length"


def test_text_and_its_token_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode("Hello there")
    from_text, from_ids = llm.generate(["Hello there", ids], GREEDY)
    assert from_text.token_ids == from_ids.token_ids
    assert llm.generate(ids, GREEDY)[0].token_ids == from_ids.token_ids


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a long prompt " * 10, "b", "another", "c"]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    assert [len(output.token_ids) for output in llm.generate(["a", "b"], params)] == [1, 5]


@pytest.mark.parametrize("hash_algorithm", ["xxh3", "sha256_cbor", "sha256"])
def test_asked_twice_the_second_hits_all_full_blocks_below_the_last_token(
    model: Path, hash_algorithm: str
) -> None:
    llm = LLM(model, num_blocks=64, hash_algorithm=hash_algorithm)
    prompt = list(range(10, 10 + 32))
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert first.token_ids == second.token_ids


def test_generated_tokens_are_found_by_the_next_turn(llm: LLM) -> None:
    prompt = list(range(10, 30))
    (answer,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    (following,) = llm.generate([*prompt, *answer.token_ids, 40, 41], GREEDY)
    assert following.num_cached_tokens == 32  # the last answer token was never computed


def test_another_salt_shares_nothing(llm: LLM) -> None:
    prompt = list(range(10, 60))
    llm.generate(prompt, GREEDY, cache_salt="a")
    assert llm.generate(prompt, GREEDY, cache_salt="b")[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY, cache_salt="a")[0].num_cached_tokens == 48


def test_with_the_cache_off_nothing_is_cached(model: Path) -> None:
    llm = LLM(model, num_blocks=64, prefix_cache="off")
    outputs = [llm.generate(list(range(10, 60)), GREEDY)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert llm.engine.stats().prefix_queries == 0


def test_metrics_are_in_order(llm: LLM) -> None:
    metrics = llm.generate("Hello", GREEDY)[0].metrics
    assert metrics.queue is not None
    assert metrics.time_to_first_token is not None
    assert metrics.total is not None
    assert 0 <= metrics.queue <= metrics.time_to_first_token <= metrics.total


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate("Tell me", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    stop = whole[0].text[7:9]
    end = whole[0].text.find(stop)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop)
    (output,) = llm.generate("Tell me", params)
    assert (output.text, output.finish_reason) == (whole[0].text[:end], "stop")
    assert output.stop_reason == stop


def test_a_stop_token_ends_the_output_and_is_not_in_the_text(llm: LLM) -> None:
    (whole,) = llm.generate("Tell me", GREEDY)
    token = whole.token_ids[3]
    at = whole.token_ids.index(token)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[token])
    (output,) = llm.generate("Tell me", params)
    assert output.token_ids == whole.token_ids[: at + 1]
    assert output.text == llm.engine.tokenizer.decode(whole.token_ids[:at])
    assert (output.finish_reason, output.stop_reason) == ("stop", token)


def test_min_tokens_puts_off_the_end(llm: LLM) -> None:
    (whole,) = llm.generate("Tell me", GREEDY)
    params = SamplingParams(
        temperature=0,
        max_tokens=8,
        ignore_eos=True,
        stop_token_ids=whole.token_ids[:1],
        min_tokens=4,
    )
    assert len(llm.generate("Tell me", params)[0].token_ids) >= 4


def test_without_max_tokens_the_context_ends_the_output(model: Path) -> None:
    llm = LLM(model, num_blocks=64, max_model_len=50)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate(list(range(10, 30)), params)
    assert (len(output.token_ids), output.finish_reason) == (30, "length")


def test_a_seed_repeats_in_any_company(llm: LLM) -> None:
    seeded = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
    (alone,) = llm.generate("Once", seeded)
    others = [SamplingParams(seed=i, max_tokens=12, ignore_eos=True) for i in range(6)]
    crowd = llm.generate(["Once"] * 6, others)
    assert crowd[5].token_ids == alone.token_ids
    assert len({tuple(output.token_ids) for output in crowd}) > 1


def test_logprobs_belong_to_the_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3)
    (output,) = llm.generate("Once", params)
    assert output.logprobs is not None
    assert [each.token_id for each in output.logprobs] == output.token_ids
    assert all(each.top[0] == (each.token_id, each.logprob) for each in output.logprobs)


def prompt_logprobs(llm: LLM, prompt: list[int]) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    return llm.generate(prompt, params)[0]


@pytest.mark.parametrize("budget", [7, 512])
def test_prompt_logprobs_are_those_of_generating_the_prompt(model: Path, budget: int) -> None:
    llm = LLM(model, num_blocks=64, token_budget=budget)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    prompt = list(range(10, 30))
    (generated,) = llm.generate(prompt, params)
    output = prompt_logprobs(llm, prompt + generated.token_ids)
    assert output.num_cached_tokens == 0  # it needs the logits of every token
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[20:] == generated.logprobs


def test_chat_uses_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    ids = llm.engine.tokenizer.apply_chat_template(messages)
    (chat,) = llm.chat(messages, GREEDY)
    assert chat.token_ids == llm.generate(ids, GREEDY)[0].token_ids
    several = llm.chat([messages, messages], GREEDY)
    assert [output.token_ids for output in several] == [chat.token_ids] * 2


BAD_REQUESTS: list[tuple[Callable[[LLM], Any], type[Exception], str]] = [
    (lambda llm: llm.generate(""), RequestError, "the prompt is empty"),
    (lambda llm: llm.generate([1, -1]), RequestError, "-1 at position 1"),
    (lambda llm: llm.generate([1, 10**6]), RequestError, "1000000 at position 1"),
    (lambda llm: llm.generate([[1.5]]), RequestError, "1.5 at position 0"),
    (lambda llm: llm.generate([5] * 2000), ContextLengthError, "2000 tokens"),
    (lambda llm: llm.generate(["a", "b"], [GREEDY]), RequestError, "1 params for 2 prompts"),
    (lambda llm: llm.generate("a", GREEDY, cache_salt=""), RequestError, "0 characters"),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD_REQUESTS)
def test_a_bad_request_is_refused_by_name_and_leaves_nothing(
    llm: LLM, call: Callable[[LLM], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(llm)
    assert free(llm) == 64
    assert len(llm.generate("still here", GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", 17),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("seed", 2**63),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_a_sampling_parameter_out_of_its_limits_is_named(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 5000}, "block_size is 5000"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"prefix_cache": "magic"}, "prefix_cache is 'magic'"),
        ({"blocks": 5}, "unknown option 'blocks'"),
        ({"num_blocks": 4, "kv_cache_memory": "1GiB"}, "give one of them"),
        ({"kv_cache_memory": "lots"}, "'lots'"),
        ({"kv_cache_memory": "10"}, "one block of 16 tokens takes"),
        ({"kv_cache_memory": "900TiB"}, "only"),
        ({"num_blocks": 1, "block_size": 1}, "a request needs 2 tokens or more"),
        ({"num_blocks": 4, "max_model_len": 65}, "max_model_len is 65, and the pool holds 64"),
        ({"max_model_len": 10**6}, "the model's context is"),
        ({"device": "tpu9"}, "device is 'tpu9'"),
    ],
)
def test_a_bad_option_is_refused_by_name(model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(model, **options)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM(tmp_path / "nowhere")


def test_a_failing_step_ends_its_requests_and_not_the_engine(
    llm: LLM, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(10, 60))

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "forward", fail)
        (output,) = llm.generate(prompt, GREEDY)
    assert output.finish_reason == "error"
    assert output.error is not None
    assert "out of luck" in output.error
    assert free(llm) == 64
    llm.engine.cache.check()
    (again,) = llm.generate(prompt, GREEDY)
    assert again.num_cached_tokens == 0  # what the failed step may have written is not found
    assert again.token_ids == LLM(model, num_blocks=64).generate(prompt, GREEDY)[0].token_ids


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], GREEDY)
    assert free(llm) == 64
    assert not llm.engine.has_work


def test_a_prompt_in_an_empty_pool_of_just_its_size_runs(model: Path) -> None:
    llm = LLM(model, num_blocks=2, block_size=16)
    (output,) = llm.generate([7] * 31, SamplingParams(max_tokens=None, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-310},
        {"temperature": 5e-324, "min_p": 1.0},
        {"top_p": 5e-324, "top_k": 2},
        {"top_p": 1.0 - 2**-53, "temperature": 2.0, "top_k": 10**9},
    ],
)
def test_extreme_sampling_parameters_still_choose_a_token(llm: LLM, params: dict[str, Any]) -> None:
    sampled = SamplingParams(max_tokens=5, ignore_eos=True, **params)
    outputs = llm.generate(["a", "b"], [sampled, GREEDY])
    assert [output.finish_reason for output in outputs] == ["length", "length"]


def test_a_request_that_may_choose_no_token_is_refused(llm: LLM) -> None:
    everything = list(range(llm.engine.vocab_size))
    params = SamplingParams(min_tokens=1, stop_token_ids=everything)
    with pytest.raises(RequestError, match="every token of the vocabulary"):
        llm.generate(["a", "b"], [GREEDY, params])
    assert not llm.engine.has_work


def test_a_token_that_cannot_be_chosen_ends_its_own_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise ArithmeticError("no number")

    (alone,) = llm.generate("b", GREEDY)
    first, second = llm.engine.add([5, 6], GREEDY), llm.engine.add([7, 8], GREEDY)
    monkeypatch.setattr(llm.engine._live[first].generation._samplers[0], "sample", fail)
    ends = {}
    while llm.engine.has_work:
        ends |= {piece.request_id: piece.finish_reason for piece in llm.engine.step()}
    assert ends == {first: "error", second: "length"}
    llm.engine.cache.check()
    assert llm.generate("b", GREEDY)[0].token_ids == alone.token_ids


def test_threads_may_share_a_model(llm: LLM) -> None:
    prompts = [[5 + i] * 40 for i in range(6)]
    expected = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(6) as threads:
        outputs = list(threads.map(lambda prompt: llm.generate(prompt, GREEDY)[0], prompts))
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("method", ["push", "flush"])
def test_text_that_cannot_be_made_ends_its_own_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object, **__: object) -> tuple[str, None]:
        raise UnicodeError("no text")

    first, second = llm.engine.add([5, 6], GREEDY), llm.engine.add([7, 8], GREEDY)
    monkeypatch.setattr(llm.engine._live[first].generation._texts[0], method, fail)
    ends = {}
    while llm.engine.has_work:
        ends |= {piece.request_id: piece.finish_reason for piece in llm.engine.step()}
    assert ends == {first: "error", second: "length"}
    assert free(llm) == 64
    llm.engine.cache.check()
