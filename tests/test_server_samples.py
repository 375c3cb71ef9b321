"""Several choices of one prompt over HTTP: samples, and the hypotheses of beam search."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from live_server import LONG, LiveServer, eventually, running, shared_tokens
from prefixkv import LLM, BeamSearchParams

PLAIN = "/v1/completions"


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


class TestSamples:
    def test_each_choice_of_a_chat_is_that_of_a_single_request(
        self, server: LiveServer, text: str
    ) -> None:
        create = server.openai.chat.completions.create
        fields: dict[str, Any] = {
            "model": server.model,
            "messages": user(text),
            "max_tokens": 12,
            "extra_body": {"ignore_eos": True},
        }
        together = create(**fields, n=4, seed=10)
        alone = [create(**fields, seed=10 + i).choices[0].message.content for i in range(4)]
        assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
        assert [choice.message.content for choice in together.choices] == alone
        assert {choice.finish_reason for choice in together.choices} == {"length"}

    def test_streamed_choices_add_up_to_the_whole_ones(self, server: LiveServer, text: str) -> None:
        create = server.openai.chat.completions.create
        fields: dict[str, Any] = {
            "model": server.model,
            "messages": user(text),
            "max_tokens": 12,
            "n": 3,
            "seed": 5,
        }
        whole = create(**fields)
        texts: dict[int, str] = defaultdict(str)
        ends: dict[int, list[str]] = defaultdict(list)
        for chunk in create(**fields, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] += [choice.finish_reason] if choice.finish_reason else []
        assert texts == {c.index: c.message.content for c in whole.choices}
        assert ends == {c.index: [c.finish_reason] for c in whole.choices}

    def test_the_prompt_is_computed_and_counted_once(self, server: LiveServer, text: str) -> None:
        names = ("prompt_tokens_total", "computed_tokens_total", "prefix_cache_queries_total")
        before = [server.metric(f"prefixkv:{name}") for name in names]
        usage = server.complete(text, n=4, max_tokens=3, temperature=2.0, ignore_eos=True)["usage"]
        prompt, computed, queries = (
            server.metric(f"prefixkv:{name}") - was for name, was in zip(names, before, strict=True)
        )
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 4 * 3)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert prompt < computed <= prompt + 4 * 2
        assert queries == prompt

    def test_a_second_time_the_prompt_is_cached_for_all(
        self, server: LiveServer, text: str
    ) -> None:
        for _ in range(2):
            usage = server.complete(text, n=4, max_tokens=3)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == shared_tokens(usage["prompt_tokens"])

    def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(
        self, server: LiveServer, text: str
    ) -> None:
        prompts = [text, text + " Then?"]
        together = server.complete(prompts, n=2, seed=3)["choices"]
        alone = [
            choice["text"]
            for prompt in prompts
            for choice in server.complete(prompt, n=2, seed=3)["choices"]
        ]
        assert [choice["index"] for choice in together] == [0, 1, 2, 3]
        assert [choice["text"] for choice in together] == alone

    def test_choices_end_each_at_its_own_time(self, server: LiveServer, text: str) -> None:
        fields: dict[str, Any] = {"n": 4, "seed": 1, "max_tokens": 30, "ignore_eos": True}
        whole = server.complete(text, **fields)["choices"]
        stop = whole[0]["text"][5:7]
        cut = server.complete(text, **fields, stop=stop)["choices"]
        for before, after in zip(whole, cut, strict=True):
            assert after["text"] == before["text"].partition(stop)[0]
            assert after["finish_reason"] == ("stop" if stop in before["text"] else "length")

    def test_each_choice_has_its_log_probabilities(self, server: LiveServer, text: str) -> None:
        choices = server.complete(text, n=3, seed=2, max_tokens=4, logprobs=2)["choices"]
        for choice in choices:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            assert choice["logprobs"]["text_offset"][0] == 0

    def test_a_client_that_hangs_up_frees_all_samples(self, server: LiveServer, text: str) -> None:
        body = {"prompt": text, "n": 4, "max_tokens": LONG, "ignore_eos": True, "stream": True}
        free = server.engine.stats().num_free_blocks
        with server.http.stream("POST", PLAIN, json=body) as answer:
            next(answer.iter_lines())
            assert server.engine.stats().num_free_blocks < free
        eventually(lambda: server.engine.stats().num_free_blocks == free)
        assert server.engine.stats().num_running == 0

    def test_one_first_token_is_timed_a_prompt_and_the_others_a_sample(
        self, server: LiveServer, text: str
    ) -> None:
        names = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
        before = [server.metric(f"prefixkv:{name}_seconds_count") for name in names]
        server.complete(text, n=3, max_tokens=5, ignore_eos=True)
        after = [server.metric(f"prefixkv:{name}_seconds_count") for name in names]
        assert [b - a for a, b in zip(before, after, strict=True)] == [1, 3 * 4, 1]


def test_samples_for_which_there_is_no_room_come_later(model: Path) -> None:
    with running(model, num_blocks=12, max_model_len=192) as live:
        fields: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0}
        together = live.complete("Tell me of the sea", n=6, seed=4, **fields)
        for index, choice in enumerate(together["choices"]):
            alone = live.complete("Tell me of the sea", seed=4 + index, **fields)["choices"][0]
            assert choice["text"] == alone["text"]
        assert live.engine.stats().num_free_blocks == 12


class TestBeamSearch:
    def search(self, server: LiveServer, prompt: str, **fields: Any) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = server.complete(prompt, use_beam_search=True, **fields)[
            "choices"
        ]
        return choices

    def test_hypotheses_are_those_of_the_python_api(
        self, server: LiveServer, model: Path, text: str
    ) -> None:
        fields: dict[str, Any] = {"length_penalty": 0.5, "early_stopping": "never"}
        choices = self.search(server, text, best_of=4, n=3, max_tokens=12, **fields)
        llm = LLM(model, num_blocks=64, dtype="float32")
        (output,) = llm.generate(text, BeamSearchParams(width=4, n=3, max_tokens=12, **fields))
        assert [choice["text"] for choice in choices] == [each.text for each in output.samples]
        assert [choice["score"] for choice in choices] == [each.score for each in output.samples]
        assert [choice["index"] for choice in choices] == [0, 1, 2]

    def test_the_openai_client_takes_it_as_extra_fields(
        self, server: LiveServer, text: str
    ) -> None:
        answer = server.openai.completions.create(
            model=server.model,
            prompt=text,
            n=2,
            best_of=4,
            max_tokens=6,
            extra_body={"use_beam_search": True, "length_penalty": 2.0},
        )
        expected = self.search(server, text, n=2, best_of=4, max_tokens=6, length_penalty=2.0)
        assert [choice.text for choice in answer.choices] == [each["text"] for each in expected]

    def test_without_best_of_n_is_the_width(self, server: LiveServer, text: str) -> None:
        wide = self.search(server, text, n=3, best_of=3, max_tokens=6)
        assert self.search(server, text, n=3, max_tokens=6) == wide

    def test_a_stream_gives_the_hypotheses_at_the_end(self, server: LiveServer, text: str) -> None:
        whole = self.search(server, text, n=3, max_tokens=6)
        stream = server.openai.completions.create(
            model=server.model,
            prompt=text,
            n=3,
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"use_beam_search": True},
        )
        *pieces, last = stream
        assert [piece.choices[0].text for piece in pieces] == [each["text"] for each in whole]
        assert last.usage is not None
        assert last.usage.completion_tokens <= 3 * 6

    def test_log_probabilities_add_up_to_the_score(self, server: LiveServer, text: str) -> None:
        (best, *_) = self.search(
            server, text, n=3, max_tokens=6, logprobs=1, length_penalty=0, ignore_eos=True
        )
        assert sum(best["logprobs"]["token_logprobs"]) == pytest.approx(best["score"])

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"temperature": 0.7}, "temperature"),
            ({"top_p": 0.9}, "top_p"),
            ({"top_k": 5}, "top_k"),
            ({"min_p": 0.1}, "min_p"),
            ({"stop": "x"}, "stop"),
            ({"n": 5, "best_of": 4}, "n"),
            ({"best_of": 129}, "best_of"),
            ({"best_of": 0}, "best_of"),
            ({"best_of": "4"}, "best_of"),
            ({"length_penalty": 17}, "length_penalty"),
            ({"length_penalty": "long"}, "length_penalty"),
            ({"early_stopping": "always"}, "early_stopping"),
            ({"early_stopping": 1}, "early_stopping"),
            ({"early_stopping": {"deep": [1] * 1000}}, "early_stopping"),
            ({"use_beam_search": "yes"}, "use_beam_search"),
            ({"use_beam_search": False, "length_penalty": 1.0}, "length_penalty"),
            ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
            ({"use_beam_search": False, "best_of": 4}, "best_of"),
            ({"best_of": 100, "max_tokens": 1500}, "best_of"),
            ({"n": 100, "max_tokens": 1500}, "n"),
        ],
    )
    def test_what_has_no_meaning_is_refused_by_name(
        self, server: LiveServer, text: str, fields: dict[str, Any], param: str
    ) -> None:
        body = {"prompt": text, "use_beam_search": True, **fields}
        answer = server.http.post(PLAIN, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert len(error["message"]) < 400

    def test_a_chat_has_no_beam_search(self, server: LiveServer, text: str) -> None:
        body = {"messages": user(text), "use_beam_search": True}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "use_beam_search"

    def test_a_client_that_hangs_up_ends_the_search(self, server: LiveServer, text: str) -> None:
        free = server.engine.stats().num_free_blocks
        body = {"prompt": text, "use_beam_search": True, "n": 2, "max_tokens": LONG}
        with pytest.raises(Exception, match="timed out"):
            server.http.post(PLAIN, json=body | {"ignore_eos": True}, timeout=0.2)
        eventually(lambda: server.engine.stats().num_free_blocks == free)
        assert server.engine.stats().num_running == 0
