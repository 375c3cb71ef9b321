"""1,000 random runs of samples and beams in small pools: no block is lost, no answer changes.

The engine is real but for its model: logits are made up from all tokens before them, and every slot
of the pool remembers which token's K/V it holds, and after which prefix.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkv.config import EngineOptions
from prefixkv.engine.engine import Engine
from prefixkv.engine.step import Step
from prefixkv.errors import RequestError
from prefixkv.request import BeamSearchParams, Params, RequestOutput, SampleOutput, SamplingParams

VOCABULARY = 6  # tokens that are ever likely
RUNS = 32  # of each setting: 32 settings, 1,024 runs
SETTINGS = [  # system, block size, blocks, token budget, most sequences at once
    (system, *sizes)
    for system in ("hash", "radix", "paged", "off")
    for sizes in (
        (1, 40, 64, 8),
        (1, 34, 3, 5),
        (3, 14, 16, 8),
        (3, 12, 5, 3),
        (4, 9, 64, 8),
        (4, 12, 7, 20),
        (16, 4, 64, 8),
        (16, 3, 9, 5),
    )
]

Prefix = tuple[int, ...]


class MadeUpModel:
    """Stands in for the forward pass of an engine and checks what it would read."""

    def __init__(self, engine: Engine) -> None:
        self._block_size = engine.cache.block_size
        self._vocab_size = engine.vocab_size
        self._slots: list[Prefix | None] = [None] * engine.cache.num_blocks * self._block_size
        self.fails = False
        engine.runner.run = self.run  # type: ignore[method-assign]

    def run(self, step: Step) -> Tensor:
        size, slots = self._block_size, self._slots
        for source, target in step.copies:
            slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]
        rows = []
        writes: dict[int, Prefix] = {}
        for work in step.work:
            (sequence, *_) = work.branch.sequences
            tokens = tuple(work.request.prompt + sequence.output_token_ids)
            blocks = work.table.blocks
            at = [blocks[i // size] * size + i % size for i in range(work.stop)]
            for i in range(work.start):
                assert slots[at[i]] == tokens[: i + 1], "K/V of another prefix would be read"
            for i in range(work.start, work.stop):
                assert at[i] not in writes, "two would write to the same slot"
                writes[at[i]] = tokens[: i + 1]
            rows += [
                self.logits(tokens[: i + 1]) for i in range(work.stop - work.num_logits, work.stop)
            ]
        if self.fails:
            self.fails = False
            for slot in writes:
                slots[slot] = None  # half written
            raise RuntimeError("the model failed")
        for slot, prefix in writes.items():
            slots[slot] = prefix
        return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(-1, self._vocab_size))

    def logits(self, prefix: Prefix) -> np.ndarray:
        row = np.full(self._vocab_size, -30.0, dtype=np.float32)
        row[:VOCABULARY] = np.random.default_rng(hash(prefix) % 2**32).normal(0, 2, VOCABULARY)
        return row


def make_engine(model: Path, **options: Any) -> tuple[Engine, MadeUpModel]:
    engine = Engine(EngineOptions(model=model, dtype="float32", **options))
    return engine, MadeUpModel(engine)


@pytest.fixture(scope="module")
def alone(model: Path) -> Callable[[list[int], Params], list[SampleOutput]]:
    """What a request gives when it is alone in a large pool, each sample by itself."""
    engine, _ = make_engine(model, num_blocks=64, prefix_cache="off")
    known: dict[str, list[SampleOutput]] = {}

    def serve(prompt: list[int], params: Params) -> SampleOutput:
        output = RequestOutput(engine.add(prompt, params))
        while not output.finished:
            for piece in engine.step():
                output.extend(piece)
        (sample,) = output.samples[:1]
        return sample

    def answer(prompt: list[int], params: Params) -> list[SampleOutput]:
        key = f"{prompt} {params}"
        if key not in known and isinstance(params, SamplingParams):
            values = {name: getattr(params, name) for name in params.__dataclass_fields__}
            known[key] = []
            for index in range(params.n):
                single = SamplingParams(**values | {"n": 1, "seed": params.seed_of(index)})
                known[key].append(serve(prompt, single))
                known[key][-1].index = index
        elif key not in known:
            output = RequestOutput(engine.add(prompt, params))
            while not output.finished:
                for piece in engine.step():
                    output.extend(piece)
            known[key] = output.samples
        return known[key]

    return answer


def random_params(rng: random.Random) -> Params:
    common = {
        "max_tokens": rng.randint(1, 12),
        "ignore_eos": True,
        "stop_token_ids": [rng.randrange(VOCABULARY)] if rng.random() < 0.5 else [],
    }
    common["min_tokens"] = rng.choice([0, 0, min(2, common["max_tokens"])])
    if rng.random() < 0.4:
        return BeamSearchParams(
            width=rng.randint(1, 4),
            length_penalty=rng.choice([0.0, 1.0, -0.5]),
            early_stopping=rng.choice([True, False, "never"]),
            **common,
        )
    return SamplingParams(
        n=rng.choice([1, 2, 3, 5]),
        seed=rng.randrange(100),
        temperature=rng.choice([0.0, 0.3, 1.0]),
        **common,
    )


@pytest.mark.parametrize(("system", "block_size", "blocks", "budget", "most"), SETTINGS)
def test_random_runs_lose_no_block_and_change_no_answer(
    model: Path,
    alone: Callable[[list[int], Params], list[SampleOutput]],
    system: str,
    block_size: int,
    blocks: int,
    budget: int,
    most: int,
) -> None:
    engine, made_up = make_engine(
        model,
        prefix_cache=system,
        block_size=block_size,
        num_blocks=blocks,
        token_budget=budget,
        max_num_seqs=most,
        max_model_len=32 if blocks * block_size >= 32 else None,
    )
    rng = random.Random(f"{system} {block_size} {blocks} {budget} {most}")
    common = [rng.randrange(VOCABULARY) for _ in range(16)]
    for _ in range(RUNS):
        run_once(engine, made_up, rng, common, alone)
        assert engine.cache.num_free_blocks == blocks, "blocks are lost"


def run_once(
    engine: Engine,
    made_up: MadeUpModel,
    rng: random.Random,
    common: list[int],
    alone: Callable[[list[int], Params], list[SampleOutput]],
) -> None:
    asked: dict[str, tuple[list[int], Params]] = {}
    outputs: dict[str, RequestOutput] = {}
    aborted: set[tuple[str, int]] = set()  # samples
    disturbed: set[str] = set()  # requests
    for _ in range(rng.randint(1, 6)):
        prompt = common[: rng.randint(0, 16)] + [
            rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))
        ]
        params = random_params(rng)
        try:
            request_id = engine.add(prompt, params, cache_salt=rng.choice([None, "a"]))
        except RequestError:  # beams for which the pool is too small
            assert isinstance(params, BeamSearchParams)
            continue
        asked[request_id], outputs[request_id] = (prompt, params), RequestOutput(request_id)
    failing = rng.randrange(200)
    for step in range(1000):
        if not engine.has_work:
            break
        made_up.fails = step == failing
        for piece in engine.step():
            outputs[piece.request_id].extend(piece)
            if piece.error is not None:
                assert "the model failed" in piece.error
                disturbed.add(piece.request_id)
        engine.cache.check()
        if rng.random() < 0.05 and asked:
            request_id = rng.choice(sorted(asked))
            sample = rng.choice([None, 0, 1, 2])
            if isinstance(asked[request_id][1], BeamSearchParams):
                sample = None
            ended = engine.abort(request_id, sample)
            if ended is not None:
                outputs[request_id].extend(ended)
                if sample is None:
                    disturbed.add(request_id)
                else:
                    aborted.add((request_id, sample))
    assert not engine.has_work, "a request never ends"
    for request_id, (prompt, params) in asked.items():
        output = outputs[request_id]
        assert output.finished
        if request_id in disturbed:
            continue
        expected = alone(prompt, params)
        assert [sample.index for sample in output.samples] == list(range(len(expected)))
        for sample, whole in zip(output.samples, expected, strict=True):
            if (request_id, sample.index) in aborted:
                assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
            else:
                assert sample == whole
