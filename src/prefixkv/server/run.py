"""Listening, serving and stopping."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

import uvicorn

from prefixkv.engine.async_engine import AsyncEngine
from prefixkv.errors import ConfigError
from prefixkv.request import Reservation
from prefixkv.server.app import create_app
from prefixkv.server.reservations import FromFile, reserve_file
from prefixkv.server.serving import Serving
from prefixkv.server.settings import ServerOptions

# Seconds for the last words to clients after what was left is aborted.
_MARGIN = 5

# Seconds until a signal is seen while something is reserved.
_PATIENCE = 0.1

# Seconds for the errors of aborted requests to reach their clients.
_LAST_WORDS = 1.0


class Server(uvicorn.Server):
    """Serves one engine. SIGTERM ends it well, SIGINT raises KeyboardInterrupt at its end.

    What runs gets ``shutdown_timeout`` seconds then, or until a second SIGINT; what is left is
    aborted by the engine, so that clients are told.

    Args:
        on_ready: called once it listens.
        on_stopping: called with the number of requests that it waits for at its end, if any.
        admin_key: opens ``/v1/reservations`` to who sends it.
        reserve: what is computed and kept before it listens.
        on_reserved: called after each of these.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        options: ServerOptions,
        on_ready: Callable[[], None],
        on_stopping: Callable[[int], None] = lambda _running: None,
        *,
        admin_key: str | None = None,
        reserve: Sequence[FromFile] = (),
        on_reserved: Callable[[FromFile, Reservation], None] = lambda _asked, _reservation: None,
    ) -> None:
        app = create_app(engine, options, admin_key=admin_key)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=options.shutdown_timeout + _MARGIN,
        )
        super().__init__(config)
        self._engine = engine
        self._serving: Serving = app.state.serving
        self._reserve = reserve
        self._on_reserved = on_reserved
        self._timeout = options.shutdown_timeout
        self._on_ready = on_ready
        self._on_stopping = on_stopping
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._reserve_all()
        if self.should_exit:
            return
        await super().startup(sockets)
        self._on_ready()

    async def _reserve_all(self) -> None:
        """Before it listens, so that no client waits for it; a signal ends it.

        Raises:
            ConfigError: one cannot be reserved.
        """
        if not self._reserve:
            return
        await self._engine.start()
        try:
            for asked in self._reserve:
                task = asyncio.create_task(reserve_file(self._serving, asked))
                while not task.done() and not self.should_exit:
                    await asyncio.wait((task,), timeout=_PATIENCE)
                if self.should_exit:
                    task.cancel()
                    break
                self._on_reserved(asked, task.result())
        except BaseException:
            self.should_exit = True
            raise
        finally:
            if self.should_exit:
                await self._engine.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._hurry.set()
        elif sig == signal.SIGTERM:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running = len(self.server_state.tasks)
        if running and self._timeout:
            self._on_stopping(running)
        ending = asyncio.create_task(self._abort_late())
        await super().shutdown(sockets)
        ending.cancel()

    async def _abort_late(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._timeout)
        await self._engine.stop()
        await asyncio.sleep(_LAST_WORDS)
        self.force_exit = True  # who is still sending a request has none in the engine


def bind(options: ServerOptions) -> socket.socket:
    """Take the address before the model is loaded, so that a port in use is told at once.

    Raises:
        ConfigError: the address is unknown, not allowed or in use.
    """
    where = f"{options.host}:{options.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error}; check --host") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror}; choose another --port or --host"
        ) from None
    return sock


def url(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"


def serve(server: Server, sock: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT.

    Raises:
        KeyboardInterrupt: it ended by SIGINT.
        ConfigError: something cannot be reserved at the start.
    """
    asyncio.run(server.serve(sockets=[sock]))
