"""Server-sent events: pieces of an answer as the engine makes them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from prefixkv.request import RequestOutput
from prefixkv.server.errors import error_of
from prefixkv.server.generation import Job, Piece, pieces, while_connected
from prefixkv.server.serving import Serving
from prefixkv.server.shapes import Object, Shape, envelope, usage

DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A response that closes its events however it ends, so that what runs is aborted."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def streamed(
    serving: Serving, request: Request, job: Job, shape: Shape, created: int
) -> EventStream:
    """Answer with events, once there is a first piece: until then an error is an HTTP status.

    Raises:
        ClientDisconnected: the client hung up before.
        PrefixKVError: the request failed before.
    """
    stream = pieces(serving, job)
    first = await while_connected(request, anext(stream))
    return EventStream(_events(serving, job, shape, created, first, stream))


async def _events(
    serving: Serving,
    job: Job,
    shape: Shape,
    created: int,
    first: Piece,
    stream: AsyncGenerator[Piece],
) -> AsyncGenerator[bytes]:
    async with aclosing(_objects(job, shape, created, first, stream)) as objects:
        try:
            async for item in objects:
                yield b"data: " + to_json(item) + b"\n\n"
        except Exception as error:
            _, body = error_of(error, engine_is_alive=serving.engine.is_alive)
            yield b"data: " + to_json(body) + b"\n\n"
    yield DONE


async def _objects(
    job: Job, shape: Shape, created: int, first: Piece, stream: AsyncGenerator[Piece]
) -> AsyncGenerator[Object]:
    counts = [RequestOutput("") for _ in job.prompts]
    piece_of = _Pieces(job, shape.piece, created)
    async with aclosing(stream):
        for index in range(job.num_choices):
            opening = shape.opening(index)
            if opening is not None:
                yield piece_of(opening)
        current: Piece | None = first
        while current is not None:
            at, output = current
            counts[at].extend(output)
            for sample in output.samples:
                delta = shape.delta(at * job.n + sample.index, sample)
                if delta is not None:
                    yield piece_of(delta)
            current = await anext(stream, None)
    if job.include_usage:
        yield envelope(job, created, shape.piece, []) | {"usage": usage(counts)}


class _Pieces:
    """Wraps choices; with usage asked for, every piece but the last says that it has none."""

    def __init__(self, job: Job, kind: str, created: int) -> None:
        self._job = job
        self._kind = kind
        self._created = created

    def __call__(self, choice: Object) -> Object:
        piece = envelope(self._job, self._created, self._kind, [choice])
        return piece | {"usage": None} if self._job.include_usage else piece
