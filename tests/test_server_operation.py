"""How the server runs: clients that hang up, metrics, health, ids, an engine that stops."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from live_server import DEADLINE, LONG, LiveServer, eventually, running, shared_tokens
from prefixkv import __version__
from prefixkv.server import routes
from tiny_model import write_tiny_model


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


MIB = 2**20


def filled(head: str, item: str, tail: str) -> bytes:
    """A body of almost 8 MiB."""
    count = (8 * MIB - len(head) - len(tail)) // (len(item) + 1)
    return (head + ",".join([item] * count) + tail).encode()


def slow_bodies() -> list[tuple[str, bytes]]:
    """Bodies as large as is allowed, made to be slow to read, and where they go."""
    chat, plain = "/v1/chat/completions", "/v1/completions"
    part = '{"type":"text","text":""}'
    parts = filled('{"messages": [{"role":"user","content":[', part, "]}]}")
    prompts = ",".join([f"[{'7,' * 1800}-1]"] * 1024)
    many_fields = ",".join(f'"{number}":1' for number in range(700_000))
    return [
        (plain, filled('{"prompt": [', "[]", "]}")),
        (plain, filled('{"stop_token_ids": [', '"x"', "]}")),
        (plain, f'{{"stream_options": {{{many_fields}}}}}'.encode()),
        (chat, filled('{"messages": [', '{"role":"user","content":"x"}', "]}")),
        (chat, filled('{"messages": [', "{}", "]}")),
        *[(plain, f'{{"prompt": [{prompts}]}}'.encode())] * 2,
        *[(chat, parts)] * 2,
    ]


class TestLargeBodies:
    def test_others_are_answered_while_one_is_read(
        self, server: LiveServer, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answered = threading.Event()
        parse = routes.parse_body

        def wait_and_parse(data: bytes, kind: Any) -> Any:
            assert answered.wait(DEADLINE)
            return parse(data, kind)

        monkeypatch.setattr(routes, "parse_body", wait_and_parse)
        large = {"prompt": text, "max_tokens": 1, "metadata": {"x": "x" * (MIB // 2)}}
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(server.post, "/v1/completions", **large)
            for _ in range(5):
                assert server.http.get("/health").status_code == 200
            answered.set()
            assert waiting.result().status_code == 200

    def test_slow_ones_let_others_through(self, tmp_path: Path) -> None:
        with running(write_tiny_model(tmp_path / "tiny"), max_body_size=8) as live:
            sent = [self._all_but_the_last_byte(live, path, body) for path, body in slow_bodies()]
            waiting = threading.Thread(target=self._finish, args=[sent])
            waiting.start()
            healthy = 0
            while waiting.is_alive():
                healthy += live.http.get("/health").status_code == 200
        # If each held up all others, one could come through between two.
        assert healthy > 2 * len(sent)

    @staticmethod
    def _all_but_the_last_byte(live: LiveServer, path: str, body: bytes) -> socket.socket:
        host, _, port = live.url.removeprefix("http://").partition(":")
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        connection = socket.create_connection((host, int(port)))
        connection.sendall(head.encode() + body[:-1])
        return connection

    @staticmethod
    def _finish(connections: list[socket.socket]) -> None:
        """Send the last bytes, all at once, and read the answers."""
        for connection in connections:
            connection.sendall(b"}")
        for connection in connections:
            with connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 400")


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
