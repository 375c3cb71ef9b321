"""The demo's table: a row for each request, the one in progress live on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_MAX_WIDTH = 110
_HEADINGS = (
    ("prompt\ntokens", 6),
    ("\ncached", 6),
    ("\ncomputed", 8),
    ("TTFT\ncache on", 8),
    ("TTFT\noff", 8),
)


@dataclass(slots=True)
class Row:
    """One request; None is what is not known yet. Seconds and tokens; ``off`` without the cache."""

    label: str
    question: str
    answer: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    computed_tokens: int | None = None
    ttft_on: float | None = None
    ttft_off: float | None = None
    total_on: float = 0.0
    total_off: float = 0.0
    same: bool | None = None

    def cells(self) -> Sequence[str]:
        tokens = (self.prompt_tokens, self.cached_tokens, self.computed_tokens)
        seconds = (self.ttft_on, self.ttft_off)
        return [
            *("…" if value is None else f"{value:,}" for value in tokens),
            *("…" if value is None else f"{value:.2f} s" for value in seconds),
        ]

    def text(self) -> Text:
        text = Text.assemble((f"{self.label}  ", "dim"), (self.question, "bold"))
        if self.answer:
            text.append(f"\n{self.answer}", "green")
        if self.same is False:
            text.append(" (ANOTHER with the cache off)", "bold red")
        return text


class ComparisonTable:
    """Prints rows one below the other, so that a table longer than the terminal stays whole."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = min(console.width, _MAX_WIDTH)

    def print_header(self) -> None:
        table = self._grid()
        table.add_row("\nrequest and answer", *(heading for heading, _ in _HEADINGS), style="bold")
        self._console.print(table)
        self._console.print("─" * self._width, style="dim", highlight=False)

    @contextmanager
    def row(self, row: Row) -> Iterator[Callable[[], None]]:
        """Shows ``row`` live where the console can, and prints it for good at the end."""
        if not self._console.is_terminal:
            yield lambda: None
        else:
            first = self._render(row)
            with Live(first, console=self._console, transient=True, auto_refresh=False) as live:
                yield lambda: live.update(self._render(row), refresh=True)
        self._console.print(self._render(row))

    def _grid(self) -> Table:
        table = Table.grid(padding=(0, 1), expand=True)
        table.width = self._width
        table.add_column(ratio=1, overflow="fold")
        for _, width in _HEADINGS:
            table.add_column(width=width, justify="right", no_wrap=True)
        return table

    def _render(self, row: Row) -> Table:
        table = self._grid()
        table.add_row(row.text(), *row.cells())
        table.add_row("")
        return table
