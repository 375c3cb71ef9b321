"""Progress of long work on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

Report = Callable[[str, int, int], None]

_LINE_STEP = 25  # percent
_QUIET = 2.0  # seconds: what is done sooner gets no line


@contextmanager
def progress() -> Iterator[Report]:
    """A function to call with the name of a stage, what is done and the total (0: unknown)."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield _Bars(bars)


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()
        self._next: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        percent = 100 * done // total if total else 0
        if time.monotonic() - self._start < _QUIET or percent < self._next.get(stage, 0):
            return
        self._next[stage] = percent - percent % _LINE_STEP + _LINE_STEP
        share = f" {percent}%" if total else ""
        self._console.print(f"{stage}{share}", markup=False, highlight=False)
