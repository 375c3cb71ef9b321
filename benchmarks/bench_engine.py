"""The engine under load, with the prefix cache on and off, alternating in one run.

    python benchmarks/bench_engine.py [--workload W1] [--repeats 3] [--json FILE] [--model M] ...

Each side is an engine in a process of its own and starts every run from an empty cache. A closed
loop keeps a workload's number of requests in flight: as one ends, the next is added. Prompts are
token ids cut from real text, decoding is greedy, end-of-sequence tokens do not end a request.
Figures are medians over the repeats. Compare sides of one run only: machines differ, and the same
machine differs from hour to hour.

W1 and W2 run at concurrency 1 and 4 (W1-c1, W1-c4, ...); a family's name selects both. `--scale`
shrinks every length, for a quick look. TTFT is the time to the first token, the queue included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from side_process import SideProcess
from workloads import Workload, make_workloads, real_text

SIDES = {"cache on": {"prefix_cache": "hash"}, "cache off": {"prefix_cache": "off"}}
COLUMNS = (
    ("run s", "run_s", "{:.2f}"),
    ("TTFT s", "ttft_median_s", "{:.3f}"),
    ("p95", "ttft_p95_s", "{:.3f}"),
    ("out tok/s", "output_tokens_per_s", "{:.1f}"),
    ("ms/token", "ms_per_token", "{:.1f}"),
    ("prompt", "prompt_tokens", "{:,.0f}"),
    ("cached", "cached_tokens", "{:,.0f}"),
    ("computed", "computed_tokens", "{:,.0f}"),
    ("peak MB", "peak_memory_mb", "{:,.0f}"),
)
RATIOS = ("run_s", "ttft_median_s")

Summary = dict[str, Any]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = engine_parser(__doc__)
    parser.add_argument("--workload", action="append", metavar="NAME", help="only this; repeatable")
    parser.add_argument("--block-size", type=positive(int), default=16)
    return parser.parse_args(arguments)


def engine_parser(about: str | None) -> argparse.ArgumentParser:
    """What every benchmark of the engine asks."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=positive(int), default=3)
    parser.add_argument("--scale", type=positive(float), default=1.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    parser.add_argument("--model", help="directory or GGUF file [default: the default model]")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=positive(int))
    parser.add_argument("--token-budget", type=positive(int))
    # A fixed pool: a share of free memory would depend on the other side, and on the hour.
    parser.add_argument("--kv-cache-memory", default="1GiB")
    return parser


def positive(kind: type) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    parse.__name__ = kind.__name__
    return parse


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("model", "dtype", "threads", "block_size", "token_budget", "kv_cache_memory")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def start_sides(
    args: argparse.Namespace, options_of: Mapping[str, dict[str, Any]]
) -> list[SideProcess]:
    """An engine in a process of its own for each name, with these options beside those of all."""
    script = str(Path(__file__).with_name("prefixkv_side.py"))
    sides: list[SideProcess] = []
    try:
        for name, own in options_of.items():
            options = json.dumps({**engine_options(args), **own})
            sides.append(SideProcess(name, [sys.executable, script, options]))
            # One after the other: the first fetches and converts the default model for all.
            sides[-1].wait_until_ready()
    except BaseException:
        close(sides)
        raise
    return sides


def close(sides: Sequence[SideProcess]) -> None:
    for side in sides:
        side.close()


def selected(workloads: list[Workload], names: list[str] | None) -> list[Workload]:
    """Those that a name or the name of a family selects; all if there are no names."""
    if not names:
        return workloads
    for name in names:
        if not any(matches(workload, name) for workload in workloads):
            known = ", ".join(workload.name for workload in workloads)
            raise SystemExit(f"there is no workload {name!r}; there are {known}")
    return [workload for workload in workloads if any(matches(workload, name) for name in names)]


def matches(workload: Workload, name: str) -> bool:
    return name in (workload.name, workload.name.partition("-")[0])


def machine(described: dict[str, Any]) -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": round(os.getloadavg()[0], 2),
        "versions": described["versions"],
        "engine": described["summary"],
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def print_header(facts: dict[str, Any], args: argparse.Namespace, engine: str) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_average']}; {versions}")
    print(engine)
    print(f"medians of {args.repeats}, scale {args.scale:g}; peak memory is of the side so far\n")


def measure(workload: Workload, sides: Sequence[SideProcess], repeats: int) -> dict[str, Any]:
    """Runs of each side, alternating; what goes first changes from repeat to repeat."""
    runs: dict[str, list[Summary]] = {side.name: [] for side in sides}
    answers: list[list[list[list[int]]]] = []
    for repeat in range(repeats):
        for side in sides if repeat % 2 == 0 else reversed(sides):
            print(f"  {workload.name}: {side.name}, {repeat + 1} of {repeats}", file=sys.stderr)
            measurement, peak = side.run(workload)
            runs[side.name].append({**measurement.summary(), "peak_memory_mb": peak})
            answers.append(measurement.answers)
    return {
        "workload": workload.name,
        "about": workload.about,
        "concurrency": workload.concurrency,
        "requests": workload.num_requests,
        "sides": {
            name: {"median": median(summaries), "runs": summaries}
            for name, summaries in runs.items()
        },
        "same_answers": all(each == answers[0] for each in answers),
    }


def median(runs: Sequence[Summary]) -> Summary:
    """The median of each figure; None where a side does not give it."""
    return {
        name: None if runs[0][name] is None else statistics.median(run[name] for run in runs)
        for name in runs[0]
    }


def ratios(medians: dict[str, Summary]) -> dict[str, Summary]:
    """Of each other side to the first: above 1 where the first is faster."""
    (_, first), *others = medians.items()
    return {name: {key: other[key] / first[key] for key in RATIOS} for name, other in others}


def print_result(result: dict[str, Any]) -> None:
    print(f"{result['workload']}: {result['about']}; {result['concurrency']} in flight")
    print(f"  {'':12}" + "".join(f"{heading:>11}" for heading, _, _ in COLUMNS))
    for name, side in result["sides"].items():
        cells = (cell(side["median"][key], form) for _, key, form in COLUMNS)
        print(f"  {name:12}" + "".join(f"{text:>11}" for text in cells))
    first = next(iter(result["sides"]))
    for name, values in result["ratios"].items():
        cells = (f"{values[key]:.2f}x" if key in values else "" for _, key, _ in COLUMNS)
        label = f"{name.removeprefix('cache ')} / {first.removeprefix('cache ')}"
        print(f"  {label:12}" + "".join(f"{text:>11}" for text in cells).rstrip())
    print(f"  answers of all runs {'are the same' if result['same_answers'] else 'DIFFER'}\n")


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    selected(make_workloads([0], args.scale), args.workload)  # ends early if a name is unknown
    sides = start_sides(args, SIDES)
    try:
        facts = machine(sides[0].describe())
        engine = facts["engine"].replace("prefix cache hash", "prefix cache on / off")
        print_header(facts, args, engine)
        results = []
        tokens = sides[0].encode(real_text())
        for workload in selected(make_workloads(tokens, args.scale), args.workload):
            result = measure(workload, sides, args.repeats)
            medians = {name: side["median"] for name, side in result["sides"].items()}
            result["ratios"] = ratios(medians)
            results.append(result)
            print_result(result)
            sys.stdout.flush()
        if args.json:
            settings = {key: value for key, value in vars(args).items() if key != "json"}
            written = {"machine": facts, "settings": settings, "results": results}
            args.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    finally:
        close(sides)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
