"""``prefixkv serve``."""

from __future__ import annotations

from rich.console import Console

from prefixkv.cli.progress import progress
from prefixkv.config import EngineOptions
from prefixkv.engine.async_engine import AsyncEngine
from prefixkv.request import Reservation
from prefixkv.server import run as http
from prefixkv.server.reservations import FromFile, admin_key, read_files
from prefixkv.server.settings import ServerOptions


def run(options: EngineOptions, server: ServerOptions) -> None:
    """Bind, load, reserve, serve; lines on stderr say what it holds, that it is ready and what it
    waits for at its end.
    """
    key, asked = admin_key(server.admin_key_file), read_files(server.reserve)
    with http.bind(server) as sock:
        with progress() as report:
            engine = AsyncEngine.from_options(options, report)
        console = Console(stderr=True)

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        app = http.Server(
            engine,
            server,
            on_ready=lambda: say(f"prefixkv serves on {http.url(sock)}/v1\n{engine.summary}"),
            on_stopping=lambda running: say(_farewell(running, server.shutdown_timeout)),
            admin_key=key,
            reserve=asked,
            on_reserved=lambda asked, reservation: say(_held(asked, reservation)),
        )
        http.serve(app, sock)


def _held(asked: FromFile, reservation: Reservation) -> str:
    return (
        f"reserved {asked.where}: {reservation.num_tokens} of "
        f"{reservation.num_prompt_tokens} tokens"
    )


def _farewell(running: int, timeout: int) -> str:
    one = running == 1
    return (
        f"stopping: {running} {'request gets' if one else 'requests get'} up to {timeout} s; "
        f"Ctrl-C again ends {'it' if one else 'them'}"
    )
