"""A real server on a real port, in a thread of the tests, and ways to ask it."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from prefixkv.config import EngineOptions
from prefixkv.engine.async_engine import AsyncEngine
from prefixkv.server.run import Server, bind, url
from prefixkv.server.settings import ServerOptions

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
DEADLINE = 60.0
LONG = 1500  # tokens: an answer that still runs when its client has long gone

SENTENCE = "The quick brown fox jumps over the lazy dog while the cat sleeps in the warm sun. "


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; what it waits for is done by another thread."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


def text_of(test: str) -> str:
    """A prompt of several blocks for one test: no other test's shares its first block."""
    return f"{hashlib.sha256(test.encode()).hexdigest()[:16]} {SENTENCE * 3}"


def shared_tokens(num_prompt_tokens: int) -> int:
    """What a second, equal prompt finds: full blocks, never the last token."""
    return (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


class LiveServer:
    """The engine, the URL, an OpenAI client and a plain HTTP client."""

    def __init__(self, engine: AsyncEngine, base_url: str) -> None:
        self.engine = engine
        self.url = base_url
        self.model = engine.model_name
        self.openai = OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
        self.http = httpx.Client(base_url=base_url, timeout=DEADLINE)

    def close(self) -> None:
        self.openai.close()
        self.http.close()

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The body of a completion that goes well."""
        answer = self.post("/v1/completions", prompt=prompt, **fields)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def metric(self, name: str) -> float:
        """A metric of one value, by its full name."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name + "{"):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    @property
    def idle_blocks(self) -> int:
        """Free blocks once nothing runs any more."""
        eventually(lambda: self.engine.stats().num_running == 0)
        return self.engine.stats().num_free_blocks


@contextmanager
def running(
    model: Path | None,
    *,
    max_body_size: int = 1,
    admin_key: str | None = None,
    **options: Any,
) -> Iterator[LiveServer]:
    """Serve a model on a free port of 127.0.0.1 until the block ends."""
    defaults: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_blocks": 256,
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "float32",
        "threads": 1,
    }
    server_options = ServerOptions(port=0, max_body_size=max_body_size)
    engine = AsyncEngine.from_options(EngineOptions(model=model, **(defaults | options)))
    sock = bind(server_options)
    ready = threading.Event()
    server = Server(engine, server_options, ready.set, admin_key=admin_key)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        assert ready.wait(DEADLINE)
        live = LiveServer(engine, url(sock))
        try:
            yield live
        finally:
            live.close()
    finally:
        server.should_exit = True
        thread.join()
