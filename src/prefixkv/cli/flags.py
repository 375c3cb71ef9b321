"""Flags from the fields of an options class, so that there is one list of options."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


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
    """Make an options object from the values of its flags and remove them from ``values``."""
    names = [item.name for item in fields(typing.cast("Any", kind))]
    return kind(**{name: values.pop(name) for name in names})


def _flag(item: Field[Any], hint: Any) -> Callable[[Command], Command]:
    name = "--" + item.name.replace("_", "-")
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
