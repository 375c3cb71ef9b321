"""Reading a request body of limited size, and making sense of it beside the event loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import Request

from prefixkv.server.errors import HTTPError, shown

# A body that is too large is still read this many times its limit, and dropped: a client that is
# cut off while it sends never sees the answer.
_DRAIN = 4

# About ten milliseconds of parsing and checking, at worst.
_LARGE = 256 * 2**10

T = TypeVar("T")


class Bodies:
    """Reads the bodies of one server, each at most ``limit`` bytes.

    Large ones are parsed in a thread, one at a time: the parser lets no other thread run before it
    has a whole body, and so the event loop has its turn between any two.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parsing = asyncio.Lock()

    async def read(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """What ``parse`` makes of the JSON body.

        Raises:
            HTTPError: its type is not JSON (415) or it is too large (413).
        """
        data = await _read(request, self._limit)
        if len(data) <= _LARGE:
            return parse(data)
        async with self._parsing:
            with _no_collections():
                return await asyncio.to_thread(parse, data)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Each one would visit all of the millions of lists that a body can hold; none is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def _read(request: Request, limit: int) -> bytes:
    """The bytes. Another content type than JSON is refused: browsers send those across sites
    without asking.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise HTTPError(
            415,
            f"Content-Type is {shown(kind)}; it must be application/json",
            code="unsupported_media_type",
        )
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
        if size > _DRAIN * limit:
            break
    if size > limit:
        raise HTTPError(
            413,
            f"the body has more than {limit} bytes, the limit of this server "
            "(--max-body-size, in MiB)",
            code="request_too_large",
        )
    return b"".join(parts)
