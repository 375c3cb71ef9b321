"""What the server refuses, how it says so, and that it lives on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from live_server import MAX_MODEL_LEN, LiveServer
from prefixkv.server.errors import shown

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def unharmed(server: LiveServer) -> Iterator[None]:
    """After each test the server still answers and holds no block."""
    before = server.idle_blocks
    yield
    assert server.complete("still there?", max_tokens=1)["choices"]
    assert server.idle_blocks == before


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, whose shape is always the same."""
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return error


class TestFields:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("tools", [{"type": "function", "function": {"name": "f"}}]),
            ("tool_choice", "required"),
            ("functions", [{"name": "f"}]),
            ("function_call", {"name": "f"}),
            ("response_format", {"type": "json_object"}),
            ("logit_bias", {"5": 10}),
            ("presence_penalty", 0.5),
            ("frequency_penalty", -1),
            ("repetition_penalty", 1.1),
            ("audio", {"voice": "x", "format": "wav"}),
            ("modalities", ["text", "audio"]),
            ("reasoning_effort", "high"),
            ("verbosity", "low"),
            ("web_search_options", {}),
            ("echo", True),
            ("suffix", "the end"),
            ("best_of", 2),
        ],
    )
    def test_what_would_change_the_answer_is_refused_by_name(
        self, server: LiveServer, field: str, value: Any
    ) -> None:
        error = error_of(server.post(PLAIN, prompt="x", **{field: value}), 400)
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
        assert field in error["message"]

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("user", "me"),
            ("metadata", {"a": "b"}),
            ("store", True),
            ("service_tier", "auto"),
            ("parallel_tool_calls", False),
            ("prompt_cache_key", "k"),
            ("safety_identifier", "s"),
            ("tools", []),
            ("tool_choice", "none"),
            ("response_format", {"type": "text"}),
            ("logit_bias", {}),
            ("presence_penalty", 0),
            ("frequency_penalty", 0.0),
            ("repetition_penalty", 1.0),
            ("modalities", ["text"]),
            ("best_of", 1),
            ("temperature", None),
            ("stop", None),
            ("seed", None),
            ("stream_options", None),
            ("top_k", -1),
        ],
    )
    def test_what_changes_nothing_is_accepted(
        self, server: LiveServer, field: str, value: Any
    ) -> None:
        answer = server.post(
            CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=1, **{field: value}
        )
        assert answer.status_code == 200, answer.text

    @pytest.mark.parametrize("path", [CHAT, PLAIN])
    def test_an_unknown_field_is_named(self, server: LiveServer, path: str) -> None:
        prompt = (
            {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
        )
        error = error_of(server.post(path, **prompt, temprature=0.5), 400)
        assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")

    @pytest.mark.parametrize(
        ("field", "value", "limit"),
        [
            ("temperature", 2.5, "2"),
            ("temperature", "hot", "a number"),
            ("top_p", 0, "above 0"),
            ("top_p", 1.01, "1"),
            ("min_p", -0.1, "0"),
            ("top_k", -2, "0"),
            ("top_k", 1.5, "whole number"),
            ("max_tokens", 0, "1"),
            ("max_tokens", True, "whole number"),
            ("max_tokens", 2**31, str(2**31 - 1)),
            ("min_tokens", 17, "16"),
            ("n", 0, "1"),
            ("n", 129, "128"),
            ("seed", 2**63, str(2**63 - 1)),
            ("seed", 1.5, "whole number"),
            ("logprobs", 21, "20"),
            ("stop", [""], "a character"),
            ("stop", ["x"] * 17, "16"),
            ("stop_token_ids", [-1], "0"),
            ("stop_token_ids", [10**9], "token ids"),
            ("stream", "yes", "true or false"),
            ("cache_salt", "", "1"),
            ("cache_salt", "s" * 1025, "1024"),
            ("cache_salt", 5, "a string"),
            ("ignore_eos", 1, "true or false"),
            ("stream_options", {"include_usage": True}, "stream"),
        ],
    )
    def test_a_value_out_of_its_limits_is_told_with_the_limit(
        self, server: LiveServer, field: str, value: Any, limit: str
    ) -> None:
        error = error_of(server.post(PLAIN, prompt="x", **{field: value}), 400)
        assert error["param"].partition("[")[0] == field
        assert field in error["message"]
        assert limit in error["message"]

    def test_two_names_of_one_limit_must_agree(self, server: LiveServer) -> None:
        messages = [{"role": "user", "content": "x"}]
        answer = server.post(CHAT, messages=messages, max_tokens=3, max_completion_tokens=4)
        assert "max_completion_tokens is 4" in error_of(answer, 400)["message"]

    def test_top_logprobs_need_logprobs(self, server: LiveServer) -> None:
        messages = [{"role": "user", "content": "x"}]
        answer = server.post(CHAT, messages=messages, top_logprobs=3)
        assert error_of(answer, 400)["param"] == "top_logprobs"


class TestPrompts:
    @pytest.mark.parametrize("prompt", [[], "", [[]], {"text": "x"}, 5, ["x", 5], [1, "x"], [1.5]])
    def test_what_is_no_prompt(self, server: LiveServer, prompt: Any) -> None:
        assert error_of(server.post(PLAIN, prompt=prompt), 400)["param"] == "prompt"

    @pytest.mark.parametrize("token", [-1, 10**9, 2**70, True])
    def test_what_is_no_token_id(self, server: LiveServer, token: Any) -> None:
        assert error_of(server.post(PLAIN, prompt=[1, token]), 400)["param"] == "prompt"

    def test_a_missing_prompt(self, server: LiveServer) -> None:
        assert error_of(server.post(PLAIN), 400)["message"] == "prompt is missing; it is required"

    def test_a_prompt_longer_than_the_context(self, server: LiveServer) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            server.openai.completions.create(model=server.model, prompt=[5] * (MAX_MODEL_LEN + 1))
        assert caught.value.code == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in caught.value.message

    def test_a_prompt_longer_than_the_context_is_no_stream(self, server: LiveServer) -> None:
        answer = server.post(PLAIN, prompt=[5] * (MAX_MODEL_LEN + 1), stream=True)
        assert error_of(answer, 400)["code"] == "context_length_exceeded"

    def test_a_text_that_no_tokens_could_make_fit(self, server: LiveServer) -> None:
        text = "x" * 500_000
        for answer in (
            server.post(PLAIN, prompt=text),
            server.post(CHAT, messages=[{"role": "user", "content": text}]),
        ):
            assert "characters" in error_of(answer, 400)["message"]

    def test_one_bad_prompt_of_several_fails_them_all(self, server: LiveServer) -> None:
        answer = server.post(PLAIN, prompt=[[5, 6], [10**9]], max_tokens=500, ignore_eos=True)
        assert error_of(answer, 400)["param"] == "prompt"

    def test_too_many_prompts(self, server: LiveServer) -> None:
        assert "1024" in error_of(server.post(PLAIN, prompt=["x"] * 1025), 400)["message"]

    def test_too_many_choices(self, server: LiveServer) -> None:
        answer = server.post(PLAIN, prompt=["x"] * 600, n=2)
        assert "1200 choices" in error_of(answer, 400)["message"]


class TestMessages:
    @pytest.mark.parametrize(
        ("message", "where"),
        [
            ({"role": "robot", "content": "x"}, "messages[0].role"),
            ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
            ({"content": "x"}, "messages[0].role"),
            ({"role": ["user"], "content": "x"}, "messages[0].role"),
            ({"role": "user"}, "messages[0].content"),
            ({"role": "user", "content": None}, "messages[0].content"),
            ({"role": "user", "content": 5}, "messages[0].content"),
            ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
            ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
            (
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                "messages[0].content[0].type",
            ),
            ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
            ({"role": "user", "content": "x", "colour": "red"}, "messages[0].colour"),
            ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
            ("hello", "messages[0]"),
        ],
    )
    def test_what_is_no_message(self, server: LiveServer, message: Any, where: str) -> None:
        error = error_of(server.post(CHAT, messages=[message]), 400)
        assert error["param"] == where
        assert where in error["message"]

    @pytest.mark.parametrize("messages", [[], "hello", None])
    def test_what_is_no_conversation(self, server: LiveServer, messages: Any) -> None:
        assert error_of(server.post(CHAT, messages=messages), 400)["param"] == "messages"

    def test_an_answer_can_be_sent_back_as_it_came(self, server: LiveServer) -> None:
        question: Any = {"role": "user", "content": "x"}
        ask = server.openai.chat.completions.create
        answer = ask(model=server.model, messages=[question], max_tokens=3).choices[0].message
        history: Any = [question, answer.model_dump(), question]
        assert ask(model=server.model, messages=history, max_tokens=1).choices

    def test_developer_is_the_newer_name_of_system(self, server: LiveServer) -> None:
        answers = [
            server.post(
                CHAT,
                messages=[{"role": role, "content": "Be brief."}, {"role": "user", "content": "x"}],
                max_tokens=8,
                temperature=0,
            ).json()["choices"]
            for role in ("system", "developer")
        ]
        assert answers[0] == answers[1]


class TestBodies:
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b'{"prompt": "x",}',
            b'{"prompt": "\xff"}',
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "x", "temperature": NaN}',
            b"[" * 100_000,
        ],
    )
    def test_broken_json(self, server: LiveServer, body: bytes) -> None:
        error = error_of(server.http.post(PLAIN, content=body, headers=JSON), 400)
        assert error["code"] == "invalid_json"

    @pytest.mark.parametrize("body", [[1, 2], "x", 5, None])
    def test_json_that_is_no_object(self, server: LiveServer, body: Any) -> None:
        answer = server.http.post(PLAIN, content=json.dumps(body), headers=JSON)
        assert "JSON object" in error_of(answer, 400)["message"]

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
    def test_another_content_type(self, server: LiveServer, kind: str) -> None:
        answer = server.http.post(
            PLAIN, content=b'{"prompt": "x"}', headers={"Content-Type": kind} if kind else {}
        )
        assert "application/json" in error_of(answer, 415)["message"]

    def test_a_body_above_the_limit(self, server: LiveServer) -> None:
        body = json.dumps({"prompt": "x" * 2**20})
        error = error_of(server.http.post(PLAIN, content=body, headers=JSON), 413)
        assert str(2**20) in error["message"]

    def test_a_body_above_the_limit_that_does_not_say_so(self, server: LiveServer) -> None:
        parts = (b" " * 2**16 for _ in range(20))
        answer = server.http.post(PLAIN, content=parts, headers=JSON)
        assert error_of(answer, 413)["code"] == "request_too_large"


