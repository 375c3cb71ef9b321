"""Every failure in one shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from prefixkv.errors import EngineError, PrefixKVError, RequestError

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "the server failed on this request; its log says why"
MAX_SHOWN_CHARS = 60

_JSON = json.JSONEncoder(ensure_ascii=False, default=str)

_EXPECTED = {
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}


class HTTPError(PrefixKVError):
    """A request that is answered with ``status``; ``param`` and ``code`` as OpenAI means them."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The error object of the OpenAI API for an HTTP status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: Exception, *, engine_is_alive: bool) -> tuple[int, dict[str, Any]]:
    """Status and body for an error; what is no error of ours is logged and its text kept inside."""
    if isinstance(error, HTTPError):
        return error.status, error_body(error.status, str(error), error.param, error.code)
    if isinstance(error, RequestError):
        return 400, error_body(400, str(error), error.param, error.code)
    if isinstance(error, EngineError):
        status = 500 if engine_is_alive else 503
        return status, error_body(status, str(error), code="engine_error")
    logger.error("a request failed", exc_info=error)
    return 500, error_body(500, INTERNAL_ERROR, code="internal_error")


def shown(value: Any) -> str:
    """A value of a request as its sender wrote it, shortened."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN_CHARS + 1]
    text = ""
    for part in _JSON.iterencode(value):  # piece by piece: the whole may be megabytes
        text += part
        if len(text) > MAX_SHOWN_CHARS:
            return text[: MAX_SHOWN_CHARS - 3] + "..."
    return text


def shown_name(name: str) -> str:
    """The name of a field as its sender wrote it, shortened."""
    return name if len(name) <= MAX_SHOWN_CHARS else name[: MAX_SHOWN_CHARS - 3] + "..."


def validation_error(error: ValidationError) -> RequestError:
    """The first fault of a body as one sentence that names the field, the value and the limit."""
    first = error.errors(include_url=False)[0]
    field = field_name(first["loc"])
    kind = first["type"]
    if kind == "missing":
        return RequestError(f"{field} is missing; it is required", param=field)
    if kind == "extra_forbidden":
        message = f"{field} is not a field that this server knows; leave it out"
        return RequestError(message, param=field, code="unknown_parameter")
    if kind == "too_long":
        limit = first["ctx"]["max_length"]
        message = f"{field} has {len(first['input'])} items; at most {limit} are allowed"
        return RequestError(message, param=field)
    limit = _limit(kind, first.get("ctx", {}), first["msg"])
    return RequestError(f"{field} is {shown(first['input'])}; it must be {limit}", param=field)


def field_name(location: tuple[str | int, ...]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{shown_name(part)}" for part in location)
    return "".join(parts).removeprefix(".")


def _limit(kind: str, context: dict[str, Any], message: str) -> str:
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if kind == "greater_than_equal":
        return f"{context['ge']} or more"
    if kind == "less_than_equal":
        return f"{context['le']} or less"
    if kind == "string_too_short":
        return f"a string of {context['min_length']} characters or more"
    if kind == "string_too_long":
        return f"a string of {context['max_length']} characters or less"
    return f"valid: {message}"


def install(app: FastAPI) -> None:
    """Make every error of the app take the one shape."""
    app.add_exception_handler(PrefixKVError, _on_known_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_known_error(request: Request, error: Exception) -> JSONResponse:
    alive = request.app.state.serving.engine.is_alive
    status, body = error_of(error, engine_is_alive=alive)
    return JSONResponse(body, status, {"WWW-Authenticate": "Bearer"} if status == 401 else None)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # registered for it alone
    path = f"{request.method} {request.url.path}"
    message = {
        404: f"there is nothing at {path}",
        405: f"{path} is not allowed; the Allow header says what is",
    }.get(error.status_code, str(error.detail or HTTPStatus(error.status_code).phrase))
    body = error_body(error.status_code, message, code=_code(error.status_code))
    return JSONResponse(body, error.status_code, headers=error.headers)


def _code(status: int) -> str:
    return HTTPStatus(status).name.lower()
