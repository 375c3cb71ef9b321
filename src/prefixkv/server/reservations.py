"""Reservations: their endpoints, behind a key, and the files that are reserved at the start."""

from __future__ import annotations

import hmac
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic_core import from_json

from prefixkv.errors import ConfigError, PrefixKVError, RequestError
from prefixkv.request import Reservation
from prefixkv.server.errors import HTTPError
from prefixkv.server.generation import ClientDisconnected, while_connected
from prefixkv.server.messages import chat_messages
from prefixkv.server.protocol import ReservationRequest, parse_body
from prefixkv.server.serving import Serving

KEY_VARIABLE = "PREFIXKV_ADMIN_KEY"
MIN_KEY_CHARS = 16

router = APIRouter(prefix="/v1/reservations")


# One route for both: of a path with several, only the first is in the Allow header of a 405.
@router.api_route("", methods=["GET", "POST"])
async def reserve_or_list(request: Request) -> JSONResponse:
    """Compute a prompt, or the beginning of a chat, and keep it in the cache; or what is kept."""
    serving = _admitted(request)
    return await _reserve(serving, request) if request.method == "POST" else _listed(serving)


async def _reserve(serving: Serving, request: Request) -> JSONResponse:
    body = await serving.bodies.read(request, parse_reservation)
    work = reserved(serving, body, f"rsv-{uuid.uuid4().hex}")
    reservation = await while_connected(request, work)
    if await request.is_disconnected():
        await serving.engine.release(reservation.id)
        raise ClientDisconnected
    return JSONResponse(_shown(reservation))


def _listed(serving: Serving) -> JSONResponse:
    data = [_shown(reservation) for reservation in serving.engine.reservations]
    return JSONResponse({"object": "list", "data": data})


@router.delete("/{reservation_id:path}")
async def release(request: Request, reservation_id: str) -> JSONResponse:
    """End a reservation; 404 if there is none of this id."""
    serving = _admitted(request)
    try:
        await serving.engine.release(reservation_id)
    except RequestError as error:
        raise HTTPError(404, str(error), code=error.code) from None
    return JSONResponse({"id": reservation_id, "object": "reservation", "deleted": True})


def parse_reservation(data: bytes) -> ReservationRequest:
    """The body of a reservation, its messages checked.

    Raises:
        RequestError: it is wrong.
    """
    body = parse_body(data, ReservationRequest)
    if body.prompt is None:
        body = body.model_copy(update={"messages": chat_messages(body.messages)})
    return body


async def reserved(serving: Serving, body: ReservationRequest, request_id: str) -> Reservation:
    """Carry a reservation out. Cancelled, it leaves none.

    Raises:
        HTTPError: it names another model.
        RequestError: it cannot be served, or there is no room for it.
        EngineError: the engine failed or stopped.
    """
    serving.model(body.model)
    is_chat = body.prompt is None
    if is_chat:
        prompt = await serving.prompts.chat_prefix(body.messages)
    else:
        prompts = await serving.prompts.completion(body.prompt)
        if len(prompts) != 1:
            raise RequestError(
                f"prompt holds {len(prompts)} prompts; reserve one at a time", param="prompt"
            )
        prompt = prompts[0]
    try:
        return await serving.engine.reserve(
            prompt, request_id=request_id, cache_salt=body.cache_salt
        )
    except RequestError as error:
        if is_chat and error.param == "prompt":  # which the sender has not sent
            error.param = "messages"
        raise


@dataclass(frozen=True, slots=True)
class FromFile:
    """A reservation that a file asks for, and where it does."""

    where: str
    body: ReservationRequest


def read_files(paths: tuple[str, ...]) -> list[FromFile]:
    """What the files of ``--reserve`` ask for.

    A name in .json holds a prompt (a string or token ids), a conversation (a list of messages), a
    list of either, or an object as ``/v1/reservations`` takes it; .jsonl has a prompt, a
    conversation or an object a line. Any other is one prompt, the whole text.

    Raises:
        ConfigError: a file is named twice, empty, cannot be read or is not of that form; it names
            the file, and the line or the place in a list.
    """
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"reserve names {path} twice; name each file once")
    return [asked for path in paths for asked in _read_file(path)]


def _read_file(path: str) -> list[FromFile]:
    name = path.encode("utf-8", "backslashreplace").decode()  # an id, which answers are to show
    try:
        text = _text(path)
    except ValueError as error:
        raise ConfigError(f"cannot reserve {name}: {error}") from None
    kind = Path(path).suffix.lower()
    is_json = kind in (".json", ".jsonl")
    if not (text.strip() if is_json else text):
        raise ConfigError(f"cannot reserve {name}: it is empty; write a prompt into it")
    if kind == ".jsonl":
        lines = enumerate(text.split("\n"), 1)  # strings in it may hold what else ends lines
        named = [(f"{name}, line {at}", line) for at, line in lines if line.strip()]
        return [_asked(where, _json(where, line)) for where, line in named]
    value = _json(name, text) if is_json else text
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        return [_asked(f"{name}, prompt {at}", item) for at, item in enumerate(value, 1)]
    return [_asked(name, value)]


def _text(path: str) -> str:
    """A file's text as it stands, line ends too, without the mark that some editors put first.

    Raises:
        ValueError: it cannot be read; it says why.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(error.strerror or repr(error)) from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def _json(where: str, text: str) -> Any:
    with _named(where):
        return from_json(text, allow_inf_nan=False)


def _asked(where: str, value: Any) -> FromFile:
    with _named(where):
        if not isinstance(value, dict):
            chat = isinstance(value, list) and all(isinstance(item, dict) for item in value)
            value = {"messages" if chat and value else "prompt": value}
        return FromFile(where, parse_reservation(json.dumps(value).encode()))


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # JSON that is none, and what is refused
        raise ConfigError(f"cannot reserve {where}: {error}") from None


async def reserve_file(serving: Serving, asked: FromFile) -> Reservation:
    """Carry out what a file asks for.

    Raises:
        ConfigError: it cannot be; it names file and line.
    """
    try:
        return await reserved(serving, asked.body, asked.where)
    except PrefixKVError as error:
        raise ConfigError(f"cannot reserve {asked.where}: {error}") from None


def admin_key(path: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The key of ``/v1/reservations``: a file's text, else the variable's value, else none.

    Raises:
        ConfigError: the file cannot be read, or the key is short or not plain ASCII.
    """
    where = f"admin_key_file {path}" if path is not None else KEY_VARIABLE
    try:
        key = environ.get(KEY_VARIABLE) if path is None else _text(path)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None
    if key is None:
        return None
    key = key.strip()
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{where} holds a key of {len(key)} characters; it must be {MIN_KEY_CHARS} or more, "
            "printable ASCII without spaces"
        )
    return key


def _admitted(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    if serving.admin_key is None:
        raise HTTPError(
            403,
            "reservations are closed here: start the server with --admin-key-file or "
            f"{KEY_VARIABLE}",
            code="no_admin_key",
        )
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(key.strip().encode(), serving.admin_key.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise HTTPError(
            401,
            "the admin key is missing or wrong; send it as Authorization: Bearer KEY",
            code="invalid_api_key",
        )
    return serving


def _shown(reservation: Reservation) -> dict[str, Any]:
    return {
        "id": reservation.id,
        "object": "reservation",
        "num_tokens": reservation.num_tokens,
        "num_prompt_tokens": reservation.num_prompt_tokens,
        "num_computed_tokens": reservation.num_computed_tokens,
    }
