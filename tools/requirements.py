"""Print the requirements of an extra, the extras that it names followed: what pip would install."""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]


def requirements(extra: str) -> list[str]:
    found: list[str] = []
    for requirement in PROJECT["optional-dependencies"][extra]:
        own = re.fullmatch(rf"{PROJECT['name']}\[(\w+)\]", requirement)
        found += requirements(own[1]) if own else [requirement]
    return found


if __name__ == "__main__":
    print("\n".join(PROJECT["dependencies"] + requirements(sys.argv[1])))
