"""The engine benchmark: its loop on a side made up here, and the whole on a tiny model."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tiny_model import write_tiny_model

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCALE = 0.112  # a document of 336 tokens, which is 21 blocks
DOCUMENT, QUESTION, OUTPUT, BLOCK = 336, 4, 4, 16


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


class EchoSide:
    """Answers with the last token of the prompt, one token a step for every request."""

    def __init__(self, piece: Callable[..., Any]) -> None:
        self.piece = piece
        self.prompts: list[list[int]] = []
        self.most_in_flight = 0
        self._left: dict[str, int] = {}
        self._computed = 0

    def reset(self, common: list[int]) -> None:
        assert not self._left
        assert not common

    def add(self, prompt: list[int], max_tokens: int) -> str:
        request_id = str(len(self.prompts))
        self.prompts.append(prompt)
        self._left[request_id] = max_tokens
        self._computed += len(prompt) + max_tokens - 1
        self.most_in_flight = max(self.most_in_flight, len(self._left))
        return request_id

    def step(self) -> list[Any]:
        self._left = {name: left - 1 for name, left in self._left.items()}
        pieces = [
            self.piece(name, [self.prompts[int(name)][-1]], left == 0, 0)
            for name, left in self._left.items()
        ]
        self._left = {name: left for name, left in self._left.items() if left}
        return pieces

    def computed_tokens(self) -> int:
        return self._computed


@pytest.fixture
def run_echo(load: Callable[[str], ModuleType]) -> Callable[..., tuple[EchoSide, Any]]:
    loop, workloads = load("closed_loop"), load("workloads")

    def run(chains: list[list[tuple[list[int], int]]], concurrency: int) -> tuple[EchoSide, Any]:
        side = EchoSide(loop.Piece)
        turns = [[workloads.Turn(*turn) for turn in chain] for chain in chains]
        workload = workloads.Workload("echo", "", concurrency, turns)
        return side, loop.ClosedLoop(side, workload).run()

    return run


def test_a_turn_follows_its_history_and_answers(run_echo: Callable[..., Any]) -> None:
    side, _ = run_echo([[([1, 2], 2), ([3], 1), ([4], 1)]], 1)
    assert side.prompts == [[1, 2], [1, 2, 2, 2, 3], [1, 2, 2, 2, 3, 3, 4]]


def test_conversations_take_turns(run_echo: Callable[..., Any]) -> None:
    side, _ = run_echo([[([1], 1), ([2], 1)], [([5], 1), ([6], 1)]], 1)
    assert [prompt[-1] for prompt in side.prompts] == [1, 5, 2, 6]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_loop_keeps_so_many_in_flight(run_echo: Callable[..., Any], concurrency: int) -> None:
    side, measured = run_echo([[([i], 1 + i % 3)] for i in range(8)], concurrency)
    assert side.most_in_flight == concurrency
    assert len(measured.ttft_s) == 8


def test_computed_tokens_are_the_prompts_alone(run_echo: Callable[..., Any]) -> None:
    _, measured = run_echo([[([1, 2, 3], 5)], [([4], 2)]], 2)
    assert measured.computed_tokens == measured.prompt_tokens == 4
    assert measured.output_tokens == 7


def test_the_percentile_is_a_value_that_was_measured(load: Callable[[str], ModuleType]) -> None:
    percentile = load("closed_loop").percentile
    assert percentile(range(1, 21), 95) == 19
    assert percentile([7.0], 95) == 7.0


def test_workloads_have_the_stated_sizes(load: Callable[[str], ModuleType]) -> None:
    made = {w.name: w for w in load("workloads").make_workloads(range(20_000))}
    prompts = {name: sum(len(t.tokens) for c in w.chains for t in c) for name, w in made.items()}
    assert prompts["W1-c1"] == prompts["W1-c4"] == 16 * 3040
    assert prompts["W2-c1"] == prompts["W2-c4"] == 4 * 6 * 150
    assert prompts["W3"] == 64 * 401
    assert prompts["W3b"] == 64 * 140
    assert prompts["cold"] == 4 * 1024
    assert prompts["decode-8"] == 8 * 16
    assert prompts["unshared"] == 16 * 401


def test_unshared_prompts_begin_differently(load: Callable[[str], ModuleType]) -> None:
    workloads = load("workloads")
    for tokens in (range(20_000), range(100)):  # the second text is used many times over
        (made,) = (w for w in workloads.make_workloads(tokens) if w.name == "unshared")
        assert len({tuple(chain[0].tokens[:BLOCK]) for chain in made.chains}) == 16


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("bench")
    model = write_tiny_model(directory / "tiny")
    command = [sys.executable, str(BENCHMARKS / "bench_engine.py"), "--model", str(model)]
    command += ["--scale", str(SCALE), "--repeats", "2", "--kv-cache-memory", "32MiB"]
    command += ["--workload", "W1", "--workload", "W2-c4", "--json", str(directory / "out.json")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    written: dict[str, Any] = json.loads((directory / "out.json").read_text())
    return {**written, "printed": done.stdout}


def medians(report: dict[str, Any], workload: str) -> dict[str, dict[str, Any]]:
    (result,) = (r for r in report["results"] if r["workload"] == workload)
    return {name: side["median"] for name, side in result["sides"].items()}


def test_only_what_was_named_is_run(report: dict[str, Any]) -> None:
    assert [result["workload"] for result in report["results"]] == ["W1-c1", "W1-c4", "W2-c4"]


@pytest.mark.parametrize("workload", ["W1-c1", "W1-c4"])
def test_the_cache_computes_the_document_once(report: dict[str, Any], workload: str) -> None:
    on = medians(report, workload)["cache on"]
    assert on["computed_tokens"] == DOCUMENT + 16 * QUESTION
    assert on["cached_tokens"] == 15 * DOCUMENT


@pytest.mark.parametrize("workload", ["W1-c1", "W1-c4", "W2-c4"])
def test_without_a_cache_all_is_computed(report: dict[str, Any], workload: str) -> None:
    off = medians(report, workload)["cache off"]
    assert off["computed_tokens"] == off["prompt_tokens"]
    assert off["cached_tokens"] == 0


def test_cached_and_computed_tokens_make_the_prompts(report: dict[str, Any]) -> None:
    on = medians(report, "W2-c4")["cache on"]
    assert 0 < on["cached_tokens"] == on["prompt_tokens"] - on["computed_tokens"]


def test_sides_ran_as_often_as_asked_and_agree(report: dict[str, Any]) -> None:
    for result in report["results"]:
        assert all(len(side["runs"]) == 2 for side in result["sides"].values())
        assert result["same_answers"]


def test_ratios_are_of_the_medians(report: dict[str, Any]) -> None:
    for result in report["results"]:
        on, off = (result["sides"][name]["median"] for name in ("cache on", "cache off"))
        assert result["ratios"]["cache off"]["run_s"] == off["run_s"] / on["run_s"]


def test_the_report_names_the_machine(report: dict[str, Any]) -> None:
    assert report["machine"]["cpu"] in report["printed"]
    assert {"prefixkv", "torch", "python"} <= set(report["machine"]["versions"])
    assert "float32" in report["machine"]["engine"] or "bfloat16" in report["machine"]["engine"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--workload", "W9"], "there is no workload 'W9'; there are W1-c1,"),
        (["--model", "missing"], "missing: nothing is there"),
        (["--repeats", "0"], "0 is not above 0"),
    ],
)
def test_what_cannot_be_run_is_told(arguments: list[str], told: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_engine.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert told in done.stderr
