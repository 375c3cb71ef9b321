"""An engine for one person at a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from types import TracebackType

from prefixkv.cli.progress import progress
from prefixkv.config import EngineOptions
from prefixkv.request import RequestOutput, SamplingParams


class Session:
    """Loads an engine and drives it from plain calls; a context manager that stops it."""

    def __init__(self, options: EngineOptions) -> None:
        from prefixkv.engine.async_engine import AsyncEngine  # torch: not needed for --help

        with progress() as report:
            self.engine = AsyncEngine.from_options(options, report)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Session:
        self._runner.run(self.engine.start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._runner.run(self.engine.stop())
        finally:
            self._runner.close()

    def stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        output: RequestOutput,
        write: Callable[[str], None],
    ) -> None:
        """Generate, write each piece of text and add it to ``output``.

        Raises:
            KeyboardInterrupt: Ctrl-C; the request is aborted and ``output`` is what there is.
            RequestError: the prompt cannot be served.
        """
        self._runner.run(self._stream(prompt, params, output, write))

    async def _stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        output: RequestOutput,
        write: Callable[[str], None],
    ) -> None:
        async with aclosing(self.engine.generate(prompt, params)) as pieces:
            async for piece in pieces:
                output.extend(piece)
                write(piece.text)


def counts(output: RequestOutput) -> str:
    """What a request cost, as one line."""
    computed = output.num_prompt_tokens - output.num_cached_tokens
    first = output.metrics.time_to_first_token
    parts = [
        f"prompt {output.num_prompt_tokens}",
        f"cached {output.num_cached_tokens}",
        f"computed {computed}",
        f"output {len(output.token_ids)} tokens",
    ]
    if first is not None:
        parts.append(f"first token {first:.3f} s")
    return " · ".join(parts)
