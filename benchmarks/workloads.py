"""What the engine benchmarks ask: chains of turns, cut from real text as token ids.

Only the standard library is imported here, so that a side may run in any Python environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LICENCES = Path("/usr/share/common-licenses")
# The longest workload, unshared, takes 6,416 tokens, seldom longer than 8 characters each.
NUM_CHARACTERS = 60_000


@dataclass(frozen=True, slots=True)
class Turn:
    """New prompt tokens; what came before in the chain, answers included, precedes them."""

    tokens: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Chains of turns, of which ``concurrency`` have a request in flight at any time.

    ``common`` is what all prompts begin with, for a side that reserves it.
    """

    name: str
    about: str
    concurrency: int
    chains: list[list[Turn]]
    common: list[int] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.chains))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Workload:
        chains = [[Turn(**turn) for turn in chain] for chain in value["chains"]]
        return cls(**{**value, "chains": chains})


class TokenText:
    """Tokens of a text, taken piece after piece; each time round it starts one token later."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._stream = self._endless(tokens)

    def take(self, count: int) -> list[int]:
        return [next(self._stream) for _ in range(count)]

    @staticmethod
    def _endless(tokens: Sequence[int]) -> Iterator[int]:
        start = 0
        while True:
            yield from tokens[start:]
            start = (start + 1) % len(tokens)


def real_text() -> str:
    """The licence texts of a Debian system, each once, or else the document of the demo."""
    if LICENCES.is_dir():
        files = sorted({path.resolve() for path in LICENCES.iterdir()})
        text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
        if len(text) >= NUM_CHARACTERS:
            return text[:NUM_CHARACTERS]
    from prefixkv.demo import default_script

    return default_script().document


def make_workloads(tokens: Sequence[int], scale: float = 1.0) -> list[Workload]:
    """All workloads; ``scale`` shrinks every length (not the number of requests)."""

    def size(count: int) -> int:
        return max(1, round(count * scale))

    def text() -> TokenText:
        return TokenText(tokens)

    return [
        *(_questions(text(), size, concurrency) for concurrency in (1, 4)),
        *(_conversations(text(), size, concurrency) for concurrency in (1, 4)),
        _common_prefix("W3", text(), size, 341),
        _common_prefix("W3b", text(), size, 80),
        _unshared("cold", text(), size, requests=4, length=1024, output=1, concurrency=1),
        *(
            _unshared(f"decode-{n}", text(), size, requests=n, length=16, output=128, concurrency=n)
            for n in (1, 8)
        ),
        _unshared("unshared", text(), size, requests=16, length=401, output=32, concurrency=8),
    ]


Size = Callable[[int], int]


def _questions(text: TokenText, size: Size, concurrency: int) -> Workload:
    document = text.take(size(3000))
    chains = [[Turn(document + text.take(size(40)), size(32))] for _ in range(16)]
    about = (
        f"one document of {size(3000)} tokens, 16 questions of {size(40)}, {size(32)} tokens out"
    )
    return Workload(f"W1-c{concurrency}", about, concurrency, chains)


def _conversations(text: TokenText, size: Size, concurrency: int) -> Workload:
    chains = [[Turn(text.take(size(150)), size(32)) for _ in range(6)] for _ in range(4)]
    about = (
        f"4 conversations of 6 turns; a prompt is all so far and {size(150)} new tokens, "
        f"{size(32)} tokens out"
    )
    return Workload(f"W2-c{concurrency}", about, concurrency, chains)


def _common_prefix(name: str, text: TokenText, size: Size, prefix: int) -> Workload:
    common = text.take(size(prefix))
    chains = [[Turn(common + text.take(size(60)), size(32))] for _ in range(64)]
    about = (
        f"64 requests, a common prefix of {len(common)} tokens and {size(60)} distinct, "
        f"{size(32)} tokens out"
    )
    return Workload(name, about, 8, chains)


def _unshared(
    name: str,
    text: TokenText,
    size: Size,
    *,
    requests: int,
    length: int,
    output: int,
    concurrency: int,
) -> Workload:
    output = output if output == 1 else size(output)
    chains = [[Turn(text.take(size(length)), output)] for _ in range(requests)]
    about = f"unshared prompts: {requests} of {size(length)} tokens, {output} out"
    return Workload(name, about, concurrency, chains)
