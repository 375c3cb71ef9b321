"""Imports inside the package follow the layers of docs/design.md, and stay light where promised."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "prefixkv"

# Who may import whom directly; what is below those is allowed too, nothing else is.
# "prefixkv" is the package's own __init__, its public face.
LAYERS = """
    __main__ -> cli
    cli      -> server page cluster demo prefixkv
    demo     -> prefixkv
    cluster  -> server
    server   -> engine prefixkv
    page     -> replay engine
    replay   -> engine
    prefixkv -> engine
    engine   -> model insight
    insight  -> cache
    model    -> request config
    cache    -> request config
    request  -> errors
    config   -> errors
    errors   -> _core
    _core    ->
"""


def parse(table: str) -> dict[str, set[str]]:
    """For each unit, all units below it."""
    direct = {}
    for line in table.strip().splitlines():
        unit, _, below = line.partition("->")
        direct[unit.strip()] = set(below.split())

    def reach(unit: str) -> set[str]:
        return direct[unit].union(*(reach(below) for below in direct[unit]))

    return {unit: reach(unit) for unit in direct}


def unit_of(module: str) -> str:
    """The row of the table that a module of the package belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imported_modules(source: str, package: str, units: set[str]) -> Iterator[str]:
    """Absolute names of the modules of prefixkv that a source in `package` imports, anywhere."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            # `from prefixkv import cache` names a module, `from prefixkv import LLM` does not.
            names = [
                f"{base}.{alias.name}" if base == "prefixkv" and alias.name in units else base
                for alias in node.names
            ]
        yield from (name for name in names if name.split(".")[0] == "prefixkv")


def violations(sources: dict[str, str], layers: dict[str, set[str]]) -> list[str]:
    """`sources` maps the name of each module to its text, `__init__` included."""
    found = []
    for module, source in sources.items():
        package = module.rpartition(".")[0]
        unit = unit_of(module.removesuffix(".__init__"))
        if unit not in layers:
            found.append(f"{module} is in no row of the table")
            continue
        for imported in imported_modules(source, package, set(layers)):
            other = unit_of(imported)
            if other != unit and other not in layers[unit]:
                found.append(f"{module} imports {imported}")
    return found


def package_sources() -> dict[str, str]:
    return {
        ".".join(("prefixkv", *path.relative_to(SOURCE).with_suffix("").parts)): path.read_text()
        for path in SOURCE.rglob("*.py")
    }


def test_the_package_follows_its_layers() -> None:
    sources = package_sources()
    assert "prefixkv.errors" in sources
    assert violations(sources, parse(LAYERS)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("prefixkv.cache.manager", "import prefixkv.engine.scheduler"),
        ("prefixkv.cache.manager", "from prefixkv.engine import scheduler"),
        ("prefixkv.cache.manager", "from prefixkv import engine"),
        ("prefixkv.cache.manager", "from prefixkv import LLM"),
        ("prefixkv.cache.manager", "from ..engine import scheduler"),
        ("prefixkv.cache.manager", "from .. import engine"),
        ("prefixkv.cache.__init__", "from ..engine import scheduler"),
        ("prefixkv.cache.manager", "def f():\n    from prefixkv.server import app"),
        ("prefixkv.model.llama", "from prefixkv.cache import make_cache"),
        ("prefixkv.server.app", "from prefixkv.replay import run"),
        ("prefixkv.replay.run", "from prefixkv.server import app"),
        ("prefixkv.errors", "from prefixkv.config import Config"),
        ("prefixkv.server.app", "from prefixkv.cluster import router"),
        ("prefixkv.gadget", ""),
    ],
)
def test_a_violation_is_found(module: str, source: str) -> None:
    assert len(violations({module: source}, parse(LAYERS))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("prefixkv.cache.manager", "from prefixkv import _core\nfrom . import hashing"),
        ("prefixkv.server.app", "from prefixkv.errors import RequestError\nimport torch"),
        ("prefixkv.replay.run", "from prefixkv.engine.scheduler import Scheduler"),
        ("prefixkv.__init__", "from prefixkv.engine.llm import LLM"),
        ("prefixkv.engine.llm", "from ..model.loader import load_model"),
    ],
)
def test_an_import_of_a_row_below_is_allowed(module: str, source: str) -> None:
    assert violations({module: source}, parse(LAYERS)) == []


@pytest.mark.parametrize("module", ["prefixkv", "prefixkv.cache", "prefixkv.engine.scheduler"])
def test_torch_is_not_imported_by(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
