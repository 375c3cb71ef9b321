"""The engine behind asyncio: one thread computes, any number of coroutines wait."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from prefixkv.config import EngineOptions
from prefixkv.engine.engine import Engine, EngineStats, Progress
from prefixkv.engine.reservations import reservation_of
from prefixkv.errors import EngineError, PrefixKVError, RequestError
from prefixkv.request import Params, RequestOutput, Reservation, SamplingParams

T = TypeVar("T")


class _Stream:
    """Outputs of one request on their way from the engine's thread to one coroutine."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[RequestOutput | PrefixKVError] = asyncio.Queue()
        self.reservation: Reservation | None = None  # what came of it; the engine thread's own


@dataclass(frozen=True, slots=True)
class _Add:
    stream: _Stream
    prompt: list[int]
    params: Params
    cache_salt: str | None
    reserve: bool


@dataclass(frozen=True, slots=True)
class _Abort:
    stream: _Stream


@dataclass(frozen=True, slots=True)
class _Call:
    """A function for the engine's thread, and where its result goes."""

    run: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]


_Command = _Add | _Abort | _Call


class AsyncEngine:
    """Runs an ``Engine`` in a thread of its own.

    The thread alone touches the engine while it runs; coroutines hand it commands, which it takes
    between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.options = engine.options
        self.model_name = engine.model_name
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self.summary = engine.summary
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # the thread's own
        self._ids = itertools.count()
        self._thread: threading.Thread | None = None
        self._lifecycle = asyncio.Lock()  # one start or stop at a time
        self._stopping = False
        self._death: str | None = "the engine was not started"

    @classmethod
    def from_options(cls, options: EngineOptions, progress: Progress | None = None) -> AsyncEngine:
        """Load the model and build the engine; blocks, and raises what ``Engine`` raises."""
        return cls(Engine(options, progress))

    @property
    def is_alive(self) -> bool:
        return self._death is None

    async def start(self) -> None:
        """Start the engine's thread; does nothing if it runs. It may be started again after its
        end.
        """
        async with self._lifecycle:
            if self._thread is not None and self._death is None and not self._stopping:
                return
            await self._join()
            self._commands = queue.SimpleQueue()  # nothing of an earlier life
            self._death, self._stopping = None, False
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    async def stop(self) -> None:
        """End all requests as aborted and join the thread."""
        async with self._lifecycle:
            self._stopping = True
            self._commands.put(None)
            await self._join()

    async def _join(self) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def generate(
        self,
        prompt: list[int],
        params: Params,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Pieces of the output as they come; the last is ``finished``.

        Closing the iterator, or cancelling the task that waits on it, aborts the request.

        Raises:
            RequestError, ContextLengthError: it cannot be served; before the first piece.
            EngineError: the engine is not running, or stopped meanwhile.
        """
        return self._ask(
            request_id or self._new_id("async"), prompt, params, cache_salt, reserve=False
        )

    async def reserve(
        self, prompt: list[int], *, request_id: str | None = None, cache_salt: str | None = None
    ) -> Reservation:
        """Compute a prompt and hold its K/V until ``release``, as ``LLM.reserve`` does.

        Cancelling the task that waits on it aborts it: nothing is reserved.

        Raises:
            RequestError, ContextLengthError: it cannot be served, or too few blocks would be left.
            EngineError: the engine is not running, or stopped meanwhile.
        """
        request_id = request_id or self._new_id("reservation")
        output = RequestOutput(request_id)
        pieces = self._ask(request_id, prompt, SamplingParams(), cache_salt, reserve=True)
        async with aclosing(pieces):
            async for piece in pieces:
                output.extend(piece)
        return reservation_of(output)

    @property
    def reservations(self) -> list[Reservation]:
        """What is reserved, the oldest first; may be called from any thread."""
        return self.engine.reservations

    async def release(self, reservation_id: str) -> Reservation:
        """End a reservation.

        Raises:
            RequestError: there is none of this id.
            EngineError: the engine is not running.
        """
        return await self._call(lambda: self.engine.release(reservation_id))

    async def abort_sample(self, request_id: str, sample: int) -> bool:
        """End one sample of a request, whose stream tells it; the others go on.

        Returns:
            False if there is no such request, or sample, any more.

        Raises:
            RequestError: it is a beam search.
            EngineError: the engine is not running.
        """

        def abort() -> bool:
            aborted = self.engine.abort(request_id, sample)
            self._deliver([] if aborted is None else [aborted])
            return aborted is not None

        return await self._call(abort)

    async def _call(self, run: Callable[[], T]) -> T:
        """The result of a function that runs in the engine's thread."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        self._put(_Call(run, loop, result))
        return await result

    def _put(self, command: _Command) -> None:
        if self._death is None:
            self._commands.put(command)
        if self._death is not None:  # or meanwhile: nobody may ever look at the command
            raise EngineError(self._death)

    def _new_id(self, kind: str) -> str:
        return f"{kind}-{next(self._ids)}"

    async def _ask(
        self,
        request_id: str,
        prompt: list[int],
        params: Params,
        cache_salt: str | None,
        *,
        reserve: bool,
    ) -> AsyncGenerator[RequestOutput]:
        if self._death is not None:
            raise EngineError(self._death)
        self.engine.validate(prompt, params, cache_salt)
        stream = _Stream(request_id)
        self._put(_Add(stream, prompt, params, cache_salt, reserve))
        finished = False
        try:
            while not finished:
                item = await stream.items.get()
                finished = isinstance(item, PrefixKVError) or item.finished
                if isinstance(item, PrefixKVError):
                    raise item
                yield item
        finally:
            if not finished:
                self._commands.put(_Abort(stream))

    def stats(self) -> EngineStats:
        """Counts and totals; may be called from any thread."""
        return self.engine.stats()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._deliver(self.engine.step())
            self._death = "the engine was stopped"
        except Exception as error:  # a fault of ours: tell every waiter rather than hang it
            self._death = f"the engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._end_all()

    def _take_commands(self) -> bool:
        """Carry out what has been asked; waits while there is nothing else to do. False to stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Abort):
                self._abort(command.stream)
            elif isinstance(command, _Call):
                _carry_out(command)
            else:
                self._add(command)

    def _add(self, command: _Add) -> None:
        stream = command.stream
        try:
            self.engine.add(
                command.prompt,
                command.params,
                request_id=stream.request_id,
                cache_salt=command.cache_salt,
                reserve=command.reserve,
            )
        except Exception as error:  # this request's alone, whatever it is
            known = error if isinstance(error, PrefixKVError) else EngineError(repr(error))
            _post(stream.loop, stream.items.put_nowait, known)
            return
        self._streams[stream.request_id] = stream

    def _abort(self, stream: _Stream) -> None:
        # Not by its id: that may be in use by another request, for which this one was refused.
        if self._streams.get(stream.request_id) is stream:
            aborted = self.engine.abort(stream.request_id)
            if aborted is not None:
                self._deliver([aborted])
        elif stream.reservation is not None:  # made, but whoever waited had gone
            with suppress(RequestError):  # others can release it too
                self.engine.release(stream.reservation.id)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams[output.request_id]
            if output.finished:
                del self._streams[output.request_id]
                stream.reservation = output.reservation
            by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, items in by_loop.items():
            _post(loop, _put_all, items)

    def _end_all(self) -> None:
        error = EngineError(self._death or "the engine stopped")
        for stream in self._streams.values():
            _post(stream.loop, stream.items.put_nowait, error)
        for request_id in self._streams:
            self.engine.abort(request_id)
        self._streams.clear()
        while True:  # what came in too late
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Add):
                late = command.stream
                _post(late.loop, late.items.put_nowait, error)
            elif isinstance(command, _Call):
                _post(command.loop, _fail, (command.result, error))


def _carry_out(command: _Call) -> None:
    try:
        result = command.run()
    except Exception as error:  # the caller's alone
        _post(command.loop, _fail, (command.result, error))
    else:
        _post(command.loop, _succeed, (command.result, result))


def _succeed(end: tuple[asyncio.Future[Any], Any]) -> None:
    future, result = end
    if not future.cancelled():
        future.set_result(result)


def _fail(end: tuple[asyncio.Future[Any], Exception]) -> None:
    future, error = end
    if not future.cancelled():
        future.set_exception(error)


def _put_all(items: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in items:
        stream.items.put_nowait(output)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[T], None], argument: T) -> None:
    try:
        loop.call_soon_threadsafe(call, argument)
    except RuntimeError:  # the loop is closed, and with it whoever waited
        return