class TestBounds:
    """What is larger than any request needs is refused before it is walked."""

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (dict.fromkeys(map(str, range(128)), 1), "the body has 129 fields; at most 128"),
            (
                {"stream_options": dict.fromkeys(map(str, range(129)), 1)},
                "stream_options has 129 items; at most 128",
            ),
            ({"stop": ["x"] * 17}, "stop has 17 items; at most 16"),
            ({"stop_token_ids": [1] * 4097}, "stop_token_ids has 4097 items; at most 4096"),
            ({"model": "x" * 1025}, "a string of 1024 characters or less"),
            ({"prompt": ["x"] * 1025}, "prompt holds 1025 prompts; at most 1024"),
            ({"prompt": [5] * MAX_MODEL_LEN}, f"at most {MAX_MODEL_LEN} fit here"),
            ({"prompt": [[5], [5] * MAX_MODEL_LEN]}, f"at most {MAX_MODEL_LEN} fit here"),
        ],
    )
    def test_of_a_completion(self, server: LiveServer, body: dict[str, Any], message: str) -> None:
        assert message in error_of(server.post(PLAIN, **({"prompt": "x"} | body)), 400)["message"]

    def test_of_a_conversation(self, server: LiveServer) -> None:
        messages = [{"role": "user", "content": "x"}] * 4097
        error = error_of(server.post(CHAT, messages=messages), 400)
        assert error["message"] == "messages has 4097 items; at most 4096 are allowed"

    @pytest.mark.parametrize(
        "body",
        [
            {"x" * 10_000: 1},
            {"messages": [{"role": "user", "content": "x", "x" * 10_000: 1}]},
            {"messages": [{"role": "x" * 10_000, "content": "x"}]},
            {"model": "x" * 10_000},
        ],
    )
    def test_an_error_is_short_whatever_it_names(
        self, server: LiveServer, body: dict[str, Any]
    ) -> None:
        messages = {"messages": [{"role": "user", "content": "x"}]}
        answer = server.post(CHAT, **(messages | body))
        error_of(answer, 400)
        assert len(answer.content) < 500

    def test_a_long_value_is_not_walked_to_show_its_start(self) -> None:
        class Endless(list[int]):
            def __iter__(self) -> Iterator[int]:
                while True:
                    yield 1

        assert shown(Endless([1])).startswith("[1, 1, ")


class TestPaths:
    def test_unknown_model(self, server: LiveServer) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            server.openai.completions.create(model="gpt-none", prompt="x")
        assert caught.value.code == "model_not_found"
        assert server.model in caught.value.message

    def test_unknown_model_asked_about(self, server: LiveServer) -> None:
        error = error_of(server.http.get("/v1/models/some/other"), 404)
        assert error["code"] == "model_not_found"

    @pytest.mark.parametrize("path", ["/", "/v1/nothing", "/v1/completions/"])
    def test_nothing_there(self, server: LiveServer, path: str) -> None:
        assert path in error_of(server.http.get(path), 404)["message"]

    def test_wrong_method(self, server: LiveServer) -> None:
        answer = server.http.get(PLAIN)
        error_of(answer, 405)
        assert answer.headers["allow"] == "POST"
