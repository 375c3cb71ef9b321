"""The command line: ``prefixkv serve | generate | chat | demo``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 on an error, 2 on misuse, 130 on Ctrl-C."""
    try:
        import click

        from prefixkv.cli.app import app
        from prefixkv.errors import PrefixKVError
    except ModuleNotFoundError as error:
        return _missing(error)
    try:
        code = app.main(args, prog_name="prefixkv", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except PrefixKVError as error:
        return _failed(str(error))
    except ModuleNotFoundError as error:
        return _missing(error)
    return code if isinstance(code, int) else 0


def _missing(error: ModuleNotFoundError) -> int:
    """Say what to install; a missing module of our own is a fault and raised again."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "prefixkv"):
        raise error
    return _failed(
        f"the package {package!r} is not installed; pip install 'prefixkv[engine]' brings what "
        "generate, chat and demo need, 'prefixkv[server]' what serve needs too"
    )


def _failed(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1
