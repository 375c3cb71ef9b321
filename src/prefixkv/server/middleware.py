"""What surrounds every request: its id, and an answer whatever fails."""

from __future__ import annotations

import re
import uuid

from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixkv.server.errors import error_of
from prefixkv.server.generation import ClientDisconnected

HEADER = "X-Request-Id"
CLIENT_CLOSED_REQUEST = 499

_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestContext:
    """ASGI middleware: adds ``X-Request-Id`` (the client's own, or a new one) to each answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get(HEADER, ""))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            response = _response(error)
            if not started:
                await response(scope, receive, send_with_id)


def _response(error: Exception) -> Response:
    if isinstance(error, ClientDisconnected | ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    status, body = error_of(error, engine_is_alive=True)
    return JSONResponse(body, status)


def _request_id(given: str) -> str:
    return given if _ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
