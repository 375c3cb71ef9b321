"""What the demo asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

MAX_TOKENS = 32

_INTRODUCTION = "Read this handbook."
_INSTRUCTION = "Using the handbook, answer in one short sentence."

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Script:
    """A document, questions that each start afresh, and the turns of one chat about it."""

    document: str
    questions: tuple[str, ...]
    turns: tuple[str, ...]

    def opening(self, question: str) -> Message:
        """The first message of a conversation: what all share comes first, the question last."""
        text = f"{_INTRODUCTION}\n\n{self.document}\n\n{_INSTRUCTION} {question}"
        return {"role": "user", "content": text}

    def asks(self) -> Iterator[Ask]:
        """The requests in their order; a turn of the chat is complete once the last is answered."""
        for number, question in enumerate(self.questions, 1):
            yield Ask(f"Question {number}", question, [self.opening(question)])
        history: list[Message] = []
        for number, turn in enumerate(self.turns, 1):
            message = {"role": "user", "content": turn} if history else self.opening(turn)
            ask = Ask(f"Chat, turn {number}", turn, [*history, message])
            yield ask
            history = [*ask.messages, {"role": "assistant", "content": ask.answer}]


@dataclass(slots=True)
class Ask:
    """One request; whoever runs it sets ``answer`` before taking the next one."""

    label: str
    question: str
    messages: list[Message]
    answer: str = ""


def default_script() -> Script:
    """About 3,000 tokens of the default model, and questions that a small model can answer."""
    document = files("prefixkv.demo").joinpath("document.txt").read_text(encoding="utf-8")
    return Script(
        document=document.strip(),
        questions=(
            "What is the oldest tool on the shelves?",
            "Where is the meeting point in case of fire?",
            "Which tool is borrowed most often?",
            "How much does the engine hoist weigh?",
        ),
        turns=(
            "What is the name of the van?",
            "How many tools does it carry?",
            "Who is the driver of the van?",
            "Since when has the library had a van?",
        ),
    )
