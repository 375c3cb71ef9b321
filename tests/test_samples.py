"""Parallel sampling through the Python API: one prefill, samples that go their own ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from prefixkv import LLM, RequestOutput, SampleOutput, SamplingParams
from prefixkv.engine.step import Step
from prefixkv.errors import RequestError
from tiny_model import random_tokens

SYSTEMS = ("hash", "radix", "paged", "off")
BLOCK_SIZE = 16


def params(n: int, *, max_tokens: int = 20, seed: int = 7, **more: Any) -> SamplingParams:
    return SamplingParams(n=n, seed=seed, max_tokens=max_tokens, ignore_eos=True, **more)


def singly(llm: LLM, prompt: list[int], asked: SamplingParams) -> list[SampleOutput]:
    """Each sample by a request of its own."""
    outputs = []
    for index in range(asked.n):
        values = {name: getattr(asked, name) for name in asked.__dataclass_fields__}
        values |= {"n": 1, "seed": asked.seed_of(index)}
        (output,) = llm.generate(prompt, SamplingParams(**values))
        (sample,) = output.samples
        sample.index = index
        outputs.append(sample)
    return outputs


def held(llm: LLM) -> int:
    return llm.engine.cache.num_blocks - llm.engine.cache.num_free_blocks


def run(llm: LLM, request_id: str, after_step: Callable[[], None] = lambda: None) -> RequestOutput:
    output = RequestOutput(request_id)
    while not output.finished:
        for piece in llm.engine.step():
            if piece.request_id == request_id:
                output.extend(piece)
        llm.engine.cache.check()
        after_step()
    return output


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_sample_is_what_a_single_request_with_its_seed_gives(model: Path, system: str) -> None:
    llm = LLM(model, num_blocks=64, prefix_cache=system)
    prompt = random_tokens(50, llm.engine.vocab_size)
    asked = params(4, logprobs=2, top_p=0.95)
    (output,) = llm.generate(prompt, asked)
    assert output.samples == singly(llm, prompt, asked)
    assert len({tuple(sample.token_ids) for sample in output.samples}) == 4
    assert (output.text, output.token_ids) == (output.samples[0].text, output.samples[0].token_ids)


@pytest.mark.parametrize("system", SYSTEMS)
def test_four_samples_of_1000_tokens_hold_the_prompts_blocks_once(model: Path, system: str) -> None:
    llm = LLM(model, num_blocks=100, prefix_cache=system, token_budget=1000)
    prompt = random_tokens(1000, llm.engine.vocab_size)
    request_id = llm.engine.add(prompt, params(4, seed=3, temperature=2.0))
    (first,) = llm.engine.step()
    assert held(llm) == 63  # 62 full ones and half of another, for all four
    assert len({sample.token_ids[0] for sample in first.samples}) == 4
    llm.engine.step()
    assert held(llm) == 62 + 4  # the partial one was copied for three of them, at their first write
    assert llm.engine.stats().computed_tokens == 1000 + 4
    run(llm, request_id)
    assert llm.engine.stats().computed_tokens == 1000 + 4 * 19
    assert held(llm) == 0


def test_samples_that_agree_are_computed_once(model: Path) -> None:
    llm = LLM(model, num_blocks=64)
    prompt = random_tokens(50, llm.engine.vocab_size)
    (output,) = llm.generate(prompt, params(3, temperature=0))
    assert len({tuple(sample.token_ids) for sample in output.samples}) == 1
    assert llm.engine.stats().computed_tokens == 50 + 19
    assert llm.engine.stats().generation_tokens == 3 * 20


def test_samples_part_where_they_differ(model: Path) -> None:
    llm = LLM(model, num_blocks=64)
    prompt = random_tokens(50, llm.engine.vocab_size)
    asked = params(6, temperature=0.3)
    (output,) = llm.generate(prompt, asked)
    assert output.samples == singly(llm, prompt, asked)
    prefixes = {
        tuple(sample.token_ids[:length]) for sample in output.samples for length in range(1, 20)
    }
    (again,) = LLM(model, num_blocks=64).generate(prompt, asked)
    assert again.samples == output.samples
    fresh = LLM(model, num_blocks=64)
    fresh.generate(prompt, asked)
    assert fresh.engine.stats().computed_tokens == 50 + len(prefixes)


@pytest.mark.parametrize("system", SYSTEMS)
def test_aborting_one_of_four_frees_only_its_own(model: Path, system: str) -> None:
    llm = LLM(model, num_blocks=64, prefix_cache=system)
    prompt = random_tokens(40, llm.engine.vocab_size)
    expected = singly(llm, prompt, params(4))
    request_id = llm.engine.add(prompt, params(4))
    output = RequestOutput(request_id)
    for _ in range(10):  # 40 + 9 tokens: two shared blocks, and two more for each sample
        for piece in llm.engine.step():
            output.extend(piece)
    assert held(llm) == 2 + 4 * 2
    aborted = llm.engine.abort(request_id, sample=2)
    assert aborted is not None
    assert (aborted.samples, aborted.finished) == (
        [SampleOutput(2, finish_reason="abort")],
        False,
    )
    assert held(llm) == 2 + 3 * 2
    assert llm.engine.abort(request_id, sample=2) is None
    output.extend(aborted)
    output.extend(run(llm, request_id))
    assert [sample.finish_reason for sample in output.samples] == [
        "length",
        "length",
        "abort",
        "length",
    ]
    for index in (0, 1, 3):
        assert output.samples[index].token_ids == expected[index].token_ids
    assert output.samples[2].token_ids == expected[2].token_ids[:10]
    assert held(llm) == 0


def test_aborting_the_last_sample_ends_the_request(model: Path) -> None:
    llm = LLM(model, num_blocks=64)
    request_id = llm.engine.add([5, 6, 7], params(2))
    llm.engine.step()
    ends = [llm.engine.abort(request_id, sample=index) for index in (1, 0)]
    assert [end is not None and end.finished for end in ends] == [False, True]
    assert not llm.engine.has_work
    assert held(llm) == 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_preemption_takes_all_samples_and_brings_all_back(
    model: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    """The prompt of the one that comes back is computed, or found, once for all its samples."""
    llm = LLM(model, num_blocks=16, block_size=8, prefix_cache=system)
    old, young = (random_tokens(30, llm.engine.vocab_size, seed) for seed in (1, 2))
    asked = params(3, max_tokens=24)
    expected = [singly(llm, prompt, asked) for prompt in (old, young)]
    assert llm.engine.cache.reset()
    outputs = {name: RequestOutput(name) for name in ("old", "young")}
    for name, prompt in zip(outputs, (old, young), strict=True):
        llm.engine.add(prompt, asked, request_id=name)
    prompt_tokens = 0  # of the young one, how often each was computed
    run_step = llm.engine.runner.run

    def count(step: Step) -> Tensor:
        nonlocal prompt_tokens
        works = [work for work in step.work if work.request.request_id == "young"]
        prompt_tokens += sum(max(0, min(work.stop, 30) - work.start) for work in works)
        assert sum(len(work.branch.sequences) for work in works) in (0, 3)  # all or none
        return run_step(step)

    monkeypatch.setattr(llm.engine.runner, "run", count)
    while llm.engine.has_work:
        for piece in llm.engine.step():
            outputs[piece.request_id].extend(piece)
        llm.engine.cache.check()
    assert [output.samples for output in outputs.values()] == expected
    assert outputs["old"].metrics.num_preemptions == 0
    preemptions = outputs["young"].metrics.num_preemptions
    assert preemptions > 0
    if system in ("paged", "off"):
        assert prompt_tokens == 30 * (1 + preemptions)
    elif system == "hash":  # which evicts the ends of sequences first
        assert prompt_tokens < 30 * (1 + preemptions)
    else:
        assert prompt_tokens <= 30 * (1 + preemptions)
    assert held(llm) == 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_samples_for_which_there_is_no_room_come_after_the_others(model: Path, system: str) -> None:
    llm = LLM(model, num_blocks=8, block_size=8, prefix_cache=system)
    prompt = random_tokens(20, llm.engine.vocab_size)
    asked = params(5, max_tokens=30)  # 7 blocks each, 2 of them shared
    (output,) = llm.generate(prompt, asked)
    assert output.samples == singly(llm, prompt, asked)
    assert held(llm) == 0


def test_more_samples_than_may_run_at_once_come_in_turns(model: Path) -> None:
    llm = LLM(model, num_blocks=64, max_num_seqs=2)
    prompt = random_tokens(20, llm.engine.vocab_size)
    request_id = llm.engine.add(prompt, params(5))
    most = []
    output = run(
        llm,
        request_id,
        lambda: most.extend(r.num_seqs for r in llm.engine.scheduler.running),
    )
    assert max(most) == 2
    assert output.samples == singly(llm, prompt, params(5))


def test_streamed_pieces_have_the_samples_that_got_a_token(model: Path) -> None:
    llm = LLM(model, num_blocks=64)
    whole = llm.generate("Once upon", params(3, max_tokens=6))[0]
    output = RequestOutput(
        llm.engine.add(llm.engine.tokenizer.encode("Once upon"), params(3, max_tokens=6))
    )
    while not output.finished:
        (piece,) = llm.engine.step()
        assert [sample.index for sample in piece.samples] == [0, 1, 2]
        assert all(len(sample.token_ids) == 1 for sample in piece.samples)
        output.extend(piece)
    assert output.samples == whole.samples


def test_samples_end_each_at_its_own_time(model: Path) -> None:
    llm = LLM(model, num_blocks=64)
    prompt = random_tokens(20, llm.engine.vocab_size)
    (whole,) = llm.generate(prompt, params(4))
    stop = [sample.token_ids[at] for at, sample in enumerate(whole.samples[:3], 3)]
    asked = params(4, stop_token_ids=stop)
    (output,) = llm.generate(prompt, asked)
    assert output.samples == singly(llm, prompt, asked)
    assert len({len(sample.token_ids) for sample in output.samples}) > 1
    assert output.finished


def test_prompt_logprobs_are_given_once_for_all_samples(model: Path) -> None:
    llm = LLM(model, num_blocks=64)
    prompt = random_tokens(20, llm.engine.vocab_size)
    (one,) = llm.generate(prompt, params(1, prompt_logprobs=1))
    (four,) = llm.generate(prompt, params(4, prompt_logprobs=1))
    assert four.prompt_logprobs == one.prompt_logprobs


def test_without_a_seed_samples_differ(model: Path) -> None:
    llm = LLM(model, num_blocks=64)
    (output,) = llm.generate("Hello", SamplingParams(n=4, max_tokens=12, ignore_eos=True))
    assert len({tuple(sample.token_ids) for sample in output.samples}) == 4


def test_seeds_go_round_at_the_end_of_the_numbers(model: Path) -> None:
    llm = LLM(model, num_blocks=64)
    (output,) = llm.generate("Hello", params(2, seed=2**63 - 1))
    (second,) = llm.generate("Hello", params(1, seed=-(2**63)))
    assert output.samples[1].token_ids == second.token_ids


@pytest.mark.parametrize("n", [0, -1, 1025, True, 2.0, "2", None])
def test_a_number_of_samples_that_is_none_is_refused(n: Any) -> None:
    with pytest.raises(RequestError, match=r"^n is .*; it must be a whole number, from 1 to 1024"):
        SamplingParams(n=n)
