"""The engine behind asyncio: streams, aborts, errors, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixkv.config import EngineOptions
from prefixkv.engine.async_engine import AsyncEngine
from prefixkv.errors import EngineError, RequestError
from prefixkv.request import BeamSearchParams, RequestOutput, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(10, 40))


def serve(model: Path, use: Callable[[AsyncEngine], Awaitable[None]]) -> AsyncEngine:
    """Run a coroutine against a started engine; afterwards every block must be free."""

    async def main() -> AsyncEngine:
        engine = AsyncEngine.from_options(EngineOptions(model=model, num_blocks=128))
        await engine.start()
        try:
            await asyncio.wait_for(use(engine), timeout=60)
        finally:
            await engine.stop()
        return engine

    engine = asyncio.run(main())
    assert engine.stats().num_free_blocks == 128
    return engine


async def collect(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    whole = RequestOutput("")
    async for piece in engine.generate(prompt, params):
        whole.extend(piece)
    return whole


async def until_idle(engine: AsyncEngine) -> None:
    while engine.stats().num_running or engine.stats().num_waiting:
        await asyncio.sleep(0.001)


def test_pieces_come_one_token_at_a_time(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        pieces = [piece async for piece in engine.generate(PROMPT, SHORT)]
        assert [len(piece.token_ids) for piece in pieces] == [1] * 8
        assert [piece.finished for piece in pieces] == [False] * 7 + [True]

    serve(model, use)


def test_many_at_once_answer_as_one_alone(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        prompts = [[*PROMPT, i] for i in range(20)]
        crowd = await asyncio.gather(*(collect(engine, prompt, SHORT) for prompt in prompts))
        for prompt, output in zip(prompts, crowd, strict=True):
            assert (await collect(engine, prompt, SHORT)).token_ids == output.token_ids

    serve(model, use)


def test_one_of_four_samples_can_be_ended_while_the_others_go_on(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        output = RequestOutput("")
        params = replace(LONG, n=4, temperature=1.0, seed=1)
        async for piece in engine.generate(PROMPT, params, request_id="four"):
            if not output.samples:
                assert await engine.abort_sample("four", 2)
                assert not await engine.abort_sample("four", 2)
                assert not await engine.abort_sample("five", 2)
            output.extend(piece)
        ends = [sample.finish_reason for sample in output.samples]
        assert ends == ["length", "length", "abort", "length"]
        assert len(output.samples[2].token_ids) < 200

    serve(model, use)


def test_a_beam_search_is_aborted_with_its_stream(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        params = BeamSearchParams(width=4, max_tokens=80, ignore_eos=True)
        waiting = asyncio.create_task(collect(engine, PROMPT, params))
        while not engine.stats().num_running:
            await asyncio.sleep(0.001)
        waiting.cancel()
        await until_idle(engine)
        (best, *_) = (await collect(engine, PROMPT, params)).samples
        assert best.score is not None

    serve(model, use)


def test_closing_the_stream_aborts_the_request(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        assert engine.stats().num_running == 1
        await stream.aclose()
        await until_idle(engine)
        assert engine.stats().num_free_blocks == 128

    assert serve(model, use).stats().generation_tokens < 200


def test_cancelling_the_task_aborts_the_request_before_its_first_token(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        task = asyncio.create_task(collect(engine, PROMPT, LONG))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(engine)

    serve(model, use)


def test_a_bad_request_raises_before_the_first_piece(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="empty"):
            await collect(engine, [], SHORT)

    serve(model, use)


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        first = engine.generate(PROMPT, LONG, request_id="one")
        await anext(first)
        with pytest.raises(RequestError, match="'one' is in use"):
            await anext(engine.generate(PROMPT, SHORT, request_id="one"))
        assert len([piece async for piece in first]) == 199

    serve(model, use)


def test_stopping_ends_what_runs_with_an_error(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        await engine.stop()
        with pytest.raises(EngineError, match="stopped"):
            async for _ in stream:
                pass
        with pytest.raises(EngineError, match="stopped"):
            await collect(engine, PROMPT, SHORT)

    serve(model, use)


def test_an_engine_that_was_not_started_says_so(model: Path) -> None:
    async def main() -> None:
        engine = AsyncEngine.from_options(EngineOptions(model=model, num_blocks=8))
        with pytest.raises(EngineError, match="not started"):
            await collect(engine, PROMPT, SHORT)

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_engine_reaches_every_waiter(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(engine: AsyncEngine) -> None:
        waiting = [asyncio.create_task(collect(engine, PROMPT, LONG)) for _ in range(3)]
        await asyncio.sleep(0.02)

        def fail(*_: object) -> None:
            raise AssertionError("a bug")

        monkeypatch.setattr(engine.engine.scheduler, "update", fail)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, EngineError) and "a bug" in str(result) for result in results)
        assert not engine.is_alive

    serve(model, use)


def test_a_failing_forward_pass_ends_its_request_and_the_engine_lives(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(engine: AsyncEngine) -> None:
        def fail(*_: object) -> torch.Tensor:
            raise RuntimeError("out of luck")

        with monkeypatch.context() as patch:
            patch.setattr(engine.engine.runner.model, "forward", fail)
            assert (await collect(engine, PROMPT, SHORT)).finish_reason == "error"
        assert (await collect(engine, PROMPT, SHORT)).finish_reason == "length"

    serve(model, use)


@pytest.mark.parametrize("salt", ["\ud800", b"salt", 5])
def test_a_salt_that_is_no_text_fails_its_own_request_alone(model: Path, salt: Any) -> None:
    async def use(engine: AsyncEngine) -> None:
        other = engine.generate(PROMPT, SHORT)
        await anext(other)
        with pytest.raises(RequestError, match="cache_salt"):
            await anext(engine.generate(PROMPT, SHORT, cache_salt=salt))
        assert len([piece async for piece in other]) == 7

    serve(model, use)


def test_what_the_engine_cannot_take_fails_its_own_request_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(engine: AsyncEngine) -> None:
        def fail(*_: object, **__: object) -> None:
            raise TypeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(engine.engine, "add", fail)
            with pytest.raises(EngineError, match="a bug"):
                await collect(engine, PROMPT, SHORT)
        assert (await collect(engine, PROMPT, SHORT)).finish_reason == "length"

    serve(model, use)


def test_giving_up_a_request_whose_id_is_in_use_leaves_the_other_alone(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        first = engine.generate(PROMPT, LONG, request_id="same")
        await anext(first)
        second = asyncio.ensure_future(anext(engine.generate([4], LONG, request_id="same")))
        await asyncio.sleep(0)
        second.cancel()
        assert [piece async for piece in first][-1].finish_reason == "length"

    serve(model, use)


def test_an_engine_may_be_started_again_after_its_end(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        await engine.stop()
        await engine.stop()
        await engine.start()
        assert (await collect(engine, PROMPT, SHORT)).finish_reason == "length"

    serve(model, use)


def test_a_start_during_a_stop_waits_for_it(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        await engine.start()
        await stopping
        with pytest.raises(EngineError, match="stopped"):
            async for _ in stream:
                pass
        assert (await collect(engine, PROMPT, SHORT)).finish_reason == "length"

    serve(model, use)


def test_a_start_after_a_stop_that_was_cancelled_waits_for_its_end(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        await anext(engine.generate(PROMPT, LONG))
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        await engine.start()
        assert (await collect(engine, PROMPT, SHORT)).finish_reason == "length"

    serve(model, use)
