"""The wheel in an environment of its own, with NumPy and no torch: what the library's users get.

The long form only (`make wheel-test`): it builds the package.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest

from prefixkv.config import CACHE_SYSTEMS

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent

USE = """
import sys
import numpy as np
from prefixkv.cache import make_cache

cache = make_cache(sys.argv[1], num_blocks=16, block_size=4)
seq = cache.sequence(list(range(10)))
table = cache.table(owner="first")
assert cache.allocate(table, seq.num_tokens, cache.lookup(seq)) is not None
cache.commit(table, seq, seq.num_tokens)
if sys.argv[1] == "paged":
    cache.reserve(table, 10)
cache.free(table)
again = cache.sequence(np.arange(11))
hit = cache.lookup(again)
table = cache.table()
assert cache.allocate(table, again.num_tokens, hit) is not None
cache.commit(table, again, again.num_tokens)
cache.free(table)
cache.check()
print(hit.num_tokens, "torch" in sys.modules)
"""
HITS = {"hash": 8, "radix": 8, "paged": 10, "off": 0}

TYPED = """
from prefixkv.cache import BlockTable, CacheManager, Grant, Hit, Sequence, make_cache
from prefixkv.errors import CacheError


def admit(cache: CacheManager, prompt: list[int]) -> tuple[BlockTable, int] | None:
    seq: Sequence = cache.sequence(prompt)
    hit: Hit = cache.lookup(seq)
    table = cache.table()
    grant: Grant | None = cache.allocate(table, seq.num_tokens, hit)
    if grant is None:
        return None
    blocks: list[int] = grant.new_blocks
    return table, len(blocks) + hit.num_tokens


try:
    admit(make_cache(num_blocks=4), [1, 2, 3])
except CacheError as error:
    print(error)
"""


@dataclass(frozen=True)
class Installed:
    wheel: Path
    python: Path
    directory: Path  # an empty one to work in

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return run(self.python, "-I", *arguments, cwd=self.directory)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    tools = Path(sys.executable).parent
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    variables["PATH"] = f"{tools}{os.pathsep}{variables['PATH']}"
    return subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, check=False
    )


def pip(*arguments: str | Path, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    done = run(*command, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, built with the tools of this environment and installed from nothing but itself.

    NumPy is a link to this environment's: no registry is asked, so pip would fail if the wheel
    required anything else.
    """
    directory = tmp_path_factory.mktemp("wheel")
    pip("wheel", ROOT, "--no-deps", "--no-build-isolation", "-w", directory, cwd=directory)
    (wheel,) = directory.glob("prefixkv-*.whl")
    venv.create(directory / "venv", symlinks=True)
    python = directory / "venv" / "bin" / "python"
    version = f"python{sysconfig.get_python_version()}"
    packages = directory / "venv" / "lib" / version / "site-packages"
    numpy = distribution("numpy")
    for name in {file.parts[0] for file in numpy.files or ()} - {".."}:
        (packages / name).symlink_to(str(numpy.locate_file(name)))
    pip("--python", python, "install", "--no-index", wheel, cwd=directory)
    (directory / "work").mkdir()
    return Installed(wheel, python, directory / "work")


def test_it_needs_numpy_and_nothing_else(installed: Installed) -> None:
    code = "import importlib.metadata as m; print(*sorted({d.name for d in m.distributions()}))"
    assert installed.run("-c", code).stdout.split() == ["numpy", "prefixkv"]


@pytest.mark.parametrize("system", CACHE_SYSTEMS)
def test_every_system_works_without_torch(installed: Installed, system: str) -> None:
    done = installed.run("-c", USE, system)
    assert done.stdout.split() == [str(HITS[system]), "False"], done.stderr


@pytest.mark.parametrize("document", ["README.md", "docs/library.md"])
def test_the_programs_of_the_documents_run(installed: Installed, document: str) -> None:
    """Those that use the library alone; what they leave out is given here."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)
    programs = [block for block in blocks if re.search(r"\bcache(\.| = )", block)]
    assert programs
    given = "prompt, token, done = list(range(40)), 7, True\n"
    done = installed.run("-c", given + "\n".join(programs))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["prefixkv/py.typed", "prefixkv/_core.pyi"])
def test_types_come_with_it(installed: Installed, name: str) -> None:
    assert name in zipfile.ZipFile(installed.wheel).namelist()


def mypy(installed: Installed, program: str) -> subprocess.CompletedProcess[str]:
    file = installed.directory / "program.py"
    file.write_text(program)
    options = ["--strict", "--config-file=", "--python-executable", str(installed.python)]
    return run(sys.executable, "-m", "mypy", *options, file, cwd=installed.directory)


def test_a_typed_program_passes_the_type_checker(installed: Installed) -> None:
    done = mypy(installed, TYPED)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_program_with_a_wrong_type_does_not(installed: Installed) -> None:
    done = mypy(installed, TYPED.replace("cache.lookup(seq)", "cache.lookup(prompt)"))
    assert 'Argument 1 to "lookup"' in done.stdout


def test_the_engine_says_what_to_install(installed: Installed) -> None:
    done = installed.run("-c", "from prefixkv import LLM")
    wanted = "ImportError: LLM needs torch and more: pip install '.[engine]' in a checkout"
    assert wanted in done.stderr


def test_the_command_line_says_what_to_install(installed: Installed) -> None:
    done = installed.run("-m", "prefixkv", "serve")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "pip install '.[engine]' in a checkout" in done.stderr
