"""Drives an engine step by step and keeps the logits that each token was chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from prefixkv.config import EngineOptions
from prefixkv.engine.engine import Engine
from prefixkv.engine.reservations import reservation_of
from prefixkv.engine.step import Step
from prefixkv.request import RequestOutput, Reservation, SamplingParams


@dataclass
class Ask:
    """A request and the step at which it arrives."""

    prompt: list[int]
    max_tokens: int = 6
    at: int = 0
    cache_salt: str | None = None
    params: SamplingParams | None = None


@dataclass
class Answer:
    """What came of it: the output, and a row of logits for each token generated."""

    output: RequestOutput
    logits: list[Tensor] = field(default_factory=list)


class Bench:
    """An engine under observation, in float32 whatever the machine prefers."""

    def __init__(self, model: Path | None, *, dtype: str = "float32", **options: Any) -> None:
        self.engine = Engine(EngineOptions(model=model, dtype=dtype, **options))
        self._answers: dict[str, Answer] = {}
        self._run = self.engine.runner.run
        self.engine.runner.run = self._tap  # type: ignore[method-assign]

    def _tap(self, step: Step) -> Tensor:
        logits = self._run(step)
        row = 0
        for work in step.work:
            row += work.num_logits
            if work.due:
                self._answers[work.request.request_id].logits.append(logits[row - 1].clone())
        return logits

    def serve(self, asks: Sequence[Ask]) -> list[Answer]:
        """Run requests to their ends, each from the step at which it arrives; all blocks return."""
        free = self.engine.cache.num_free_blocks
        engine, answers, waiting = self.engine, [], sorted(enumerate(asks), key=lambda it: it[1].at)
        by_index: dict[int, Answer] = {}
        step = 0
        while waiting or engine.has_work:
            while waiting and (waiting[0][1].at <= step or not engine.has_work):
                index, ask = waiting.pop(0)
                by_index[index] = self.add(ask)
            self.step()
            step += 1
        answers = [by_index[index] for index in range(len(asks))]
        assert engine.cache.num_free_blocks == free
        engine.cache.check()
        return answers

    def add(self, ask: Ask) -> Answer:
        params = ask.params or SamplingParams(
            temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True
        )
        request_id = self.engine.add(ask.prompt, params, cache_salt=ask.cache_salt)
        return self._answers.setdefault(request_id, Answer(RequestOutput(request_id)))

    def reserve(self, prompt: list[int], cache_salt: str | None = None) -> Reservation:
        request_id = self.engine.add(prompt, SamplingParams(), cache_salt=cache_salt, reserve=True)
        self._answers[request_id] = Answer(RequestOutput(request_id))
        self.run()
        return reservation_of(self._answers[request_id].output)

    def step(self) -> None:
        for piece in self.engine.step():
            assert piece.error is None, piece.error
            self._answers[piece.request_id].output.extend(piece)

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


def same_bits(left: Sequence[Answer], right: Sequence[Answer]) -> bool:
    """Whether every token was chosen from the same logits, to the bit."""
    return all(
        len(a.logits) == len(b.logits)
        and all(x.equal(y) for x, y in zip(a.logits, b.logits, strict=True))
        for a, b in zip(left, right, strict=True)
    )
