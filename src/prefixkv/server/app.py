"""The ASGI application around one engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from prefixkv import __version__
from prefixkv.engine.async_engine import AsyncEngine
from prefixkv.server import errors, reservations
from prefixkv.server.middleware import RequestContext
from prefixkv.server.routes import router
from prefixkv.server.serving import Serving
from prefixkv.server.settings import ServerOptions


def create_app(
    engine: AsyncEngine, options: ServerOptions | None = None, *, admin_key: str | None = None
) -> FastAPI:
    """An app that starts the engine when it starts and stops it when it ends.

    Args:
        admin_key: opens ``/v1/reservations`` to who sends it.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.stop()

    app = FastAPI(
        title="prefixkv",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.serving = Serving.of(engine, options or ServerOptions(), int(time.time()), admin_key)
    app.add_middleware(RequestContext)
    errors.install(app)
    app.include_router(router)
    app.include_router(reservations.router)
    return app
