"""The documents of the library say what is there, and their programs run."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import prefixkv.cache
import prefixkv.errors

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ["api.md", "library.md", "moving.md", "systems.md", "design.md"]
PROGRAMS = ["library.md", "moving.md", "systems.md"]
# What the programs leave out, as it would be in an engine.
GIVEN = {"prompt": list(range(40)), "token": 7, "done": True}

Members = dict[str, str | None]


def documented() -> dict[str, Members]:
    """For each heading that is a name: the names in its table, with parameters if there are any."""
    found: dict[str, Members] = {}
    name = ""
    for line in (DOCS / "api.md").read_text().splitlines():
        if heading := re.match(r"## (.*)", line):
            name = heading[1].strip("`") if heading[1].startswith("`") else ""
            found.setdefault(name, {})
        elif name and (row := re.match(r"\| `(\w+)(?:\((.*?)\))?` \|", line)):
            found[name][row[1]] = row[2]
    del found[""]
    return found


def public_members(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def parameters(name: str) -> Members:
    """Each method's parameters as the type stub or the protocol has them; None for a property."""
    files = ("src/prefixkv/_core.pyi", "src/prefixkv/cache/manager.py")
    nodes = (node for file in files for node in ast.parse((ROOT / file).read_text()).body)
    (owner,) = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name)
    found: Members = {}
    for method in owner.body:
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
            continue
        arguments = [argument.arg for argument in method.args.args[1:]]
        values = [ast.unparse(value) for value in method.args.defaults]
        required = len(arguments) - len(values)
        shown = arguments[:required]
        shown += [f"{a}={v}" for a, v in zip(arguments[required:], values, strict=True)]
        found[method.name] = None if method.decorator_list else ", ".join(shown)
    return found


def classes() -> list[str]:
    names = prefixkv.cache.__all__
    return [name for name in names if isinstance(getattr(prefixkv.cache, name), type)]


def test_the_reference_has_every_public_name_and_no_other() -> None:
    assert set(documented()) == set(prefixkv.cache.__all__)


@pytest.mark.parametrize("name", classes())
def test_the_reference_has_every_member_and_no_other(name: str) -> None:
    assert set(documented()[name]) == public_members(getattr(prefixkv.cache, name))


@pytest.mark.parametrize("name", classes())
def test_the_reference_has_the_parameters(name: str) -> None:
    assert documented()[name] == parameters(name)


def test_the_protocol_is_what_a_cache_has() -> None:
    cache = prefixkv.cache.make_cache(num_blocks=1)
    assert public_members(prefixkv.cache.CacheManager) == public_members(type(cache))


def test_the_reference_has_the_arguments_of_make_cache() -> None:
    signature = inspect.signature(prefixkv.cache.make_cache)
    assert list(documented()["make_cache"]) == list(signature.parameters)


def test_the_errors_of_the_reference_exist() -> None:
    section = (DOCS / "api.md").read_text().partition("## Errors")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `(\w+)` ", section, flags=re.MULTILINE)
    assert names
    assert all(issubclass(getattr(prefixkv.errors, name), Exception) for name in names)


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_run(page: str) -> None:
    """In order, as one program."""
    text = (DOCS / page).read_text()
    programs = list(re.finditer(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    assert programs
    names: dict[str, object] = dict(GIVEN)
    for program in programs:
        above = text.count("\n", 0, program.start(1))  # so that an error tells the line of the page
        exec(compile("\n" * above + program[1], page, "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_something(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (DOCS / page).read_text())
    missing = [t for t in targets if "://" not in t and not (DOCS / t).exists()]
    assert not missing
