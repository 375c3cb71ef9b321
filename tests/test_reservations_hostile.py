"""Reservations whose clients are wrong, loud or gone."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import BLOCK_SIZE, LiveServer, eventually, running
from prefixkv import Reservation

KEY = "k" * 32
PROMPT = [5, 6] * 500


@pytest.fixture(scope="module", params=["hash", "radix", "paged"])
def keyed(request: pytest.FixtureRequest, model: Path) -> Iterator[LiveServer]:
    with running(
        model,
        prefix_cache=request.param,
        admin_key=KEY,
        max_model_len=1024,
        token_budget=BLOCK_SIZE,
    ) as live:
        live.http.headers["Authorization"] = f"Bearer {KEY}"
        yield live


@pytest.fixture
def slow(keyed: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reservation of PROMPT takes a second or more."""
    runner = keyed.engine.engine.runner
    run = runner.run

    def run_slowly(step: Any) -> Any:
        time.sleep(0.02)
        return run(step)

    monkeypatch.setattr(runner, "run", run_slowly)


def hang_up_in_the_middle(live: LiveServer) -> None:
    url = httpx.URL(live.url)
    body = json.dumps({"prompt": PROMPT})
    with socket.create_connection((url.host, url.port)) as client:
        head = (
            "POST /v1/reservations HTTP/1.1",
            f"Host: {url.host}",
            f"Authorization: Bearer {KEY}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        client.sendall("\r\n".join((*head, "", body)).encode())
        eventually(lambda: live.engine.stats().num_running == 1)


@pytest.mark.usefixtures("slow")
def test_a_client_that_hangs_up_ends_its_reservation(keyed: LiveServer) -> None:
    computed = keyed.engine.stats().computed_tokens
    hang_up_in_the_middle(keyed)
    assert keyed.idle_blocks == 256
    assert keyed.engine.reservations == []
    assert keyed.engine.stats().computed_tokens - computed < len(PROMPT)
    keyed.engine.engine.cache.check()


def test_one_that_is_made_as_its_client_hangs_up_is_released(
    keyed: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, made = keyed.engine.reserve, []
    url = httpx.URL(keyed.url)
    client = HTTPConnection(url.host, url.port)

    async def reserve_and_lose_the_client(prompt: list[int], **options: Any) -> Reservation:
        made.append(await reserve(prompt, **options))
        client.close()
        return made[0]

    monkeypatch.setattr(keyed.engine, "reserve", reserve_and_lose_the_client)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    client.request("POST", "/v1/reservations", json.dumps({"prompt": PROMPT}), headers)
    eventually(lambda: bool(made) and keyed.engine.reservations == [])
    assert keyed.idle_blocks == 256


def test_one_that_is_made_while_its_caller_gives_up_is_released(keyed: LiveServer) -> None:
    async def give_up_late() -> None:
        task = asyncio.create_task(keyed.engine.reserve(PROMPT))
        await asyncio.sleep(0)
        eventually(lambda: bool(keyed.engine.reservations))  # the loop stands still meanwhile
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up_late())
    eventually(lambda: keyed.engine.reservations == [])
    assert keyed.idle_blocks == 256


def test_giving_up_one_that_was_refused_does_not_end_that_of_the_same_id(
    keyed: LiveServer,
) -> None:
    async def twice() -> None:
        await keyed.engine.reserve(PROMPT, request_id="mine")
        task = asyncio.create_task(keyed.engine.reserve(PROMPT, request_id="mine"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await keyed.engine.release("mine")  # there still

    asyncio.run(twice())
    assert keyed.idle_blocks == 256


@pytest.mark.parametrize(
    "prompt",
    [
        [[["x"] * 9999]],
        [5, "x" * 9999],
        [10**4000],
        [[{"x" * 9999: 1}]],
        [[[[["x" * 50] * 6] * 6] * 6] * 6],
    ],
    ids=["list", "text", "number", "object", "tree"],
)
def test_what_is_wrong_is_not_sent_back_whole(keyed: LiveServer, prompt: Any) -> None:
    answer = keyed.post("/v1/reservations", prompt=prompt)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert len(answer.text) < 700


def test_an_unknown_id_is_not_sent_back_whole(keyed: LiveServer) -> None:
    answer = keyed.http.delete(f"/v1/reservations/{'x' * 9999}")
    assert answer.status_code == 404
    assert len(answer.text) < 500


def test_a_chat_that_cannot_fit_is_refused_before_it_is_tokenised(keyed: LiveServer) -> None:
    chat = [{"role": "system", "content": "a " * 50_000}]
    refused = keyed.post("/v1/reservations", messages=chat).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    assert "characters; more than" in refused["message"]


def test_the_allow_header_names_every_method(keyed: LiveServer) -> None:
    answer = keyed.http.put("/v1/reservations")
    assert answer.status_code == 405
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "POST"}
