"""Runs the script on two engines and shows what the prefix cache saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich.console import Console

from prefixkv.config import EngineOptions
from prefixkv.demo.script import MAX_TOKENS, Script, default_script
from prefixkv.demo.table import ComparisonTable, Row
from prefixkv.engine.engine import Engine, Progress
from prefixkv.errors import ConfigError, EngineError
from prefixkv.request import RequestOutput, SamplingParams

_INTRODUCTION = (
    "One document is asked several questions, then a chat about it grows turn by turn. Each "
    "request runs with the prefix cache on and then, on a second engine that shares only the "
    "model's files, with it off. TTFT is the time to the first token of the answer; decoding is "
    "greedy.\n"
)


@dataclass(frozen=True, slots=True)
class Result:
    """An answer, the prompt tokens that were computed for it and the seconds that it took."""

    output: RequestOutput
    computed_tokens: int
    ttft: float
    total: float


def run(options: EngineOptions, console: Console, script: Script | None = None) -> None:
    """Run the demo: prints progress, a row for each request, and what was saved.

    Args:
        options: for both engines; ``prefix_cache`` is set to "off" for the second.
        script: what to ask; None is the document that comes with the package.

    Raises:
        ModelError, ConfigError: the model cannot be loaded, or its context is too short.
        EngineError: an answer was not the same with the cache on and off, or a step failed.
    """
    script = script or default_script()
    console.print(_INTRODUCTION, highlight=False)
    on, off = _load(options, console)
    table = ComparisonTable(console)
    table.print_header()
    rows = []
    for ask in script.asks():
        row = Row(ask.label, ask.question)
        prompt = on.tokenizer.apply_chat_template(ask.messages)
        _check_context(on, len(prompt))
        with table.row(row) as refresh:
            _compare(on, off, prompt, row, refresh)
        ask.answer = row.answer
        rows.append(row)
    _conclude(rows, console)


def _load(options: EngineOptions, console: Console) -> tuple[Engine, Engine]:
    system = "hash" if options.prefix_cache == "off" else options.prefix_cache
    engines = []
    for prefix_cache in (system, "off"):
        with _progress(console) as report:
            engine = Engine(replace(options, prefix_cache=prefix_cache), report)
        console.print(engine.summary, highlight=False, markup=False, style="dim")
        engines.append(engine)
    console.print()
    on, off = engines
    return on, off


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """Stages of long work: one line that changes on a terminal, a line for each stage elsewhere."""
    if console.is_terminal:
        with console.status("start") as status:
            yield lambda stage, done, total: status.update(_stage(stage, done, total))
        return
    seen: set[str] = set()

    def report(stage: str, _done: int, _total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            console.print(f"{stage} ...", highlight=False, markup=False)

    yield report


def _stage(stage: str, done: int, total: int) -> str:
    return f"{stage} {100 * done // total} %" if total else stage


def _check_context(engine: Engine, num_tokens: int) -> None:
    needed = num_tokens + MAX_TOKENS
    if needed > engine.max_model_len:
        raise ConfigError(
            f"the demo needs a context of {needed} tokens with this model's tokenizer, and "
            f"{engine.max_model_len} fit; give a model with a longer context, or a larger pool"
        )


def _compare(
    on: Engine, off: Engine, prompt: list[int], row: Row, refresh: Callable[[], None]
) -> None:
    """Fill in the row, piece by piece."""
    row.prompt_tokens = len(prompt)

    def show(output: RequestOutput) -> None:
        row.answer = " ".join(output.text.split())
        refresh()

    refresh()
    with_cache = _answer(on, prompt, show)
    row.cached_tokens = with_cache.output.num_cached_tokens
    row.computed_tokens = with_cache.computed_tokens
    row.ttft_on, row.total_on = with_cache.ttft, with_cache.total
    refresh()
    without = _answer(off, prompt, lambda _output: None)
    row.ttft_off, row.total_off = without.ttft, without.total
    row.same = with_cache.output.token_ids == without.output.token_ids


def _answer(engine: Engine, prompt: list[int], show: Callable[[RequestOutput], None]) -> Result:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    before = engine.stats().computed_tokens
    start = time.perf_counter()
    output = RequestOutput(engine.add(prompt, params))
    try:
        while not output.finished:
            for piece in engine.step():
                output.extend(piece)
                show(output)
        total = time.perf_counter() - start
    finally:  # an interrupt leaves nothing behind
        engine.abort(output.request_id)
    ttft = output.metrics.time_to_first_token
    if output.finish_reason == "error" or ttft is None:
        raise EngineError(f"a request of the demo failed: {output.error}")
    # All tokens of the answer but the last are computed too; they are no part of the prompt.
    computed = engine.stats().computed_tokens - before - (len(output.token_ids) - 1)
    return Result(output, computed, ttft, total)


def _conclude(rows: Sequence[Row], console: Console) -> None:
    differing = [row.label for row in rows if not row.same]
    if differing:
        raise EngineError(
            f"with the cache on and off the answers differ in: {', '.join(differing)}; "
            "a prefix hit must never change an answer, so please report this"
        )
    prompt = sum(row.prompt_tokens or 0 for row in rows)
    saved = prompt - sum(row.computed_tokens or 0 for row in rows)
    on, off = sum(row.total_on for row in rows), sum(row.total_off for row in rows)
    console.print(
        f"All {len(rows)} answers are the same with the cache on and off.", highlight=False
    )
    console.print(
        f"The cache saved {saved:,} of {prompt:,} prompt tokens ({100 * saved / prompt:.0f} %) and "
        f"{off - on:.1f} of {off:.1f} seconds: {off / on:.1f} times as fast.",
        style="bold",
        highlight=False,
    )
