"""The server as its clients see it: answers, streams, cached tokens, metrics, hang-ups."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from live_server import BLOCK_SIZE, LiveServer, eventually, running
from prefixkv import SamplingParams, __version__
from tiny_model import write_tiny_model

TEXT = "The quick brown fox jumps over the lazy dog while the cat sleeps in the warm sun. "
LONG = 900  # tokens: an answer that is still running when its client has long gone


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with running(write_tiny_model(tmp_path_factory.mktemp("tiny"))) as live:
        yield live


_numbers = itertools.count()


@pytest.fixture
def text() -> str:
    """A prompt that no test has sent before, of several blocks."""
    return f"Story {next(_numbers)}. {TEXT * 3}"


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def shared_tokens(num_prompt_tokens: int) -> int:
    """What a second, equal prompt finds: full blocks, never the last token."""
    return (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


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
        prompt = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 100
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


class TestHangingUp:
    def test_in_mid_stream(self, server: LiveServer, text: str) -> None:
        before, made = server.idle_blocks, server.engine.stats().generation_tokens
        with server.http.stream(
            "POST",
            "/v1/completions",
            json={"prompt": text, "max_tokens": LONG, "ignore_eos": True, "stream": True},
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
        assert server.idle_blocks == before
        assert server.engine.stats().generation_tokens - made < LONG

    def test_while_waiting_for_a_whole_answer(self, server: LiveServer, text: str) -> None:
        self._hang_up_once_running(server, text, stream=False)

    def test_with_several_choices(self, server: LiveServer, text: str) -> None:
        self._hang_up_once_running(server, text, stream=False, n=3)

    def _hang_up_once_running(self, server: LiveServer, text: str, **fields: Any) -> None:
        before, made = server.idle_blocks, server.engine.stats().generation_tokens
        body = json.dumps({"prompt": text, "max_tokens": LONG, "ignore_eos": True, **fields})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        kind = "Content-Type: application/json\r\n\r\n"
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall((head + kind + body).encode())
            eventually(lambda: server.engine.stats().num_running > 0)
        assert server.idle_blocks == before
        assert server.engine.stats().generation_tokens - made < LONG


class TestMetrics:
    def test_tokens_are_counted(self, server: LiveServer, text: str) -> None:
        names = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
        server.complete(text)
        before = {name: server.metric(f"prefixkv:{name}_total") for name in names}
        usage = server.complete(text, max_tokens=5, ignore_eos=True)["usage"]
        after = {name: server.metric(f"prefixkv:{name}_total") for name in names}
        assert {name: after[name] - before[name] for name in names} == {
            "prompt_tokens": usage["prompt_tokens"],
            "generation_tokens": 5,
            "prefix_cache_queries": usage["prompt_tokens"],
            "prefix_cache_hits": shared_tokens(usage["prompt_tokens"]),
        }

    def test_latencies_are_observed(self, server: LiveServer, text: str) -> None:
        counts = {
            "time_to_first_token_seconds": 1,
            "inter_token_latency_seconds": 5,
            "e2e_request_latency_seconds": 1,
        }
        before = {name: server.metric(f"prefixkv:{name}_count") for name in counts}
        server.complete(text, max_tokens=6, ignore_eos=True)
        after = {name: server.metric(f"prefixkv:{name}_count") for name in counts}
        assert {name: after[name] - before[name] for name in counts} == counts

    @pytest.mark.parametrize(
        "name",
        [
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "prompt_tokens_total",
            "generation_tokens_total",
            "num_preemptions_total",
            "kv_cache_usage_perc",
            "num_requests_running",
            "num_requests_waiting",
            "time_to_first_token_seconds_count",
            "inter_token_latency_seconds_count",
            "e2e_request_latency_seconds_count",
        ],
    )
    def test_other_dashboards_find_their_names(self, server: LiveServer, name: str) -> None:
        assert server.metric(f"vllm:{name}") == server.metric(f"prefixkv:{name}")

    def test_usage_is_the_share_of_blocks_held(self, server: LiveServer) -> None:
        assert server.idle_blocks == server.metric("prefixkv:num_blocks")
        assert server.metric("prefixkv:kv_cache_usage_perc") == 0


class TestAround:
    def test_models(self, server: LiveServer) -> None:
        assert [model.id for model in server.openai.models.list()] == [server.model]

    def test_one_model(self, server: LiveServer) -> None:
        assert server.openai.models.retrieve(server.model).owned_by == "prefixkv"

    def test_no_model_named_is_the_served_one(self, server: LiveServer, text: str) -> None:
        assert server.complete(text, max_tokens=1)["model"] == server.model

    def test_version(self, server: LiveServer) -> None:
        assert server.http.get("/version").json() == {"version": __version__}

    def test_a_request_keeps_its_id(self, server: LiveServer) -> None:
        answer = server.http.get("/health", headers={"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"

    def test_a_request_without_id_gets_one(self, server: LiveServer) -> None:
        ids = {server.http.get("/health").headers["x-request-id"] for _ in range(2)}
        assert len(ids) == 2

    def test_an_id_that_is_no_token_is_replaced(self, server: LiveServer) -> None:
        answer = server.http.get("/health", headers={"X-Request-Id": "a b"})
        assert answer.headers["x-request-id"].startswith("req_")


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


def test_a_stopped_engine_is_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    with running(model) as live:
        assert live.http.get("/health").status_code == 200
        asyncio.run(live.engine.stop())
        assert live.http.get("/health").status_code == 503
        answer = live.post("/v1/completions", prompt="hello")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


def test_an_engine_that_stops_ends_a_stream_with_an_error(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    body = {"prompt": "hello", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with running(model) as live, live.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        asyncio.run(live.engine.stop())
        *_, error, done = (line.removeprefix("data: ") for line in lines if line)
    assert json.loads(error)["error"]["type"] == "server_error"
    assert done == "[DONE]"


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
