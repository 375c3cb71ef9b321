"""Random requests, reservations, aborts and releases in small pools, under every system.

Each answer must be what its prompt gives alone without a cache, what is reserved must stay
findable, the longest request must fit beside it, and at the end every block must be back.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefixkv.config import EngineOptions
from prefixkv.engine.engine import Engine
from prefixkv.errors import RequestError
from prefixkv.request import RequestOutput, SamplingParams

SYSTEMS = ("hash", "radix", "paged", "off")
LONGEST = 48
SALTS = (None, None, "a")


class Alone:
    """Greedy answers of prompts that are served one by one, without a cache."""

    def __init__(self, model: Path) -> None:
        options = EngineOptions(
            model=model, prefix_cache="off", num_blocks=64, threads=1, dtype="float32"
        )
        self._engine = Engine(options)
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def answer(self, prompt: list[int], num_tokens: int) -> list[int]:
        key = tuple(prompt), num_tokens
        if key not in self._known:
            output = RequestOutput(self._engine.add(prompt, greedy(num_tokens)))
            while self._engine.has_work:
                for piece in self._engine.step():
                    output.extend(piece)
            self._known[key] = output.token_ids
        return self._known[key]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@dataclass
class Asked:
    prompt: list[int]
    num_tokens: int  # 0: to be reserved
    salt: str | None
    output: RequestOutput


class History:
    """One engine, of random sizes, and what was asked of it."""

    def __init__(self, model: Path, alone: Alone, system: str, seed: int) -> None:
        self.rng = rng = random.Random(f"{system} {seed}")
        self.alone, self.system, self.seen = alone, system, Counter[str]()
        size = rng.choice([1, 2, 4, 16])
        options = EngineOptions(
            model=model,
            prefix_cache=system,
            block_size=size,
            num_blocks=-(-LONGEST // size) + rng.randrange(-(-60 // size) + 1),
            max_model_len=LONGEST,
            token_budget=rng.choice([1, 3, 7, 16, 64]),
            max_num_seqs=rng.choice([1, 3, 8]),
            threads=1,
            dtype="float32",
        )
        self.engine = Engine(options)
        self.documents = [[rng.randrange(5, 9) for _ in range(40)] for _ in range(2)]
        self.live: dict[str, Asked] = {}
        self.held: dict[str, Asked] = {}

    def run(self) -> Counter[str]:
        choices = (self.ask, self.reserve, self.abort, self.release, self.step)
        for operation in self.rng.choices(choices, (6, 2, 1, 1.5, 9), k=self.rng.randrange(20, 80)):
            operation()
            self.check()
        while self.engine.has_work:
            self.step()
        assert self.live == {}
        self.live["longest"] = Asked([5] * (LONGEST - 1), 1, None, RequestOutput("longest"))
        self.engine.add([5] * (LONGEST - 1), greedy(1), request_id="longest")
        while self.engine.has_work:
            self.step()
        self.check()
        assert self.live == {}
        for name in list(self.held):
            self.engine.release(name)
        assert self.engine.cache.num_free_blocks == self.engine.cache.num_blocks
        self.seen["preemptions"] += self.engine.stats().num_preemptions
        return self.seen

    def prompt(self) -> list[int]:
        document = self.rng.choice(self.documents)[: self.rng.randrange(36)]
        return document + [self.rng.randrange(5, 9) for _ in range(self.rng.randrange(1, 6))]

    def add(self, num_tokens: int) -> None:
        prompt, salt = self.prompt(), self.rng.choice(SALTS)
        name = self.engine.add(
            prompt, greedy(max(num_tokens, 1)), cache_salt=salt, reserve=num_tokens == 0
        )
        self.live[name] = Asked(prompt, num_tokens, salt, RequestOutput(name))

    def ask(self) -> None:
        self.add(self.rng.randrange(1, 8))

    def reserve(self) -> None:
        try:
            self.add(0)
        except RequestError:
            self.seen["refused"] += 1

    def abort(self) -> None:
        if self.live:
            name = self.rng.choice(list(self.live))
            self.engine.abort(name)
            del self.live[name]

    def release(self) -> None:
        if self.held:
            name = self.rng.choice(list(self.held))
            self.engine.release(name)
            del self.held[name]

    def step(self) -> None:
        for piece in self.engine.step():
            asked = self.live[piece.request_id]
            asked.output.extend(piece)
            if piece.finished:
                self.end(piece.request_id, self.live.pop(piece.request_id))

    def end(self, name: str, asked: Asked) -> None:
        assert asked.output.finish_reason == "length", asked.output.error
        if asked.output.reservation is not None:
            self.held[name] = asked
            self.seen["reserved"] += 1
        elif asked.num_tokens > 0:
            assert asked.output.token_ids == self.alone.answer(asked.prompt, asked.num_tokens)
            self.seen["answers"] += 1
            self.seen["cached"] += asked.output.num_cached_tokens

    def check(self) -> None:
        cache = self.engine.cache
        cache.check()
        assert [held.id for held in self.engine.reservations] == list(self.held)
        for asked in self.held.values():
            assert asked.output.reservation is not None
            found = cache.lookup(cache.sequence([*asked.prompt, 3], cache_salt=asked.salt))
            assert found.num_tokens >= asked.output.reservation.num_tokens


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    return Alone(model)


def run(model: Path, alone: Alone, system: str, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += History(model, alone, system, seed).run()
    return seen


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_answer_is_that_of_the_prompt_alone(model: Path, alone: Alone, system: str) -> None:
    seen = run(model, alone, system, range(40))
    assert min(seen["answers"], seen["preemptions"]) > 0
    assert (seen["reserved"] > 0) is (seen["cached"] > 0) is (system != "off")


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_many_more_of_them(model: Path, alone: Alone, system: str) -> None:
    run(model, alone, system, range(1000, 1500))
