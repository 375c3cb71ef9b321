"""``prefixkv chat``."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from prefixkv.cli.session import Session, counts
from prefixkv.config import EngineOptions
from prefixkv.errors import RequestError
from prefixkv.request import RequestOutput, SamplingParams

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def run(options: EngineOptions, system: str | None, params: SamplingParams) -> None:
    """Read turns from stdin until it ends."""
    with Session(options) as session:
        Chat(session, system, params).run()


class Chat:
    """A conversation. Each turn sends it whole; the cache knows all but the newest part."""

    def __init__(self, session: Session, system: str | None, params: SamplingParams) -> None:
        self._session = session
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._notes = Console(stderr=True)

    def run(self) -> None:
        self._note(f"{self._session.engine.summary}\n{HELP}")
        while (line := _read()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                self._messages = list(self._opening)
                self._note("the conversation is forgotten")
            elif line.startswith("/"):
                self._note(HELP)
            elif line:
                self._turn(line)

    def _turn(self, text: str) -> None:
        """Answer; a turn that failed is taken back, one that was stopped is kept as it is."""
        question = {"role": "user", "content": text}
        output = RequestOutput("")
        try:
            self._answer([*self._messages, question], output)
        except KeyboardInterrupt:
            self._note("\nstopped")
        except RequestError as error:
            self._note(f"error: {error}; /reset makes room")
            return
        answer = {"role": "assistant", "content": output.text}
        self._messages += [question, answer]

    def _answer(self, messages: list[dict[str, str]], output: RequestOutput) -> None:
        prompt = self._session.engine.tokenizer.apply_chat_template(messages)
        self._session.stream(prompt, self._params, output, lambda text: click.echo(text, nl=False))
        click.echo()
        self._note(counts(output))

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def _read() -> str | None:
    """The next line, None at the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() line editing and history
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
