"""The demo, whole, on a tiny model, with its output recorded."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from prefixkv import demo
from prefixkv.config import EngineOptions
from prefixkv.demo.table import Row
from prefixkv.engine.engine import Engine
from prefixkv.errors import ConfigError, EngineError
from prefixkv.model.tokenizer import load_tokenizer
from prefixkv.request import RequestOutput

BLOCK = 16
SCRIPT = demo.Script(
    document="Nine lamps light the quay. The harbour master is Mira Vance. " * 8,
    questions=("How many lamps?", "Who is the harbour master?", "What is lit?"),
    turns=("Hello", "Who?", "And the lamps?"),
)
NUM_ASKS = len(SCRIPT.questions) + len(SCRIPT.turns)
# prompt, cached, computed, seconds with the cache on and off
NUMBERS = re.compile(r"([\d,]+)\s+([\d,]+)\s+([\d,]+)\s+[\d.]+ s\s+[\d.]+ s")


def run(
    model: Path,
    *,
    terminal: bool = False,
    colours: Literal["standard"] | None = None,
    script: demo.Script = SCRIPT,
    **options: object,
) -> str:
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=terminal, color_system=colours)
    settings = {"num_blocks": 512, "block_size": BLOCK, **options}
    demo.run(EngineOptions(model=model, **settings), console, script)  # type: ignore[arg-type]
    return output.getvalue()


@pytest.fixture(scope="module")
def printed(model: Path) -> str:
    return run(model)


def rows(text: str) -> list[tuple[int, int, int]]:
    found = [match.groups() for match in NUMBERS.finditer(text)]
    return [tuple(int(number.replace(",", "")) for number in row) for row in found]  # type: ignore[misc]


def test_every_request_has_a_row_with_its_question(printed: str) -> None:
    assert len(rows(printed)) == NUM_ASKS
    assert all(question in printed for question in SCRIPT.questions + SCRIPT.turns)


def test_cached_and_computed_tokens_add_up_to_the_prompt(printed: str) -> None:
    assert all(prompt == cached + computed for prompt, cached, computed in rows(printed))


def test_a_question_computes_only_what_follows_the_document(model: Path, printed: str) -> None:
    tokenizer = load_tokenizer(model, {})
    first, *others = (
        tokenizer.apply_chat_template([SCRIPT.opening(question)]) for question in SCRIPT.questions
    )
    for prompt, (_, cached, _) in zip(others, rows(printed)[1:], strict=False):
        pairs = zip(first, prompt, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert cached >= shared // BLOCK * BLOCK > 0


def test_a_turn_of_the_chat_finds_all_that_came_before(printed: str) -> None:
    turns = rows(printed)[len(SCRIPT.questions) :]
    for before, turn in itertools.pairwise(turns):
        assert turn[0] > before[0]
        assert turn[1] >= before[0] // BLOCK * BLOCK


def test_the_last_line_tells_the_saving(printed: str) -> None:
    told = re.search(r"saved ([\d,]+) of ([\d,]+) prompt tokens", printed)
    assert told is not None
    saved, prompt = (int(number.replace(",", "")) for number in told.groups())
    assert saved == sum(cached for _, cached, _ in rows(printed))
    assert prompt == sum(tokens for tokens, _, _ in rows(printed))


def test_equal_answers_are_told(printed: str) -> None:
    assert f"All {NUM_ASKS} answers are the same" in printed


def test_the_closing_lines_have_no_colours(model: Path) -> None:
    *_, equal, saved = run(model, terminal=True, colours="standard").strip().splitlines()
    assert equal == f"All {NUM_ASKS} answers are the same with the cache on and off."
    assert re.fullmatch(r"\x1b\[1m[^\x1b]+\x1b\[0m", saved)  # bold as a whole


@pytest.mark.parametrize(
    ("same", "mark"), [(None, ""), (True, ""), (False, " (ANOTHER with the cache off)")]
)
def test_only_an_answer_that_differs_is_marked(same: bool | None, mark: str) -> None:
    row = Row("Question 1", "Who?", answer="Mira.", same=same)
    assert row.text().plain.partition("Mira.")[2] == mark


def test_the_second_engine_has_no_cache(printed: str) -> None:
    assert re.findall(r"prefix cache (\w+)", printed)[-2:] == ["hash", "off"]


def test_the_cache_is_on_for_one_engine_even_if_the_options_turn_it_off(model: Path) -> None:
    assert rows(run(model, prefix_cache="off"))[1][1] > 0


def test_a_terminal_gets_the_same_rows(model: Path, printed: str) -> None:
    assert sorted(set(rows(run(model, terminal=True)))) == sorted(set(rows(printed)))


def test_an_answer_that_differs_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def lie(engine: Engine) -> list[RequestOutput]:
        pieces = step(engine)
        if engine.options.prefix_cache == "off":
            for piece in pieces:
                piece.samples[0].token_ids = [token + 1 for token in piece.token_ids]
        return pieces

    monkeypatch.setattr(Engine, "step", lie)
    with pytest.raises(EngineError, match=r"answers differ in: Question 1, Question 2"):
        run(model)


def test_a_context_that_is_too_short_is_told(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"the demo needs a context of \d+ tokens.* 128 fit"):
        run(model, max_model_len=128)


def test_the_script_of_the_package_asks_for_what_its_document_states() -> None:
    script = demo.default_script()
    stated = ("made in Sheffield in 1862", "the bus stop", "the hammer drill", "94 kilograms")
    stated += ("Bertha", "about ninety", "Peter Lindqvist", "Since 2016")
    assert len(stated) == len(script.questions) + len(script.turns)
    assert all(fact in script.document for fact in stated)
