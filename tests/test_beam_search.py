"""Beam search against ``transformers`` (5.24), on a tiny model in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from beams import check_equal, search_ours, search_theirs
from prefixkv import LLM, BeamSearchParams, RequestOutput, SamplingParams
from prefixkv.engine.admission import blocks_for_beams
from prefixkv.errors import RequestError
from tiny_model import random_tokens

PENALTIES = (-1.0, -0.5, 0.0, 0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def theirs(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture(scope="module")
def ours(model: Path) -> LLM:
    return LLM(model, num_blocks=256, dtype="float32")


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("width", [2, 3, 4, 6])
def test_hypotheses_and_scores_are_those_of_transformers(
    theirs: PreTrainedModel, ours: LLM, width: int, early_stopping: bool | str
) -> None:
    rng = random.Random(f"{width} {early_stopping}")
    ties = ended = 0
    for penalty in PENALTIES:
        for case in range(4):
            prompt = random_tokens(rng.choice([3, 16, 40]), ours.engine.vocab_size, case)
            params: dict[str, Any] = {
                "width": width,
                "early_stopping": early_stopping,
                "length_penalty": penalty,
                "max_tokens": rng.choice([5, 20, 32]),
                "min_tokens": rng.choice([0, 0, 3]),
            }
            end = likely_tokens(ours, prompt, rng)
            mine = search_ours(ours, prompt, end, params)
            reference = search_theirs(theirs, prompt, end, params)
            ended += sum(tokens[-1] in end for tokens in mine.token_ids)
            ties += check_equal(mine, reference, penalty)
    assert ended  # hypotheses that ended early were among them
    assert ties <= 1


def likely_tokens(llm: LLM, prompt: list[int], rng: random.Random) -> list[int]:
    """Tokens that end some of the hypotheses."""
    (probe,) = llm.generate(prompt, BeamSearchParams(width=6, max_tokens=12, ignore_eos=True))
    seen = sorted({token for sample in probe.samples for token in sample.token_ids})
    return sorted(rng.sample(seen, rng.choice([1, 2, 5])))


def test_one_beam_is_greedy(ours: LLM) -> None:
    prompt = random_tokens(20, ours.engine.vocab_size)
    (beam,) = ours.generate(prompt, BeamSearchParams(width=1, max_tokens=12, ignore_eos=True))
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    (plain,) = ours.generate(prompt, greedy)
    assert beam.token_ids == plain.token_ids
    assert plain.logprobs is not None
    mean = sum(each.logprob for each in plain.logprobs) / 12
    assert beam.samples[0].score == pytest.approx(mean, abs=1e-9)


def test_n_gives_the_best_of_the_hypotheses(ours: LLM) -> None:
    prompt = random_tokens(20, ours.engine.vocab_size)
    (every,) = ours.generate(prompt, BeamSearchParams(width=4, max_tokens=8, ignore_eos=True))
    (two,) = ours.generate(prompt, BeamSearchParams(width=4, n=2, max_tokens=8, ignore_eos=True))
    assert two.samples == every.samples[:2]


def test_logprobs_add_up_to_the_score(ours: LLM) -> None:
    prompt = random_tokens(20, ours.engine.vocab_size)
    params = BeamSearchParams(width=3, max_tokens=9, ignore_eos=True, logprobs=2, length_penalty=0)
    for sample in ours.generate(prompt, params)[0].samples:
        assert sample.logprobs is not None
        assert [each.token_id for each in sample.logprobs] == sample.token_ids
        assert all(len(each.top) == 2 for each in sample.logprobs)
        assert sum(each.logprob for each in sample.logprobs) == pytest.approx(sample.score)


def test_a_hypothesis_ends_with_its_end_token_which_is_not_in_its_text(ours: LLM) -> None:
    prompt = random_tokens(20, ours.engine.vocab_size)
    end = likely_tokens(ours, prompt, random.Random(1))
    params = BeamSearchParams(width=4, max_tokens=20, ignore_eos=True, stop_token_ids=end)
    ended = [s for s in ours.generate(prompt, params)[0].samples if s.finish_reason == "stop"]
    assert ended
    for sample in ended:
        assert sample.stop_reason == sample.token_ids[-1]
        assert sample.text == ours.engine.tokenizer.decode(sample.token_ids[:-1])


def test_beams_in_company_find_what_they_find_alone(model: Path, ours: LLM) -> None:
    prompts = [random_tokens(n, ours.engine.vocab_size, n) for n in (5, 18, 33)]
    params = [
        BeamSearchParams(width=3, max_tokens=12, ignore_eos=True),
        SamplingParams(n=3, seed=1, max_tokens=12, ignore_eos=True),
        BeamSearchParams(width=4, max_tokens=12, ignore_eos=True),
    ]
    alone = [ours.generate(p, each)[0].samples for p, each in zip(prompts, params, strict=True)]
    small = LLM(model, num_blocks=12, block_size=8, dtype="float32", token_budget=16)
    together = small.generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in together) > 0
    assert [output.samples for output in together] == alone
    assert small.engine.cache.num_free_blocks == 12


@pytest.mark.parametrize("prefix_cache", ["hash", "radix", "paged", "off"])
def test_a_search_leaves_no_block_behind(model: Path, prefix_cache: str) -> None:
    llm = LLM(model, num_blocks=32, block_size=4, prefix_cache=prefix_cache)
    params = BeamSearchParams(width=5, max_tokens=15, ignore_eos=True)
    for seed in range(3):
        llm.generate(random_tokens(22, llm.engine.vocab_size, seed), params)
        assert llm.engine.cache.num_free_blocks == 32
        llm.engine.cache.check()


def outcome(llm: LLM, prompt: list[int], **params: Any) -> RequestOutput | str:
    try:
        return llm.generate(prompt, BeamSearchParams(**params))[0]
    except RequestError as error:
        return f"{error.param}: {error}"


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"width": 0}, "width: width is 0; it must be a whole number, from 1 to 128"),
        ({"width": True}, "width: width is True; it must be a whole number, from 1 to 128"),
        ({"width": 2, "n": 3}, "n: n is 3; it must be a whole number, from 1 to 2"),
        (
            {"length_penalty": float("nan")},
            "length_penalty: length_penalty is nan; it must be a number from -16 to 16",
        ),
        (
            {"early_stopping": "always"},
            "early_stopping: early_stopping is 'always'; it must be true, false or 'never'",
        ),
        (
            {"width": 5},
            "width: the beam search has width 5, and 4 sequences run at once (max_num_seqs); use a "
            "smaller one",
        ),
        (
            {"width": 4, "max_tokens": 40},
            "width: the beam search has width 4: after 20 tokens of prompt the pool has room for "
            "28 in each beam, and 40 are asked for; lower width or max_tokens, or give the pool "
            "more blocks",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(
    model: Path, params: dict[str, Any], expected: str
) -> None:
    llm = LLM(model, num_blocks=11, max_num_seqs=4)
    assert outcome(llm, random_tokens(20, llm.engine.vocab_size), **params) == expected
    assert not llm.engine.has_work


def test_without_a_limit_the_beams_fill_the_pool(model: Path) -> None:
    llm = LLM(model, num_blocks=11)
    params = BeamSearchParams(width=3, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate(random_tokens(20, llm.engine.vocab_size), params)
    assert [len(sample.token_ids) for sample in output.samples] == [44] * 3  # 1 + 3 * 3 blocks
    assert llm.engine.cache.num_free_blocks == 11


def test_beams_are_not_aborted_one_by_one(ours: LLM) -> None:
    request_id = ours.engine.add([5, 6, 7], BeamSearchParams(width=3))
    ours.engine.step()
    with pytest.raises(RequestError, match="abort the request"):
        ours.engine.abort(request_id, sample=1)
    aborted = ours.engine.abort(request_id)
    assert aborted is not None
    assert (aborted.finish_reason, aborted.finished) == ("abort", True)
    assert ours.engine.cache.num_free_blocks == 256


@pytest.mark.parametrize("prefix_cache", ["hash", "radix", "paged", "off"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_search_needs_no_more_blocks_than_it_was_admitted_for(
    model: Path, prefix_cache: str, block_size: int
) -> None:
    most = blocks_for_beams(4, 21, 30, block_size)
    llm = LLM(model, num_blocks=most, block_size=block_size, prefix_cache=prefix_cache)
    params = BeamSearchParams(width=4, max_tokens=30, ignore_eos=True)
    for seed in range(3):
        (output,) = llm.generate(random_tokens(21, llm.engine.vocab_size, seed), params)
        assert len(output.samples) == 4
        assert output.metrics.num_preemptions == 0
    with pytest.raises(RequestError, match="the pool has room for"):
        llm.generate(
            random_tokens(21, llm.engine.vocab_size),
            BeamSearchParams(width=4, max_tokens=30 + block_size),
        )


def test_reservations_leave_a_running_search_its_room(model: Path) -> None:
    llm = LLM(model, num_blocks=20, max_model_len=64)
    engine = llm.engine
    prompt, *others = (random_tokens(48, engine.vocab_size, seed) for seed in range(4))
    params = BeamSearchParams(width=6, max_tokens=32, ignore_eos=True)
    search = RequestOutput(engine.add(prompt[:16], params))  # 1 + 6 * 2 blocks at most
    for other in others[:2]:  # 3 blocks each
        reservation = RequestOutput(engine.add(other, SamplingParams(), reserve=True))
        while not reservation.finished:
            for piece in engine.step():
                (search if piece.request_id == search.request_id else reservation).extend(piece)
        assert reservation.reservation is not None
    with pytest.raises(RequestError, match="leaves 12 of 20, and the longest request needs 13"):
        engine.add(others[2], SamplingParams(), reserve=True)
    while not search.finished:
        for piece in engine.step():
            search.extend(piece)
    assert engine.add(others[2], SamplingParams(), reserve=True)  # now there is room
