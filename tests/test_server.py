"""What clients get: answers, streams, cached tokens, log-probabilities."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from live_server import LONG, LiveServer, running, shared_tokens
from prefixkv import SamplingParams


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def chunks(server: LiveServer, path: str, **fields: Any) -> list[str]:
    """The data of the events of a stream, as they come."""
    answer = server.post(path, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]


class TestChat:
    def test_answer(self, server: LiveServer, text: str) -> None:
        answer = server.openai.chat.completions.create(
            model=server.model, messages=user(text), max_tokens=5, extra_body={"ignore_eos": True}
        )
        assert answer.id.startswith("chatcmpl-")
        assert answer.object == "chat.completion"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5

    def test_asked_twice_takes_all_full_blocks_below_the_last_token(
        self, server: LiveServer, text: str
    ) -> None:
        first, second = (
            server.openai.chat.completions.create(
                model=server.model, messages=user(text), max_tokens=4, temperature=0
            )
            for _ in range(2)
        )
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        expected = shared_tokens(second.usage.prompt_tokens)
        assert expected > 0
        assert second.usage.prompt_tokens_details.cached_tokens == expected
        assert second.choices[0].message.content == first.choices[0].message.content

    def test_stream_adds_up_to_the_answer(self, server: LiveServer, text: str) -> None:
        fields: dict[str, Any] = {"model": server.model, "messages": user(text), "max_tokens": 20}
        whole = server.openai.chat.completions.create(**fields, temperature=0)
        stream = server.openai.chat.completions.create(**fields, temperature=0, stream=True)
        pieces = [chunk.choices[0] for chunk in stream]
        assert pieces[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in pieces) == (
            whole.choices[0].message.content
        )
        assert pieces[-1].finish_reason == whole.choices[0].finish_reason
        assert all(piece.finish_reason is None for piece in pieces[:-1])

    def test_stream_ends_with_done(self, server: LiveServer, text: str) -> None:
        events = chunks(server, "/v1/chat/completions", messages=user(text), max_tokens=2)
        assert events[-1] == "[DONE]"

    def test_streamed_usage_comes_last_and_has_cached_tokens(
        self, server: LiveServer, text: str
    ) -> None:
        server.complete(text, max_tokens=1)
        events = chunks(
            server,
            "/v1/completions",
            prompt=text,
            max_tokens=3,
            ignore_eos=True,
            stream_options={"include_usage": True},
        )
        *pieces, last = (json.loads(event) for event in events[:-1])
        assert [piece["usage"] for piece in pieces] == [None] * len(pieces)
        assert last["choices"] == []
        usage = last["usage"]
        assert usage["completion_tokens"] == 3
        assert usage["prompt_tokens_details"]["cached_tokens"] == (
            shared_tokens(usage["prompt_tokens"])
        )

    def test_stream_without_usage_says_nothing_of_it(self, server: LiveServer, text: str) -> None:
        events = chunks(server, "/v1/completions", prompt=text, max_tokens=3)
        assert all("usage" not in json.loads(event) for event in events[:-1])

    def test_parts_of_text_are_lines(self, server: LiveServer, text: str) -> None:
        parts = [{"type": "text", "text": text}, {"type": "text", "text": "and more"}]
        split = server.post(
            "/v1/chat/completions",
            messages=user(parts),
            max_tokens=8,
            temperature=0,  # type: ignore[arg-type]
        ).json()
        joined = server.post(
            "/v1/chat/completions", messages=user(f"{text}\nand more"), max_tokens=8, temperature=0
        ).json()
        assert split["choices"] == joined["choices"]

    def test_max_completion_tokens_is_the_newer_name(self, server: LiveServer, text: str) -> None:
        answer = server.post(
            "/v1/chat/completions", messages=user(text), max_completion_tokens=3, ignore_eos=True
        ).json()
        assert answer["usage"]["completion_tokens"] == 3


class TestCompletions:
    def test_token_ids_and_text_are_the_same_prompt(self, server: LiveServer, text: str) -> None:
        ids = server.engine.tokenizer.encode(text)
        by_text = server.complete(text, temperature=0)
        by_ids = server.complete(ids, temperature=0)
        assert by_ids["choices"] == by_text["choices"]
        assert by_ids["usage"]["prompt_tokens"] == len(ids)

    def test_several_prompts_give_a_choice_each(self, server: LiveServer, text: str) -> None:
        prompts = [text, text[:40]]
        alone = [server.complete(prompt, temperature=0)["choices"][0]["text"] for prompt in prompts]
        together = server.complete(prompts, temperature=0)
        assert [choice["text"] for choice in together["choices"]] == alone
        assert [choice["index"] for choice in together["choices"]] == [0, 1]

    def test_several_prompts_of_token_ids(self, server: LiveServer) -> None:
        answer = server.complete([[5, 6, 7], [8, 9]], max_tokens=1)
        assert len(answer["choices"]) == 2
        assert answer["usage"]["prompt_tokens"] == 5

    def test_the_default_is_sixteen_tokens(self, server: LiveServer, text: str) -> None:
        answer = server.complete(text, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"

    def test_a_long_prompt_is_tokenised_all_the_same(self, server: LiveServer) -> None:
        prompt = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 200
        answer = server.post("/v1/completions", prompt=prompt, max_tokens=1).json()
        assert answer["error"]["code"] == "context_length_exceeded"
        assert str(len(server.engine.tokenizer.encode(prompt))) in answer["error"]["message"]


class TestChoosingTokens:
    def test_stop_ends_before_its_text(self, server: LiveServer, text: str) -> None:
        plain = server.complete(text, temperature=0, max_tokens=24, ignore_eos=True)
        whole = plain["choices"][0]["text"]
        stop = whole[len(whole) // 2 :][:3]
        answer = server.complete(text, temperature=0, max_tokens=24, ignore_eos=True, stop=stop)
        choice = answer["choices"][0]
        assert choice["text"] == whole[: whole.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)

    def test_stop_token_ids_end_the_answer(self, server: LiveServer, text: str) -> None:
        ids = _greedy_ids(server, text, 12)
        answer = server.complete(
            text, temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[ids[6]]
        )
        assert answer["choices"][0]["stop_reason"] == ids[6]
        assert answer["usage"]["completion_tokens"] == ids.index(ids[6]) + 1

    def test_min_tokens_come_before_any_stop(self, server: LiveServer, text: str) -> None:
        ids = _greedy_ids(server, text, 12)
        answer = server.complete(
            text, temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=ids, min_tokens=9
        )
        assert answer["usage"]["completion_tokens"] > 9

    def test_a_seed_repeats(self, server: LiveServer, text: str) -> None:
        first, second = (server.complete(text, seed=7)["choices"][0]["text"] for _ in range(2))
        assert first == second

    def test_another_seed_differs(self, server: LiveServer, text: str) -> None:
        texts = {server.complete(text, seed=seed)["choices"][0]["text"] for seed in range(4)}
        assert len(texts) > 1

    def test_choice_i_uses_seed_plus_i(self, server: LiveServer, text: str) -> None:
        together = server.complete(text, seed=40, n=3)
        alone = [server.complete(text, seed=40 + i)["choices"][0]["text"] for i in range(3)]
        assert [choice["text"] for choice in together["choices"]] == alone

    def test_seeds_go_round_at_the_largest(self, server: LiveServer, text: str) -> None:
        together = server.complete(text, seed=2**63 - 1, n=2)
        alone = server.complete(text, seed=-(2**63))
        assert together["choices"][1]["text"] == alone["choices"][0]["text"]

    def test_choices_share_one_usage(self, server: LiveServer, text: str) -> None:
        one = server.complete(text, max_tokens=4, ignore_eos=True)["usage"]
        three = server.complete(text, max_tokens=4, ignore_eos=True, n=3)["usage"]
        assert three["prompt_tokens"] == one["prompt_tokens"]
        assert three["completion_tokens"] == 12
        assert three["prompt_tokens_details"]["cached_tokens"] == (
            shared_tokens(one["prompt_tokens"])
        )

    def test_streamed_choices_keep_their_index(self, server: LiveServer, text: str) -> None:
        whole = server.complete(text, seed=3, n=2, max_tokens=6)["choices"]
        texts = ["", ""]
        for event in chunks(server, "/v1/completions", prompt=text, seed=3, n=2, max_tokens=6)[:-1]:
            choice = json.loads(event)["choices"][0]
            texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole]


class TestLogprobs:
    def test_of_chat(self, server: LiveServer, text: str) -> None:
        answer = server.openai.chat.completions.create(
            model=server.model,
            messages=user(text),
            max_tokens=4,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
            extra_body={"ignore_eos": True},
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 4
        for token in logprobs.content:
            assert len(token.top_logprobs) == 3
            assert (
                token.logprob
                == token.top_logprobs[0].logprob
                == max(top.logprob for top in token.top_logprobs)
            )

    def test_of_completions(self, server: LiveServer, text: str) -> None:
        answer = server.complete(
            text, max_tokens=4, temperature=0, logprobs=2, ignore_eos=True, stream=False
        )
        logprobs = answer["choices"][0]["logprobs"]
        assert {len(values) for values in logprobs.values()} == {4}
        for token, value, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top[token] == value == max(top.values())

    def test_offsets_of_a_stream_go_on(self, server: LiveServer, text: str) -> None:
        fields: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "logprobs": 0}
        whole = server.complete(text, **fields)["choices"][0]["logprobs"]["text_offset"]
        events = chunks(server, "/v1/completions", prompt=text, **fields)[:-1]
        streamed = [json.loads(event)["choices"][0]["logprobs"] for event in events]
        assert [at for part in streamed if part for at in part["text_offset"]] == whole

    def test_none_unless_asked(self, server: LiveServer, text: str) -> None:
        assert server.complete(text)["choices"][0]["logprobs"] is None


class TestSalts:
    def test_salts_do_not_share(self, server: LiveServer, text: str) -> None:
        server.complete(text, cache_salt="alice")
        assert _cached(server.complete(text, cache_salt="bob")) == 0

    def test_a_salt_and_none_do_not_share(self, server: LiveServer, text: str) -> None:
        server.complete(text)
        assert _cached(server.complete(text, cache_salt="alice")) == 0

    def test_equal_salts_share(self, server: LiveServer, text: str) -> None:
        server.complete(text, cache_salt="alice")
        assert _cached(server.complete(text, cache_salt="alice")) > 0


class TestManyAtOnce:
    def test_company_changes_no_answer(self, server: LiveServer, text: str) -> None:
        prompts = [f"{text} Question {i}?" for i in range(8)]
        alone = [server.complete(prompt, temperature=0)["choices"][0]["text"] for prompt in prompts]
        assert asyncio.run(_all_at_once(server, prompts)) == alone

    def test_the_loop_answers_while_the_engine_works(self, server: LiveServer, text: str) -> None:
        with server.http.stream(
            "POST",
            "/v1/completions",
            json={"prompt": text, "max_tokens": LONG, "ignore_eos": True, "stream": True},
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert server.http.get("/health").status_code == 200
            assert server.engine.stats().num_running == 1


@pytest.mark.model
def test_the_default_model_answers_sensibly() -> None:
    messages = user("What is the capital of France? Answer in one sentence.")
    with running(None) as live:
        fields: dict[str, Any] = {"model": live.model, "messages": messages, "temperature": 0}
        answer = live.openai.chat.completions.create(**fields, max_tokens=30)
        stream = live.openai.chat.completions.create(
            **fields, max_tokens=30, stream=True, stream_options={"include_usage": True}
        )
        *pieces, last = stream
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert "Paris" in text
    assert text == answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == (
        shared_tokens(last.usage.prompt_tokens)
    )


def _cached(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def _greedy_ids(server: LiveServer, text: str, count: int) -> list[int]:
    """The greedy tokens after a prompt, read off the engine's own answer to its token ids."""

    async def collect() -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        ids: list[int] = []
        async for piece in server.engine.generate(server.engine.tokenizer.encode(text), params):
            ids += piece.token_ids
        return ids

    return asyncio.run(collect())


async def _all_at_once(server: LiveServer, prompts: list[str]) -> list[str]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(model=server.model, prompt=prompt, temperature=0)
                for prompt in prompts
            )
        )
    return [answer.choices[0].text for answer in answers]
