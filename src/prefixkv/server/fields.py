"""Fields of a request that have no effect, and those that cannot be honoured.

A field is honoured, or it is refused by name when ignoring it would change the answer; only those
that cannot change it are accepted without effect.
"""

from __future__ import annotations

from typing import Any

from prefixkv.errors import RequestError
from prefixkv.server.errors import shown

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# A field that is refused, and the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def honoured(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body that mean something here; null means absent.

    Raises:
        RequestError: a field asks for something that is not supported.
    """
    kept = {name: value for name, value in body.items() if value is not None}
    for name in WITHOUT_EFFECT & kept.keys():
        del kept[name]
    for name in REFUSED.keys() & kept.keys():
        value = kept.pop(name)
        if value not in REFUSED[name]:
            raise unsupported(name, value, *REFUSED[name])
    _drop_best_of(kept)
    return kept


def unsupported(field: str, value: Any, *neutral: Any) -> RequestError:
    """The refusal of a field whose effect this server does not have."""
    instead = "".join(f" or send {shown(other)}" for other in neutral[:1])
    return RequestError(
        f"{field} is {shown(value)}; that is not supported and ignoring it would change the "
        f"answer: leave it out{instead}",
        param=field,
        code="unsupported_parameter",
    )


def _drop_best_of(kept: dict[str, Any]) -> None:
    if kept.get("use_beam_search") is True:  # where it is the width
        return
    if "best_of" in kept and kept.pop("best_of") != kept.get("n", 1):
        raise RequestError(
            "best_of differs from n; choosing the best of more is supported in beam search only: "
            "leave it out",
            param="best_of",
            code="unsupported_parameter",
        )
