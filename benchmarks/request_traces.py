"""Prompts in the order in which they came: recorded traces where they lie, and one made up.

A recorded trace tells which blocks of tokens were equal, not what they were; the tokens made here
are equal exactly where its blocks are. Outputs are left out: the traces do not say which of them
come back in a later prompt.
"""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

MOONCAKE_BLOCK, CLAUDE_BLOCK = 512, 64
SESSIONS_AT_ONCE = 8  # of a trace whose sessions share no clock


def read_trace(path: Path, most: int) -> list[Tokens]:
    """The first prompts of a trace, at most so many. Raises ValueError for an unknown format."""
    if path.name.endswith(".tar.gz"):
        return _text_sessions(path, most)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        first = json.loads(next(lines))
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = map(json.loads, lines)
        if "hash_ids" in first:
            return [_of_blocks(row) for row, _ in zip(rows, range(most), strict=False)]
        if "req" in first:
            return _coding_sessions(rows, most)
    raise ValueError(f"{path}: neither a Mooncake trace nor one of kv-cache-tester")


def _numbered(ids: NDArray[np.int64], block: int) -> Tokens:
    """Tokens of blocks: equal ids give equal tokens, different ids different ones throughout."""
    return (ids[:, None] * block + np.arange(block)).ravel().astype(np.int32)


def _of_blocks(row: dict[str, Any]) -> Tokens:
    """Mooncake: chained ids of 512 tokens, of which the last may be of fewer."""
    ids = np.asarray(row["hash_ids"], dtype=np.int64)
    return _numbered(ids, MOONCAKE_BLOCK)[: row["input_length"]]


def _coding_sessions(rows: Iterable[dict[str, Any]], most: int) -> list[Tokens]:
    """kv-cache-tester: ids are a session's own, so each session gets a stretch of ids."""
    prompts: list[Tokens] = []
    running: list[Iterator[Tokens]] = []
    base = 0
    for row in rows:
        requests = list(_flatten(row["req"]))
        running.append(_session(requests, base))
        base += 1 + max(start + count for request in requests for start, count in request)
        if len(running) < SESSIONS_AT_ONCE:
            continue
        while len(running) == SESSIONS_AT_ONCE:  # one turn of each, until one ends
            for session in tuple(running):
                prompt = next(session, None)
                if prompt is None:
                    running.remove(session)
                elif len(prompts) < most:
                    prompts.append(prompt)
        if len(prompts) == most:
            return prompts
    return prompts + [prompt for session in running for prompt in session][: most - len(prompts)]


def _flatten(requests: list[Any]) -> Iterator[list[list[int]]]:
    """The id ranges of each request, a sub-agent's requests where it was called."""
    for request in requests:
        if isinstance(request, dict):
            yield from _flatten(request["agent"])
        elif request[5]:
            yield request[5]


def _session(requests: list[list[list[int]]], base: int) -> Iterator[Tokens]:
    for ranges in requests:
        ids = [np.arange(start, start + count, dtype=np.int64) for start, count in ranges]
        yield _numbered(np.concatenate(ids) + base, CLAUDE_BLOCK)


def _text_sessions(path: Path, most: int) -> list[Tokens]:
    """Sessions as text, one token for four bytes, in the order of their time stamps."""
    rows: list[tuple[int, str]] = []
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".jsonl") else None
            for line in file or ():
                row = json.loads(line)
                if isinstance(row.get("input"), str):
                    rows.append((row["timestamp"], row["input"]))
    if not rows:
        raise ValueError(f"{path}: holds no session with 'timestamp' and 'input'")
    return [_pseudo_tokens(text) for _, text in sorted(rows)[:most]]


def _pseudo_tokens(text: str) -> Tokens:
    data = text.encode()
    data += b" " * (-len(data) % 4)
    return np.frombuffer(data, dtype="<i4").astype(np.int32) & np.int32(2**31 - 1)


def made_up(requests: int, seed: int = 0) -> list[Tokens]:
    """Chats that grow, questions about documents, and prompts like no other, mixed at random.

    A third each. Chats share one of four system prompts of 300 to 900 tokens; there are 24
    documents of 1,500 to 6,000 tokens, some of which are asked about more often than others.
    """
    rng = np.random.default_rng(seed)

    def text(shortest: int, longest: int) -> Tokens:
        return rng.integers(0, 50_000, rng.integers(shortest, longest + 1)).astype(np.int32)

    systems = [text(300, 900) for _ in range(4)]
    documents = [text(1500, 6000) for _ in range(24)]
    weights = 1 / np.arange(1, len(documents) + 1)
    chats = [systems[i % 4] for i in range(24)]
    prompts = []
    for _ in range(requests):
        kind = rng.integers(3)
        if kind == 0:
            i = rng.integers(len(chats))
            if len(chats[i]) > 4000:
                chats[i] = systems[rng.integers(len(systems))]
            chats[i] = np.concatenate((chats[i], text(50, 400)))
            prompts.append(chats[i])
        elif kind == 1:
            document = documents[rng.choice(len(documents), p=weights / weights.sum())]
            prompts.append(np.concatenate((document, text(10, 80))))
        else:
            prompts.append(text(100, 3000))
    return prompts


def common_prefix(prompts: list[Tokens]) -> Tokens:
    """The start of prompts that, if it was always there, would hit most tokens: what somebody who
    knows the workload would reserve. Looked for in the first 32 prompts and the next 1,000."""
    best, most = prompts[0][:0], 0
    for first in prompts[:32]:
        lengths = sorted(_shared(first, prompt) for prompt in prompts[:1000])
        for i, length in enumerate(lengths):
            if length * (len(lengths) - i) > most:
                best, most = first[:length], length * (len(lengths) - i)
    return best


def _shared(one: Tokens, other: Tokens) -> int:
    most = min(len(one), len(other))
    differs = np.flatnonzero(one[:most] != other[:most])
    return int(differs[0]) if len(differs) else most
