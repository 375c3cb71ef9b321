"""The manager's benchmark, in short form: it measures every case of every side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "bench_manager.py"


def test_all_of_it_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--scale", "0.01", "--rounds", "1"]
    command += ["--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written) == 4
    for title, results in written.items():
        sides = ["ours", "SHA-256"] if title.startswith("sha") else ["NumPy", "list", "twin"]
        assert [result["length"] for result in results] == [512, 8192, 100_000]
        for result in results:
            assert list(result["sides"]) == sides
            assert all(cost > 0 for costs in result["sides"].values() for cost in costs)
        assert title in done.stdout
