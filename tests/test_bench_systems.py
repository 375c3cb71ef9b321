"""The benchmark of the systems: its prompts, the figures that need no clock, and all of it."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import tarfile
from collections import deque
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_systems")


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("request_traces")


def rows_of(printed: str, title: str) -> list[list[str]]:
    """The table below a title, without its header."""
    table = printed.partition(title)[2].partition("\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return rows[2:]


def equal_start(one: np.ndarray, other: np.ndarray) -> int:
    most = min(len(one), len(other))
    return int((one[:most] == other[:most]).cumprod().sum())


# ---- prompts ----


def test_mooncake_prompts_share_their_leading_blocks(traces: ModuleType, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 2]},
        {"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [0, 7]},
    ]
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    first, second = traces.read_trace(path, 10)
    assert (len(first), len(second)) == (1100, 1024)
    assert equal_start(first, second) == 512
    assert len(traces.read_trace(path, 1)) == 1


def test_coding_sessions_share_within_a_session_only(traces: ModuleType, tmp_path: Path) -> None:
    session = [[0.0, 130, 1, 0, 0, [[1, 2]]], [1.0, 200, 1, 0, 0, [[1, 1], [5, 2]]]]
    nested = [{"agent": session[:1], "t": 0.0}, session[1]]
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"id": "a", "req": session}) + "\n" + json.dumps({"req": nested}))
    prompts = traces.read_trace(path, 10)
    assert [len(prompt) for prompt in prompts] == [128, 192, 128, 192]
    assert equal_start(prompts[0], prompts[1]) == equal_start(prompts[2], prompts[3]) == 64
    assert equal_start(prompts[0], prompts[2]) == 0


def test_sessions_take_turns(traces: ModuleType, tmp_path: Path) -> None:
    """Eight at once: a ninth begins when one has ended, and as many are read as asked for."""
    path = tmp_path / "trace.jsonl"
    session = [[0.0, 64 * n, 1, 0, 0, [[1, n]]] for n in (1, 2)]
    path.write_text("\n".join(json.dumps({"req": session}) for _ in range(9)))
    lengths = [len(prompt) for prompt in traces.read_trace(path, 18)]
    assert lengths[:16] == [64] * 8 + [128] * 8
    assert len(traces.read_trace(path, 5)) == 5


def test_text_is_read_in_the_order_of_time(traces: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "trace.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, time, text in (("b", 2, "abcdefgh"), ("a", 1, "abcdXY")):
            data = json.dumps({"timestamp": time, "input": text}).encode()
            member = tarfile.TarInfo(f"{name}.jsonl")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    first, second = traces.read_trace(path, 10)
    assert first.tolist() == np.frombuffer(b"abcdXY  ", "<i4").tolist()
    assert equal_start(first, second) == 1


def test_another_format_is_refused(traces: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="neither a Mooncake trace"):
        traces.read_trace(path, 10)


def test_the_common_prefix_is_what_hits_most(traces: ModuleType) -> None:
    prompts = [np.arange(9), *(np.array([*range(50, 56), i]) for i in range(100, 105))]
    assert traces.common_prefix(prompts).tolist() == list(range(50, 56))


def test_made_up_prompts_are_the_same_each_time(traces: ModuleType) -> None:
    one, other = traces.made_up(40), traces.made_up(40)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    shared = [max(equal_start(p, before) for before in one[:i]) for i, p in enumerate(one) if i]
    assert sum(length >= 300 for length in shared) > 10


# ---- figures ----


def test_a_replay_counts_hits_as_a_large_enough_cache_gives_them(bench: ModuleType) -> None:
    prompts = [np.arange(40), np.arange(40), np.arange(100, 140)]
    expected = 100 * 32 / 120  # the last token is computed, so two blocks of the second prompt
    for system in ("hash", "radix"):
        assert bench.replay(system, 16, 1600, prompts, prompts[0][:0])[0] == pytest.approx(expected)
    assert bench.replay("off", 16, 1600, prompts, prompts[0][:0])[0] == 0
    assert bench.replay("paged", 16, 1600, prompts, np.arange(10))[0] == pytest.approx(
        100 * 20 / 120
    )


def test_a_replay_keeps_no_more_in_flight_than_it_says(bench: ModuleType) -> None:
    cache = bench.make_cache("hash", num_blocks=64)
    running: deque[object] = deque()
    for start in range(0, 1000, 100):
        bench.admit(cache, np.arange(start, start + 16), running)
    assert len(running) == bench.IN_FLIGHT - 1 == cache.num_blocks - cache.num_free_blocks


def test_a_replay_makes_room_by_ending_the_oldest(bench: ModuleType) -> None:
    cache = bench.make_cache("off", num_blocks=4)
    running: deque[object] = deque()
    for _ in range(3):
        bench.admit(cache, np.arange(32), running)
    assert len(running) == 2


@pytest.fixture
def printed(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> str:
    bench.main(["--scale", "0.004", "--rounds", "1", "--requests", "60", "--pool", "200000"])
    return capsys.readouterr().out


def test_all_of_it_runs(printed: str, bench: ModuleType) -> None:
    shared = rows_of(printed, "Tokens hit of 10")
    assert shared == [
        ["hash", "10", "10", "8", "0"],
        ["radix", "10", "10", "8", "0"],
        ["paged", "10", "10", "10", "10"],
        ["off", "0", "0", "0", "0"],
    ]
    assert rows_of(printed, "Blocks of 8 equal prompts of 1,000") == [
        ["hash", "504", "504", "496"],
        ["radix", "504", "70", "62"],
        ["paged", "504", "504", "0"],
        ["off", "504", "504", "0"],
    ]
    for title in ("µs a request of 512", "µs a request of 8,192", "µs a decode", "Bytes a block"):
        assert [row[0] for row in rows_of(printed, title)] == list(bench.SYSTEMS)
    assert [row[0] for row in rows_of(printed, "µs a request of 64 new")] == ["hash", "radix"]
    hits = {(row[1], row[2]): row[3] for row in rows_of(printed, "Hit rate in the same pool")}
    assert hits["hash", "16"] == hits["radix", "16"] != hits["off", "16"] == "0.00 %"
