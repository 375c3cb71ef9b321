"""Flags that say how tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from prefixkv.cli.flags import take
from prefixkv.request import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])


def sampling_flags(max_tokens: int) -> Callable[[Command], Command]:
    """Add the flags of sampling; ``max_tokens`` is the default of its flag."""
    options = (
        click.option("--max-tokens", default=max_tokens, show_default=True, help="Most new tokens"),
        click.option(
            "--temperature", default=0.0, show_default=True, help="0 takes the likeliest token"
        ),
        click.option(
            "--top-p", default=1.0, show_default=True, help="Keep tokens up to this probability"
        ),
        click.option("--top-k", default=0, show_default=True, help="Keep the k likeliest; 0: all"),
        click.option(
            "--min-p",
            default=0.0,
            show_default=True,
            help="Drop tokens below this share of the best",
        ),
        click.option("--seed", type=int, help="Makes sampling repeatable"),
        click.option("--stop", multiple=True, help="Text that ends the output; may be repeated"),
    )

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """Make parameters from the values of the flags and remove them from ``values``.

    Raises:
        click.UsageError: a value is out of its limits.
    """
    return take(SamplingParams, values)
