"""Running the choices of one HTTP request, and ending them when its client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from prefixkv.errors import EngineError, RequestError
from prefixkv.request import BeamSearchParams, Params, RequestOutput
from prefixkv.server.serving import Serving

MAX_REQUEST_CHOICES = 1024

# The number of a prompt, and what is new of it.
Piece = tuple[int, RequestOutput]
T = TypeVar("T")


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request in the engine's terms: ``n`` choices for each prompt.

    Choice ``c`` of prompt ``p`` has the index ``p * n + c``.
    """

    id: str
    model: str
    prompts: Sequence[list[int]]
    params: Params
    n: int
    cache_salt: str | None
    stream: bool
    include_usage: bool

    def __post_init__(self) -> None:
        if self.num_choices > MAX_REQUEST_CHOICES:
            raise RequestError(
                f"{len(self.prompts)} prompts with n = {self.n} are {self.num_choices} choices; "
                f"at most {MAX_REQUEST_CHOICES} are allowed",
                param="n",
            )

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


async def pieces(serving: Serving, job: Job) -> AsyncGenerator[Piece]:
    """The pieces of all prompts as they come; closing this aborts what still runs.

    Raises:
        RequestError: the engine refuses the request.
        EngineError: the engine failed or stopped before the end.
    """
    streams = []
    for index, prompt in enumerate(job.prompts):
        stream = serving.engine.generate(
            prompt, job.params, request_id=f"{job.id}-{index}", cache_salt=job.cache_salt
        )
        streams.append(serving.latencies.observe(stream))
    try:
        async with aclosing(_merged(streams)) as merged:
            async for index, piece in merged:
                if any(each.finish_reason in ("abort", "error") for each in piece.samples):
                    raise EngineError(
                        piece.error or "the request was aborted: the server is stopping"
                    )
                yield index, piece
    except RequestError as error:
        if error.param == "width":  # which HTTP calls otherwise
            is_n = isinstance(job.params, BeamSearchParams) and job.params.width == job.n
            error.param = "n" if is_n else "best_of"
        raise


async def _merged(streams: Sequence[AsyncGenerator[RequestOutput]]) -> AsyncGenerator[Piece]:
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[RequestOutput]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(stream):
                async for piece in stream:
                    queue.put_nowait((index, piece))
        except Exception as error:
            end = error
        queue.put_nowait((index, end))

    tasks: list[asyncio.Task[None]] = []
    running = len(streams)
    try:
        for index, stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(index, stream)))
            await asyncio.sleep(0)  # the engine looks at a whole prompt: let others run between two
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        await _cancel(tasks)


async def collected(serving: Serving, job: Job) -> list[RequestOutput]:
    """The whole outputs of all prompts, in their order."""
    outputs = [RequestOutput(f"{job.id}-{index}") for index in range(len(job.prompts))]
    async with aclosing(pieces(serving, job)) as stream:
        async for index, piece in stream:
            outputs[index].extend(piece)
    return outputs


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client hangs up.

    The body must have been read: then the next message can only be the end of the connection.

    Raises:
        ClientDisconnected: it did.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        await _cancel((task, gone))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
