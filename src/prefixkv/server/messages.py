"""Chat messages as the chat template takes them."""

from __future__ import annotations

from typing import Any

from prefixkv.errors import RequestError
from prefixkv.server.errors import shown, shown_name
from prefixkv.server.fields import unsupported

ROLES = ("system", "developer", "user", "assistant")

# What an assistant message of a former answer carries when there is nothing in it.
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_ECHOED = ("annotations", "audio", "function_call", "reasoning_content", "refusal", "tool_calls")


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Check messages and join their text parts, one part a line.

    Chat templates know no developer, the newer name of the system role, so it becomes that.

    Raises:
        RequestError: a role, a field or a kind of content that is unknown or unsupported.
    """
    if not messages:
        raise RequestError("messages is empty; send one message or more", param="messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(where: str, message: dict[str, Any]) -> dict[str, str]:
    fields = dict(message)
    for name in _ECHOED:
        value = fields.pop(name, None)
        if value not in _EMPTY:
            raise unsupported(f"{where}.{name}", value)
    clean = {"role": _role(where, fields.pop("role", None))}
    clean["content"] = _content(f"{where}.content", fields.pop("content", None))
    name = fields.pop("name", None)
    if name is not None:
        clean["name"] = _string(f"{where}.name", name)
    for unknown in fields:
        raise _unknown(where, unknown)
    return clean


def _role(where: str, role: Any) -> str:
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {shown(role)}; it must be one of {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    return "system" if role == "developer" else str(role)


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is {shown(content)}; it must be a string or a list of text parts",
            param=where,
        )
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise RequestError(
            f'{where} is {shown(part)}; it must be {{"type": "text", "text": ...}}', param=where
        )
    if part.get("type") != "text":
        raise RequestError(
            f"{where}.type is {shown(part.get('type'))}; only text parts are supported",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    for unknown in part.keys() - {"type", "text"}:
        raise _unknown(where, unknown)
    return _string(f"{where}.text", part.get("text"))


def _unknown(where: str, name: str) -> RequestError:
    field = f"{where}.{shown_name(name)}"
    return RequestError(
        f"{field} is not a field that this server knows; leave it out",
        param=field,
        code="unknown_parameter",
    )


def _string(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} is {shown(value)}; it must be a string", param=where)
    return value
