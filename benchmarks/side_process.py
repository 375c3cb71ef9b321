"""A side in a process of its own: its memory is its own, and so may be its Python environment.

The parent writes one JSON object a line to the child's stdin and reads one a line from its stdout.
Only the standard library is imported here.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from closed_loop import ClosedLoop, Measurement, Side
from workloads import Workload


def serve(make_side: Callable[[], Side]) -> None:
    """The child's whole life: make the side, then answer until stdin ends."""
    # Libraries that print to stdout must not break the protocol.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    side = make_side()
    handlers = {"describe": _describe, "encode": _encode, "run": _run}
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(handlers[request["op"]](side, request)), file=replies, flush=True)


def _describe(side: Side, _request: dict[str, Any]) -> dict[str, Any]:
    return side.describe()


def _encode(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    return {"token_ids": side.encode(request["text"])}


def _run(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    measured = ClosedLoop(side, Workload.from_json(request["workload"])).run()
    # Linux counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"measurement": asdict(measured), "peak_memory_mb": peak}


class SideProcess:
    """The parent's end of one side."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def wait_until_ready(self) -> None:
        self._read()

    def describe(self) -> dict[str, Any]:
        return self._ask(op="describe")

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._ask(op="encode", text=text)["token_ids"]
        return token_ids

    def run(self, workload: Workload) -> tuple[Measurement, float]:
        """The measurement, and the most memory that the side has held so far, in MB."""
        reply = self._ask(op="run", workload=workload.to_json())
        return Measurement(**reply["measurement"]), reply["peak_memory_mb"]

    def close(self) -> None:
        """End the child; it has nothing to save."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; reading tells how
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"side {self.name!r} ended with exit status {self._process.wait()}; "
                "what it said is above"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply
