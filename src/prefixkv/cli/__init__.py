"""The command line: ``prefixkv serve | generate | chat | demo``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from prefixkv import how_to_install

MISUSE = 2
INTERRUPTED = 130


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 on an error, 2 on misuse, 130 on Ctrl-C."""
    try:
        import click

        from prefixkv.cli.app import app
        from prefixkv.cli.flags import usage_message, with_flag_names
        from prefixkv.errors import ConfigError, PrefixKVError
    except ModuleNotFoundError as error:
        return _missing(error)
    try:
        code = app.main(args, prog_name="prefixkv", standalone_mode=False)
    except click.UsageError as error:
        return _failed(usage_message(error), MISUSE)
    except click.ClickException as error:
        return _failed(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except ConfigError as error:
        return _failed(with_flag_names(str(error)))
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
        f"the package {package!r} is not installed; generate, chat and demo need "
        f"{how_to_install('engine')}; serve needs the extra 'server' instead"
    )


def _failed(message: str, code: int = 1) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
