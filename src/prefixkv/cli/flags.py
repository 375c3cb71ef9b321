"""Flags from the fields of an options class, so that there is one list of options."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

from prefixkv.config import EngineOptions
from prefixkv.errors import PrefixKVError
from prefixkv.request import SamplingParams
from prefixkv.server.settings import ServerOptions

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (EngineOptions, ServerOptions, SamplingParams)


def flags(*kinds: type) -> Callable[[Command], Command]:
    """Add a flag for every field of these dataclasses, in their order."""

    def decorate(command: Command) -> Command:
        for kind in reversed(kinds):
            hints = typing.get_type_hints(kind)
            for item in reversed(fields(kind)):
                command = _flag(item, hints[item.name])(command)
        return command

    return decorate


def take(kind: Callable[..., T], values: dict[str, Any]) -> T:
    """Make an options object from the values of its flags and remove them from ``values``.

    Raises:
        click.UsageError: a value is out of its limits.
    """
    names = [item.name for item in fields(typing.cast("Any", kind)) if item.name in values]
    try:
        return kind(**{name: values.pop(name) for name in names})
    except PrefixKVError as error:
        context = click.get_current_context(silent=True)
        raise click.UsageError(with_flag_names(str(error)), context) from None


def with_flag_names(message: str) -> str:
    """A message about options that calls them by their flags.

    A name of one word is an option's where a message starts with it; elsewhere it may be a word.
    Part of a file's name is none.
    """
    names = (item.name for kind in _OPTIONS for item in fields(kind))
    pattern = "|".join(
        rf"(?<![\w./\\-]){name}(?![\w/\\-]|\.\w)" if "_" in name else rf"\A{name}\b"
        for name in names
    )
    return re.sub(pattern, lambda match: _flag_name(match[0]), message)


def usage_message(error: click.UsageError) -> str:
    """A usage error as one line, in the style of all others."""
    text = error.format_message().rstrip(".")
    command = error.ctx.command_path if error.ctx else "prefixkv"
    return f"{text[0].lower()}{text[1:]} (see {command} --help)"


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flag(item: Field[Any], hint: Any) -> Callable[[Command], Command]:
    name = _flag_name(item.name)
    default = item.default
    settings: dict[str, Any] = {"help": item.metadata["help"], "default": default}
    settings["show_default"] = default not in (None, ())
    if typing.get_origin(hint) is tuple:
        settings |= {"type": str, "multiple": True}
    elif choices := item.metadata.get("choices"):
        settings["type"] = click.Choice(choices)
    elif (kind := _scalar(hint)) is bool:
        name = f"{name}/--no-{name[2:]}"
    else:
        settings["type"] = kind
    return click.option(name, item.name, **settings)


def _scalar(hint: Any) -> type:
    """The type of a flag's value: text if text is one of the types that the field may have."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if union else (hint,)
    for kind in (str, bool, int, float):
        if kind in members:
            return kind
    raise TypeError(f"no flag can be made for a field of type {hint!r}")
