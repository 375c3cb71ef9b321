"""Log-probabilities in the shapes of both dialects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prefixkv.request import TokenLogprobs

# JSON has no infinity; OpenAI writes this for a token that cannot come.
MIN_LOGPROB = -9999.0
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

TokenText = Callable[[int], str]


def chat_logprobs(entries: Sequence[TokenLogprobs], text: TokenText) -> list[dict[str, Any]]:
    """One object a token with its most likely alternatives."""
    return [
        _token(text(entry.token_id), entry.logprob)
        | {"top_logprobs": [_token(text(token), value) for token, value in entry.top]}
        for entry in entries
    ]


def completion_logprobs(
    entries: Sequence[TokenLogprobs], text: TokenText, offset: int
) -> tuple[dict[str, Any], int]:
    """Parallel lists, and the offset in the text after the last token.

    The alternatives of a token include the token itself. Of two tokens with the same text, the
    more likely one is shown.
    """
    tokens = [text(entry.token_id) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    shape = {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_alternatives(entry, text) for entry in entries],
        "text_offset": offsets,
    }
    return shape, offset


def _alternatives(entry: TokenLogprobs, text: TokenText) -> dict[str, float]:
    shown: dict[str, float] = {}
    for token, value in (*entry.top, (entry.token_id, entry.logprob)):
        shown.setdefault(text(token), _finite(value))
    return shown


def _token(text: str, logprob: float) -> dict[str, Any]:
    """``bytes`` is null for a token that is only a part of a character."""
    whole = REPLACEMENT not in text
    return {
        "token": text,
        "logprob": _finite(logprob),
        "bytes": list(text.encode()) if whole else None,
    }


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
