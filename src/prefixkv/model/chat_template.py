"""Renders chat templates as `transformers` does, without importing it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prefixkv.errors import ModelError, RequestError


class ChatTemplate:
    """A compiled template; ``variables`` are the special tokens that it may name."""

    def __init__(self, source: str, variables: Mapping[str, str], where: str) -> None:
        self.source = source
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ModelError(f"{where}: the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; `RequestError` where the template refuses it."""
        # Clients echo answers back with null fields, which templates would print as "None".
        present = [{k: v for k, v in message.items() if v is not None} for message in messages]
        values = {**self._variables, "tools": None, "documents": None, **kwargs}
        try:
            return self._template.render(
                messages=present, add_generation_prompt=add_generation_prompt, **values
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"the model's chat template cannot render these messages: {error}",
                param="messages",
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the answers for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
