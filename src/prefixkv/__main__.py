"""``python -m prefixkv``."""

import sys

from prefixkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
