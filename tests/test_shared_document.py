"""Requests over one document that arrive while it is being computed: it is computed once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from harness import Answer, Ask, Bench, same_bits
from tiny_model import write_tiny_model

BLOCK_SIZE = 16
DOCUMENT = [random.Random(1).randrange(5, 250) for _ in range(3000)]
TAILS = [[10 * i + j for j in range(5, 25)] for i in range(4)]
NEW_TOKENS = 4
# Blocks are shared whole: the document's last 8 tokens fill none and count to each tail.
SHARED = len(DOCUMENT) // BLOCK_SIZE * BLOCK_SIZE
TAIL = len(DOCUMENT) + len(TAILS[0]) - SHARED


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(write_tiny_model(tmp_path), num_blocks=1024, block_size=BLOCK_SIZE)


def computed_prompt_tokens(bench: Bench) -> int:
    stats = bench.engine.stats()
    return stats.computed_tokens - (stats.generation_tokens - len(TAILS))


def alone(bench: Bench) -> list[Answer]:
    return [
        bench.serve([Ask(DOCUMENT + tail, NEW_TOKENS, cache_salt=str(tail))])[0] for tail in TAILS
    ]


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_the_document_is_computed_once_and_each_tail_once(bench: Bench, gap: int) -> None:
    asks = [Ask(DOCUMENT + tail, NEW_TOKENS, at=gap * i) for i, tail in enumerate(TAILS)]
    answers = bench.serve(asks)
    assert computed_prompt_tokens(bench) == SHARED + len(TAILS) * TAIL
    assert same_bits(answers, alone(bench))


def test_when_the_first_is_aborted_half_way_the_others_still_end(bench: Bench) -> None:
    first, *others = [bench.add(Ask(DOCUMENT + tail, NEW_TOKENS)) for tail in TAILS]
    for _ in range(3):
        bench.step()
    bench.engine.abort(first.output.request_id)
    bench.run()
    assert [answer.output.finish_reason for answer in others] == ["length"] * 3
    stats = bench.engine.stats()
    # Nothing of what the first had computed is computed again.
    assert stats.computed_tokens - 3 * (NEW_TOKENS - 1) == SHARED + 3 * TAIL
    assert stats.num_free_blocks == stats.num_blocks
    assert same_bits(others, alone(bench)[1:])
