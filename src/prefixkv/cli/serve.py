"""``prefixkv serve``."""

from __future__ import annotations

from rich.console import Console

from prefixkv.cli.progress import progress
from prefixkv.config import EngineOptions
from prefixkv.engine.async_engine import AsyncEngine
from prefixkv.server import run as http
from prefixkv.server.settings import ServerOptions


def run(options: EngineOptions, server: ServerOptions) -> None:
    """Bind, load, serve; one line on stderr says when it is ready."""
    with http.bind(server) as sock:
        with progress() as report:
            engine = AsyncEngine.from_options(options, report)
        console = Console(stderr=True)
        ready = f"prefixkv serves {engine.summary} on {http.url(sock)}"
        http.serve(
            engine,
            server,
            sock,
            lambda: console.print(ready, markup=False, highlight=False, soft_wrap=True),
        )
