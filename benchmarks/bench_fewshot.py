"""A few-shot prefix that all requests share, as in section 6.4 of the PagedAttention paper.

    python benchmarks/bench_fewshot.py [--repeats 3] [--scale 1] [--json FILE] ...

Every request is a common prefix of 80 or of 341 tokens, those of the paper's one-shot and
five-shot translation prompts, a sentence of its own and a translation. Sides: the prefix cache off;
paged, the prefix reserved before the run, which is what the paper measured; hash and radix, which
find it by themselves. Sides alternate, each an engine in a process of its own that starts every run
from an empty cache; figures are medians.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from bench_engine import close, engine_parser, machine, measure, print_header, start_sides
from bench_systems import show
from workloads import TokenText, Turn, Workload, real_text

PREFIXES = {80: "1.67x", 341: "3.58x"}  # tokens, and the paper's gain
SENTENCE, TRANSLATION = 30, 40  # tokens; the data set of the paper has such sentences
IN_FLIGHT = 16
SIDES = {name: {"prefix_cache": name} for name in ("off", "paged", "hash", "radix")}


def few_shot(tokens: Sequence[int], prefix: int, requests: int, scale: float) -> Workload:
    """All begin with the same ``prefix`` tokens; ``scale`` shrinks every length."""
    text = TokenText(tokens)
    prefix, sentence, output = (max(1, round(n * scale)) for n in (prefix, SENTENCE, TRANSLATION))
    common = text.take(prefix)
    chains = [[Turn(common + text.take(sentence), output)] for _ in range(requests)]
    about = f"{requests} requests, {prefix} common tokens and {sentence} of their own, {output} out"
    return Workload(f"prefix-{prefix}", about, IN_FLIGHT, chains, common)


def rows_of(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row a side; the gain is of medians, the spread that of the pairs of one repeat."""
    base = result["sides"]["off"]
    rows = []
    for name, side in result["sides"].items():
        median, pairs = side["median"], zip(base["runs"], side["runs"], strict=True)
        gains = [off["run_s"] / on["run_s"] for off, on in pairs]
        rows.append(
            (
                name,
                f"{result['requests'] / median['run_s']:.2f}",
                f"{median['output_tokens_per_s']:.1f}",
                f"{median['cached_tokens']:,.0f}",
                f"{median['computed_tokens']:,.0f}",
                f"{median['ttft_median_s']:.3f}",
                f"{base['median']['run_s'] / median['run_s']:.2f}x",
                f"{min(gains):.2f}-{max(gains):.2f}",
            )
        )
    return rows


HEADER = ("cache", "requests/s", "out tok/s", "cached", "computed", "TTFT s", "gain", "of pairs")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--requests", type=int, default=96, metavar="N")
    args = parser.parse_args(arguments)
    sides = start_sides(args, SIDES)
    try:
        facts = machine(sides[0].describe())
        print_header(facts, args, facts["engine"].replace("cache off", "cache as told"))
        tokens = sides[0].encode(real_text())
        results = []
        for prefix, paper in PREFIXES.items():
            workload = few_shot(tokens, prefix, args.requests, args.scale)
            results.append(measure(workload, sides, args.repeats))
            title = f"{workload.about}, {IN_FLIGHT} in flight; the paper's gain: {paper}"
            show(title, HEADER, rows_of(results[-1]))
            same = "the same" if results[-1]["same_answers"] else "DIFFERENT"
            print(f"\nanswers of all runs are {same}", flush=True)
        if args.json:
            written = {"machine": facts, "results": results}
            args.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    finally:
        close(sides)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
