"""Memory that block sharing saves inside a request, as in section 6.3 of the PagedAttention paper.

    python benchmarks/bench_sharing.py [--system paged] [--requests 16] [--scale 1] [--json FILE]

For parallel sampling and beam search of 2, 4 and 6 sequences: blocks saved by sharing divided by
the blocks that there would be without it, each summed over all steps, so the share is an average
over time. Prompts are cut from real text and share nothing with each other; lengths are drawn from
a gamma distribution (shape 2) with the means of the paper's data sets, the same for every case.

Samples that chose the same tokens so far are one here until they part, which the paper's are not:
`prompt` is the part of the saving that lies in full blocks of the prompt, which is theirs too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench_engine import positive
from bench_systems import show
from prefixkv import BeamSearchParams, SamplingParams
from prefixkv.config import EngineOptions
from prefixkv.engine.engine import Engine
from prefixkv.engine.request_state import RequestState
from prefixkv.request import Params
from workloads import TokenText, real_text

IN_FLIGHT = 4
WIDTHS = (2, 4, 6)
SYSTEMS = ("paged", "hash", "radix")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A data set of the paper: mean lengths, and what it saves, in percent, by kind of request."""

    name: str
    prompt: int
    output: int
    paper: dict[str, str]


SETS = (
    Lengths("short", 19, 58, {"sampling": "6.1-9.8 %", "beam search": "37.6-55.2 %"}),
    Lengths("long", 161, 338, {"sampling": "16.2-30.5 %", "beam search": "44.3-66.3 %"}),
)


@dataclass(slots=True)
class Saved:
    """Blocks, summed over all steps."""

    without: int = 0
    held: int = 0
    in_prompts: int = 0

    def add(self, request: RequestState, block_size: int) -> None:
        """Count a request as it is now; while its prompt is computed there is nothing to share."""
        if request.metrics.time_to_first_token is None:
            return
        blocks: set[int] = set()
        num_sequences = 0
        for branch in request.branches:
            assert branch.table is not None  # it runs
            blocks.update(branch.table.blocks)
            self.without += len(branch.sequences) * len(branch.table.blocks)
            num_sequences += len(branch.sequences)
        self.held += len(blocks)
        self.in_prompts += (num_sequences - 1) * (request.num_prompt_tokens // block_size)

    @property
    def share(self) -> float:
        return 1 - self.held / self.without

    @property
    def share_in_prompts(self) -> float:
        return self.in_prompts / self.without


def params_of(kind: str, width: int, output: int, seed: int) -> Params:
    if kind == "sampling":
        return SamplingParams(n=width, seed=seed, max_tokens=output, ignore_eos=True)
    return BeamSearchParams(width=width, max_tokens=output, ignore_eos=True)


def requests_of(
    lengths: Lengths, tokens: Sequence[int], count: int, scale: float
) -> Iterator[tuple[list[int], int]]:
    """Prompts and numbers of tokens to generate."""
    text, rng = TokenText(tokens), np.random.default_rng(0)
    for prompt, output in rng.gamma(2.0, 0.5, (count, 2)):
        yield (
            text.take(max(1, round(lengths.prompt * scale * prompt))),
            max(2, round(lengths.output * scale * output)),
        )


def measure(engine: Engine, asked: list[tuple[list[int], Params]]) -> Saved:
    """Serve requests, ``IN_FLIGHT`` at a time."""
    saved, waiting, block_size = Saved(), iter(asked), engine.cache.block_size
    for prompt, params in itertools.islice(waiting, IN_FLIGHT):
        engine.add(prompt, params)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"a step failed: {output.error}")
            if output.finished:
                for prompt, params in itertools.islice(waiting, 1):
                    engine.add(prompt, params)
        for request in engine.scheduler.running:
            saved.add(request, block_size)
    return saved


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="repeatable")
    parser.add_argument("--requests", type=positive(int), default=16, metavar="N")
    parser.add_argument("--scale", type=positive(float), default=1.0, help="of every length")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    parser.add_argument("--model", help="directory or GGUF file [default: the default model]")
    parser.add_argument("--block-size", type=positive(int), default=16)
    args = parser.parse_args(arguments)
    results = []
    for system in args.system or SYSTEMS:
        options = EngineOptions(
            model=args.model,
            prefix_cache=system,
            block_size=args.block_size,
            kv_cache_memory="2GiB",
        )
        engine = Engine(options)
        print(f"\n{engine.summary}; {args.requests} requests a case, {IN_FLIGHT} in flight")
        tokens = engine.tokenizer.encode(real_text(), add_special_tokens=False)
        rows = []
        for lengths, kind, width in itertools.product(SETS, ("sampling", "beam search"), WIDTHS):
            print(f"  {system}: {lengths.name}, {kind} of {width}", file=sys.stderr)
            cases = requests_of(lengths, tokens, args.requests, args.scale)
            asked = [
                (prompt, params_of(kind, width, output, 1000 * seed))
                for seed, (prompt, output) in enumerate(cases)
            ]
            saved = measure(engine, asked)
            results.append(
                {"system": system, "set": lengths.name, "kind": kind, "width": width}
                | asdict(saved)
            )
            rows.append(
                (
                    f"{lengths.name}, {lengths.prompt} in / {lengths.output} out",
                    kind,
                    str(width),
                    f"{100 * saved.share:.1f} %",
                    f"{100 * saved.share_in_prompts:.1f} %",
                    lengths.paper[kind],
                )
            )
        header = ("lengths", "kind", "sequences", "saved", "prompt", "the paper, 2-6")
        show(f"Blocks saved by sharing, {system}, block {args.block_size}", header, rows)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
