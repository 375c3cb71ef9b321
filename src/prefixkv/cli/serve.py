"""``prefixkv serve``."""

from __future__ import annotations

from rich.console import Console

from prefixkv.cli.progress import progress
from prefixkv.config import EngineOptions
from prefixkv.engine.async_engine import AsyncEngine
from prefixkv.server import run as http
from prefixkv.server.settings import ServerOptions


def run(options: EngineOptions, server: ServerOptions) -> None:
    """Bind, load, serve; lines on stderr say when it is ready and what it waits for at its end."""
    with http.bind(server) as sock:
        with progress() as report:
            engine = AsyncEngine.from_options(options, report)
        console = Console(stderr=True)

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        http.serve(
            engine,
            server,
            sock,
            on_ready=lambda: say(f"prefixkv serves on {http.url(sock)}/v1\n{engine.summary}"),
            on_stopping=lambda running: say(_farewell(running, server.shutdown_timeout)),
        )


def _farewell(running: int, timeout: int) -> str:
    one = running == 1
    return (
        f"stopping: {running} {'request gets' if one else 'requests get'} up to {timeout} s; "
        f"Ctrl-C again ends {'it' if one else 'them'}"
    )
