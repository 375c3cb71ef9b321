"""Prompts as token ids: text is tokenised, in a thread when it is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from prefixkv.errors import RequestError
from prefixkv.model.tokenizer import Tokenizer
from prefixkv.server.errors import shown

MAX_PROMPTS = 1024

# About a millisecond of tokenising: shorter texts cost less than handing them to a thread.
_THREAD_CHARS = 4096


async def completion_prompts(tokenizer: Tokenizer, prompt: Any) -> list[list[int]]:
    """The prompts of ``/v1/completions``: a string, strings, token ids or lists of token ids.

    Raises:
        RequestError: it is none of these, or empty, or more than 1024 prompts.
    """
    prompts = _as_list(prompt)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"prompt holds {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed",
            param="prompt",
        )
    return [await _token_ids(tokenizer, item) for item in prompts]


async def chat_prompt(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """The token ids of a conversation, ready for the assistant's next turn."""
    size = sum(len(message["content"]) for message in messages)
    return await _maybe_in_thread(
        size, lambda: tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    )


def _as_list(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError(
            f"prompt is {shown(prompt)}; it must be a string, token ids, or a list of either",
            param="prompt",
        )
    if not prompt:
        raise RequestError("prompt is empty; send a text or a token id at least", param="prompt")
    return prompt if isinstance(prompt[0], str | list) else [prompt]


async def _token_ids(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return await _maybe_in_thread(len(prompt), lambda: tokenizer.encode(prompt))
    if not isinstance(prompt, list):
        raise RequestError(
            f"prompt holds {shown(prompt)}; it must be a string, token ids, or a list of either",
            param="prompt",
        )
    for token in prompt:
        if type(token) is not int or not 0 <= token < tokenizer.vocab_size:
            raise RequestError(
                f"prompt holds {shown(token)}; a token id of this model is a whole number "
                f"from 0 to {tokenizer.vocab_size - 1}",
                param="prompt",
            )
    return prompt


async def _maybe_in_thread(size: int, encode: Callable[[], list[int]]) -> list[int]:
    return await asyncio.to_thread(encode) if size > _THREAD_CHARS else encode()
