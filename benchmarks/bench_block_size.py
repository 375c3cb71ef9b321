"""What the block size costs: hit tokens, computed tokens and run time at sizes from 1 to 256.

    python benchmarks/bench_block_size.py [--system hash] [--repeats 3] [--scale 1] [--json FILE]

A prefix is found in full blocks only, so the part of a shared prefix that fills no block is
computed again; and a small block costs more bookkeeping and scatters K/V. Sides alternate, each an
engine in a process of its own that starts every run from an empty cache; figures are medians.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from bench_engine import close, engine_parser, machine, measure, print_header, start_sides
from bench_systems import show
from workloads import make_workloads, real_text

BLOCK_SIZES = (1, 4, 16, 64, 128, 256)
WORKLOADS = ("W2-c4", "W3", "W3b")
HEADER = ("block", "hit", "of prompt", "computed", "run s", "of block 16", "TTFT s")


def rows_of(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row a block size."""
    base = result["sides"]["16"]["median"]
    return [
        (
            name,
            f"{it['cached_tokens']:,.0f}",
            f"{100 * it['cached_tokens'] / it['prompt_tokens']:.1f} %",
            f"{it['computed_tokens']:,.0f}",
            f"{it['run_s']:.2f}",
            f"{it['run_s'] / base['run_s']:.2f}x",
            f"{it['ttft_median_s']:.3f}",
        )
        for name, it in ((name, side["median"]) for name, side in result["sides"].items())
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--system", choices=("hash", "radix"), default="hash")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="repeatable")
    args = parser.parse_args(arguments)
    sizes = {str(size): {"block_size": size, "prefix_cache": args.system} for size in BLOCK_SIZES}
    sides = start_sides(args, sizes)
    try:
        facts = machine(sides[0].describe())
        print_header(facts, args, facts["engine"])
        tokens = sides[0].encode(real_text())
        results = []
        for workload in make_workloads(tokens, args.scale):
            if workload.name not in (args.workload or WORKLOADS):
                continue
            results.append(measure(workload, sides, args.repeats))
            title = f"{workload.name}: {workload.about}; {workload.concurrency} in flight"
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
