"""Write the type stub of the native module, or with --check say whether it is out of date."""

import sys
from pathlib import Path

from nanobind.stubgen import StubGen

from prefixkv import _core

STUB = Path(__file__).parent.parent / "src" / "prefixkv" / "_core.pyi"


def main() -> int:
    generator = StubGen(module=_core)
    generator.put(_core)
    text = generator.get()
    if "--check" not in sys.argv[1:]:
        STUB.write_text(text)
        return 0
    if STUB.read_text() != text:
        print(f"{STUB.name} is out of date; run `make stubs`")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
