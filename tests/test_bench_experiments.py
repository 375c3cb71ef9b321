"""The experiments of the PagedAttention paper, in short form on a tiny model."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixkv import LLM, SamplingParams
from tiny_model import random_tokens

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script: str, model: Path, tmp_path: Path, *arguments: str) -> tuple[Any, str]:
    """What a script writes and prints."""
    command = [sys.executable, str(BENCHMARKS / script), "--model", str(model), *arguments]
    command += ["--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads((tmp_path / "out.json").read_text()), done.stdout


def medians(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: side["median"] for name, side in result["sides"].items()}


def assert_found(figures: dict[str, Any], common: int) -> None:
    """What is common, and little more: the text repeats itself here and there."""
    assert common <= figures["cached_tokens"] <= common + figures["prompt_tokens"] // 20


def test_a_few_shot_prefix_is_found_by_all_systems(model: Path, tmp_path: Path) -> None:
    short = ("--requests", "6", "--scale", "0.5", "--repeats", "2", "--kv-cache-memory", "32MiB")
    written, printed = run("bench_fewshot.py", model, tmp_path, *short)
    for result, prefix in zip(written["results"], (40, 170), strict=True):
        sides = medians(result)
        assert sides["off"]["cached_tokens"] == 0
        assert sides["paged"]["cached_tokens"] == 6 * prefix  # reserved before the run
        full = prefix // 16 * 16
        assert sides["hash"]["cached_tokens"] == sides["radix"]["cached_tokens"]
        assert_found(sides["hash"], 5 * full)
        assert result["same_answers"]
    assert "the paper's gain: 3.58x" in printed


def test_the_block_size_decides_what_is_found(model: Path, tmp_path: Path) -> None:
    short = ("--workload", "W3", "--scale", "0.2", "--repeats", "1", "--kv-cache-memory", "32MiB")
    written, printed = run("bench_block_size.py", model, tmp_path, *short)
    (result,) = written["results"]
    for size, figures in medians(result).items():
        assert_found(figures, 63 * (68 // int(size) * int(size)))
        assert figures["cached_tokens"] + figures["computed_tokens"] == figures["prompt_tokens"]
    assert result["same_answers"]
    assert "answers of all runs are the same" in printed


def test_sharing_saves_more_with_more_sequences_and_most_in_beams(
    model: Path, tmp_path: Path
) -> None:
    short = ("--system", "paged", "--requests", "4", "--scale", "0.3")
    written, _ = run("bench_sharing.py", model, tmp_path, *short)
    share = {
        (each["set"], each["kind"], each["width"]): 1 - each["held"] / each["without"]
        for each in written
    }
    assert len(share) == 12
    for (lengths, kind, width), saved in share.items():
        assert 0 <= saved < 1 - 1 / width
        if kind == "beam search":
            assert saved > share[lengths, "sampling", width]
    assert share["long", "sampling", 6] > share["long", "sampling", 2]


def test_saved_blocks_are_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    llm = LLM(model, num_blocks=100, token_budget=1000)
    params = SamplingParams(n=4, seed=3, temperature=2.0, max_tokens=8, ignore_eos=True)
    llm.engine.add(random_tokens(1000, llm.engine.vocab_size), params)
    saved = importlib.import_module("bench_sharing").Saved()
    for _ in range(2):
        llm.engine.step()
        (request,) = llm.engine.scheduler.running
        saved.add(request, 16)
    # 63 blocks for all four, then 62 for all and one for each; alone each would have 63.
    assert (saved.without, saved.held, saved.in_prompts) == (2 * 4 * 63, 63 + 66, 2 * 3 * 62)
