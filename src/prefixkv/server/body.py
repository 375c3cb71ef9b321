"""Reading a request body of limited size."""

from __future__ import annotations

from starlette.requests import Request

from prefixkv.server.errors import HTTPError, shown

# A body that is too large is still read this many times its limit, and dropped: a client that is
# cut off while it sends never sees the answer.
_DRAIN = 4


async def read_body(request: Request, limit: int) -> bytes:
    """The JSON body, at most ``limit`` bytes.

    Another content type, or none, is refused: browsers send those across sites without asking.

    Raises:
        HTTPError: its type is not JSON (415) or it is too large (413).
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
