"""Prompts that are computed once and stay: from Python, over HTTP, from files at the start."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from openai import APIStatusError, OpenAI
from torch import Tensor

from live_server import BLOCK_SIZE, DEADLINE, LiveServer, eventually, running
from prefixkv import LLM, Reservation, SamplingParams
from prefixkv.engine.step import Step
from prefixkv.errors import ConfigError, ContextLengthError, EngineError, RequestError
from prefixkv.server.reservations import admin_key, read_files, reserve_file
from prefixkv.server.serving import Serving
from prefixkv.server.settings import ServerOptions

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DOCUMENT = list(range(10, 110))
KEY = "k" * 32
HELD = {"hash": 96, "radix": 96, "paged": 100}  # of the document, in blocks of 16
SYSTEM = [{"role": "system", "content": "You answer briefly, and in verse if you can. " * 3}]


def small(model: Path, **options: Any) -> LLM:
    return LLM(model, **({"num_blocks": 64, "max_model_len": 256} | options))


def cached(llm: LLM, prompt: list[int], cache_salt: str | None = None) -> int:
    return llm.generate(prompt, GREEDY, cache_salt=cache_salt)[0].num_cached_tokens


def flood(llm: LLM) -> None:
    """Other prompts, until each block that may be evicted was."""
    for start in range(12):
        llm.generate([(start * 17 + i * i) % 250 for i in range(200)], GREEDY)


# ------------------------------------------------------------------------------------ from Python


@pytest.mark.parametrize("system", HELD)
class TestPython:
    def test_what_is_reserved_outlasts_all_else(self, model: Path, system: str) -> None:
        llm = small(model, prefix_cache=system)
        reservation = llm.reserve(DOCUMENT)
        assert reservation == Reservation(reservation.id, HELD[system], 100, 100)
        flood(llm)
        assert cached(llm, [*DOCUMENT, 1, 2, 3]) == HELD[system]

    def test_an_answer_is_the_same_with_and_without(self, model: Path, system: str) -> None:
        prompt = [*DOCUMENT, 1, 2, 3]
        expected = small(model, prefix_cache="off").generate(prompt, GREEDY)[0].token_ids
        llm = small(model, prefix_cache=system)
        llm.reserve(DOCUMENT)
        (output,) = llm.generate(prompt, GREEDY)
        assert (output.token_ids, output.num_cached_tokens) == (expected, HELD[system])

    def test_released_it_is_evicted_like_all_else(self, model: Path, system: str) -> None:
        llm = small(model, prefix_cache=system)
        reservation = llm.reserve(DOCUMENT)
        assert llm.engine.cache.num_free_blocks < 64
        llm.release(reservation)
        assert llm.reservations == []
        assert llm.engine.cache.num_free_blocks == 64
        flood(llm)
        assert cached(llm, [*DOCUMENT, 1, 2, 3]) == 0

    def test_the_same_again_computes_only_the_end(self, model: Path, system: str) -> None:
        llm = small(model, prefix_cache=system)
        first, second = llm.reserve(DOCUMENT), llm.reserve(DOCUMENT)
        assert second.num_computed_tokens == 100 - min(HELD[system], 99)
        assert llm.reservations == [first, second]
        llm.release(first.id)
        assert cached(llm, [*DOCUMENT, 1, 2, 3]) == HELD[system]

    def test_another_salt_does_not_find_it(self, model: Path, system: str) -> None:
        llm = small(model, prefix_cache=system)
        llm.reserve(DOCUMENT, cache_salt="a")
        prompt = [*DOCUMENT, 1, 2, 3]
        assert [cached(llm, prompt, salt) for salt in ("b", None, "a")] == [0, 0, HELD[system]]

    def test_a_chat_finds_its_beginning(self, model: Path, system: str) -> None:
        llm = small(model, prefix_cache=system, max_model_len=512)
        reservation = llm.reserve_chat(SYSTEM)
        for question in ("Why?", "How?"):
            chat = [*SYSTEM, {"role": "user", "content": question}]
            (output,) = llm.chat(chat, GREEDY)
            assert output.num_cached_tokens == reservation.num_tokens > 100

    def test_a_chat_finds_its_first_turn(self, model: Path, system: str) -> None:
        llm = small(model, prefix_cache=system, max_model_len=512)
        chat = [*SYSTEM, {"role": "user", "content": "Why?"}]
        reservation = llm.reserve_chat(chat)
        chat += [{"role": "assistant", "content": "Who knows."}, {"role": "user", "content": "I."}]
        assert llm.chat(chat, GREEDY)[0].num_cached_tokens == reservation.num_tokens

    def test_the_longest_request_always_fits_beside(self, model: Path, system: str) -> None:
        llm = small(model, prefix_cache=system, num_blocks=16 + 6 + 1)  # 256 tokens, and a document
        llm.reserve(DOCUMENT)
        assert llm.generate([5] * 248, GREEDY)[0].num_prompt_tokens == 248
        with pytest.raises(RequestError, match="longest request needs 16") as refused:
            llm.reserve(DOCUMENT[::-1])
        assert refused.value.code == "no_room_for_reservation"
        assert len(llm.reservations) == 1
        llm.engine.cache.check()

    def test_too_long_and_empty_ones_are_refused(self, model: Path, system: str) -> None:
        llm = small(model, prefix_cache=system)
        with pytest.raises(ContextLengthError):
            llm.reserve([5] * 256)
        with pytest.raises(RequestError, match="empty"):
            llm.reserve("")
        assert llm.engine.cache.num_free_blocks == 64


def test_in_radix_what_is_held_already_needs_no_more_room(model: Path) -> None:
    llm = small(model, prefix_cache="radix", num_blocks=16 + 6)  # 256 tokens, and six full blocks
    reservations = [llm.reserve(DOCUMENT[:96]) for _ in range(2)]
    assert [reservation.num_tokens for reservation in reservations] == [96, 96]


@pytest.mark.parametrize("system", ["hash", "radix"])
def test_less_than_a_block_is_refused_where_only_blocks_are_found(model: Path, system: str) -> None:
    with pytest.raises(RequestError, match="15 tokens, less than a block of 16"):
        small(model, prefix_cache=system).reserve(DOCUMENT[:15])


def test_one_token_is_enough_in_paged(model: Path) -> None:
    llm = small(model, prefix_cache="paged")
    assert llm.reserve([7]).num_tokens == 1
    assert cached(llm, [7, 8]) == 1


def test_with_the_cache_off_nothing_can_be_reserved(model: Path) -> None:
    with pytest.raises(RequestError, match="prefix cache is off"):
        small(model, prefix_cache="off").reserve(DOCUMENT)


def test_releasing_what_is_not_reserved_is_an_error(model: Path) -> None:
    llm = small(model)
    reservation = llm.reserve(DOCUMENT)
    llm.release(reservation)
    for gone in (reservation, "nonsense"):
        with pytest.raises(RequestError, match="no reservation"):
            llm.release(gone)


def test_a_failed_step_leaves_no_reservation(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = small(model)

    def fail(_: Any) -> Any:
        raise RuntimeError("no luck")

    with monkeypatch.context() as broken:
        broken.setattr(llm.engine.runner, "run", fail)
        with pytest.raises(EngineError, match="no luck"):
            llm.reserve(DOCUMENT)
    assert (llm.reservations, llm.engine.cache.num_free_blocks) == ([], 64)
    assert llm.reserve(DOCUMENT).num_tokens == 96


# -------------------------------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module", params=["hash", "paged"])
def keyed(request: pytest.FixtureRequest, model: Path) -> Iterator[LiveServer]:
    with running(model, prefix_cache=request.param, admin_key=KEY, max_model_len=1024) as live:
        live.http.headers["Authorization"] = f"Bearer {KEY}"
        yield live


class TestHTTP:
    def test_a_prompt_is_found_by_the_openai_client(self, keyed: LiveServer, text: str) -> None:
        with OpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0) as admin:
            made = admin.post("/reservations", cast_to=dict[str, Any], body={"prompt": text})
            assert made["object"] == "reservation"
            assert made["num_prompt_tokens"] == made["num_computed_tokens"]
            answer = keyed.openai.completions.create(model=keyed.model, prompt=text + " And then")
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == made["num_tokens"]
            path = f"/reservations/{made['id']}"
            assert made in admin.get("/reservations", cast_to=dict[str, Any])["data"]
            assert admin.delete(path, cast_to=dict[str, Any])["deleted"] is True
            with pytest.raises(APIStatusError, match="no reservation") as gone:
                admin.delete(path, cast_to=dict[str, Any])
            assert gone.value.status_code == 404

    def test_a_chat_is_found(self, keyed: LiveServer) -> None:
        made = keyed.post("/v1/reservations", messages=SYSTEM).json()
        answer = keyed.openai.chat.completions.create(
            model=keyed.model,
            messages=[*SYSTEM, {"role": "user", "content": "Why?"}],  # type: ignore[list-item]
            max_tokens=4,
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == made["num_tokens"]
        assert keyed.http.delete(f"/v1/reservations/{made['id']}").status_code == 200

    def test_a_salt_keeps_it_apart(self, keyed: LiveServer, text: str) -> None:
        made = keyed.post("/v1/reservations", prompt=text, cache_salt="mine").json()
        for fields, cached in (({}, 0), ({"cache_salt": "mine"}, made["num_tokens"])):
            usage = keyed.complete(text + " And then", **fields)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        keyed.http.delete(f"/v1/reservations/{made['id']}")

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({}, "prompt"),
            ({"prompt": "a", "messages": SYSTEM}, "prompt"),
            ({"prompt": ["a", "b"]}, "prompt"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": [-1] * BLOCK_SIZE}, "prompt"),
            ({"prompt": [5] * 2000}, "prompt"),
            ({"messages": []}, "messages"),
            ({"messages": SYSTEM * 9}, "messages"),
            ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
            ({"prompt": "a", "max_tokens": 5}, "max_tokens"),
            ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ],
    )
    def test_what_is_wrong_is_named(
        self, keyed: LiveServer, fields: dict[str, Any], param: str
    ) -> None:
        answer = keyed.post("/v1/reservations", **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    def test_a_chat_of_hopeless_length_is_refused_before_it_is_tokenised(
        self, keyed: LiveServer
    ) -> None:
        messages = [{"role": "system", "content": "x" * 100_000}]
        answer = keyed.post("/v1/reservations", messages=messages)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "characters; more than" in answer.json()["error"]["message"]

    def test_the_pool_cannot_be_filled(self, keyed: LiveServer) -> None:
        made, answers = [], []
        for start in range(8):
            prompt = [(start * 31 + i * i) % 250 for i in range(1000)]
            answers.append(keyed.post("/v1/reservations", prompt=prompt))
            made += [answers[-1].json()["id"]] if answers[-1].status_code == 200 else []
        refused = answers[-1].json()["error"]
        assert (answers[-1].status_code, refused["code"]) == (400, "no_room_for_reservation")
        assert keyed.complete([5] * 1000, max_tokens=20)["usage"]["completion_tokens"] == 20
        for reservation in made:
            assert keyed.http.delete(f"/v1/reservations/{reservation}").status_code == 200
        assert keyed.idle_blocks == 256

    @pytest.mark.parametrize(
        "header", [None, "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", KEY]
    )
    def test_without_the_key_it_is_closed(self, keyed: LiveServer, header: str | None) -> None:
        headers = {} if header is None else {"Authorization": header}
        with httpx.Client(base_url=keyed.url, headers=headers) as stranger:
            answers = [
                stranger.post("/v1/reservations", json={"prompt": "x" * 100}),
                stranger.get("/v1/reservations"),
                stranger.delete("/v1/reservations/x"),
            ]
        assert [answer.status_code for answer in answers] == [401] * 3
        assert answers[0].json()["error"]["code"] == "invalid_api_key"
        assert keyed.http.get("/v1/reservations").json()["data"] == []

    def test_without_a_key_of_its_own_it_is_closed_to_all(self, server: LiveServer) -> None:
        answer = server.http.get("/v1/reservations", headers={"Authorization": "Bearer x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_admin_key")


def test_a_cancelled_reservation_leaves_nothing(keyed: LiveServer) -> None:
    async def cancel_soon() -> None:
        task = asyncio.create_task(keyed.engine.reserve([5, 6] * 500))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await keyed.engine.abort_sample("none", 0)  # commands are taken in order

    asyncio.run(cancel_soon())
    assert keyed.idle_blocks == 256
    assert keyed.engine.reservations == []


def test_a_reservation_that_was_made_when_its_caller_gave_up_is_released(
    keyed: LiveServer,
) -> None:
    async def cancel_late() -> None:
        task = asyncio.create_task(keyed.engine.reserve([7, 8] * 100))
        await asyncio.sleep(0)
        eventually(lambda: keyed.engine.reservations != [])  # this loop has not heard of it yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_late())
    eventually(lambda: keyed.engine.reservations == [])
    assert keyed.idle_blocks == 256


def test_a_client_that_hangs_up_leaves_nothing(
    keyed: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, started, gone = keyed.engine.engine.runner, threading.Event(), threading.Event()
    run = runner.run

    def slowly(step: Step) -> Tensor:
        started.set()
        assert gone.wait(DEADLINE)
        time.sleep(0.2)  # the server hears of it meanwhile
        return run(step)

    monkeypatch.setattr(runner, "run", slowly)
    address = urlsplit(keyed.url)
    body = json.dumps({"prompt": [5, 6] * 500})
    with closing(HTTPConnection(address.hostname or "", address.port)) as client:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        client.request("POST", "/v1/reservations", body, headers)
        assert started.wait(DEADLINE)
    gone.set()
    assert keyed.idle_blocks == 256
    assert keyed.engine.reservations == []


# -------------------------------------------------------------------------------- files and keys


def test_files_of_every_kind(tmp_path: Path) -> None:
    kinds = {
        "a.txt": "A whole text.\n",
        "b.json": json.dumps(SYSTEM),
        "c.json": json.dumps([1, 2, 3]),
        "d.json": json.dumps({"prompt": "x", "cache_salt": "s"}),
        "e.jsonl": f'"one"\n\n{json.dumps({"messages": SYSTEM})}\n[4, 5]\n',
    }
    for name, content in kinds.items():
        (tmp_path / name).write_text(content)
    asked = read_files(tuple(str(tmp_path / name) for name in kinds))
    assert [(it.body.prompt, len(it.body.messages), it.body.cache_salt) for it in asked] == [
        ("A whole text.\n", 0, None),
        (None, 1, None),
        ([1, 2, 3], 0, None),
        ("x", 0, "s"),
        ("one", 0, None),
        (None, 1, None),
        ([4, 5], 0, None),
    ]
    assert [it.where.rpartition("/")[2] for it in asked[4:]] == [
        "e.jsonl, line 1",
        "e.jsonl, line 3",
        "e.jsonl, line 4",
    ]


def test_a_text_is_taken_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    (asked,) = read_files((str(tmp_path / "a.txt"),))
    assert asked.body.prompt == "one\r\ntwo\n"


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", "text"), ("a.json", '"text"'), ("a.jsonl", '"text"\r\n\r\n')]
)
def test_a_mark_of_the_byte_order_is_no_part_of_it(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig", newline="")
    assert [it.body.prompt for it in read_files((str(tmp_path / name),))] == ["text"]


def test_a_line_of_json_may_hold_other_ends_of_lines(tmp_path: Path) -> None:
    texts = ["a\u2028b", "a\x85b"]
    lines = [json.dumps(text, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert [it.body.prompt for it in read_files((str(tmp_path / "a.jsonl"),))] == texts


def test_a_name_that_is_no_text_becomes_an_id_that_is(tmp_path: Path) -> None:
    path = str(tmp_path / "a\udcff.txt")
    try:
        Path(path).write_text("text")
    except (OSError, UnicodeEncodeError):
        pytest.skip("the file system takes no such names")
    (asked,) = read_files((path,))
    assert asked.where.endswith("a\\udcff.txt")


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.txt")
    Path(path).write_text("text")
    with pytest.raises(ConfigError, match=r"names .*a\.txt twice"):
        read_files((path, path))


def test_a_file_for_another_model_is_refused(server: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"prompt": "text", "model": "other"}')
    (asked,) = read_files((str(tmp_path / "a.json"),))
    serving = Serving.of(server.engine, ServerOptions(), 0, None)
    with pytest.raises(ConfigError, match=r"a\.json: model 'other' is not served here"):
        asyncio.run(reserve_file(serving, asked))


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (["one", [2, 3]], ["one", [2, 3]]),
        ([SYSTEM, SYSTEM], [None, None]),
        (SYSTEM, [None]),
        ([2, 3], [[2, 3]]),
    ],
)
def test_a_list_is_a_prompt_a_conversation_or_several(
    tmp_path: Path, content: Any, prompts: list[Any]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert [it.body.prompt for it in read_files((str(tmp_path / "a.json"),))] == prompts


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_only_a_newline_ends_a_line_of_json(tmp_path: Path, separator: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'"one{separator}two"\n"three"\n', encoding="utf-8")
    asked = read_files((str(tmp_path / "a.jsonl"),))
    assert [it.body.prompt for it in asked] == [f"one{separator}two", "three"]


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path: Path, name: str) -> None:
    text = "one" if name == "a.txt" else '"one"'
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert [it.body.prompt for it in read_files((str(tmp_path / name),))] == ["one"]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.json", b"{", "a.json: "),
        ("a.json", b'["fine", [{"role": "king"}]]', "a.json, prompt 2: messages[0].role"),
        ("a.json", b'{"promt": 1}', "promt"),
        ("a.json", b"[" * 100_000, "a.json: "),
        ("a.jsonl", b'"fine"\nnot json\n', "line 2"),
        ("a.jsonl", b'{"messages": [{"role": "king"}]}', "messages[0].role"),
        ("a.txt", b"\xff\xfe", "UTF-8"),
        ("a.txt", b"", "a.txt: it is empty"),
        ("a.json", b"\n", "a.json: it is empty"),
        ("a.jsonl", b"\n \n", "a.jsonl: it is empty"),
        ("a.json", b"[NaN]", "line 1 column 2"),
        ("missing.txt", None, "No such file"),
    ],
)
def test_a_bad_file_is_named_before_anything_is_loaded(
    tmp_path: Path, name: str, content: bytes | None, named: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="cannot reserve") as error:
        read_files((str(tmp_path / name),))
    assert named in str(error.value)


def test_the_key_comes_from_the_file_or_else_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    environ = {"PREFIXKV_ADMIN_KEY": "e" * 16}
    assert admin_key(str(file), environ) == KEY
    assert admin_key(None, environ) == "e" * 16
    assert admin_key(None, {}) is None


@pytest.mark.parametrize("key", ["", "short", "a key with spaces in it", "ключ" * 8])
def test_a_weak_key_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "key").write_text(key)
    with pytest.raises(ConfigError, match="16 or more"):
        admin_key(str(tmp_path / "key"), {})
