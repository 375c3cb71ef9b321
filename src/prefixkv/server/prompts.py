"""Prompts as token ids: text is tokenised, in a thread when it is long, unless it cannot fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from prefixkv.errors import ContextLengthError, RequestError
from prefixkv.model.tokenizer import Tokenizer
from prefixkv.server.errors import shown

MAX_PROMPTS = 1024

# About a millisecond of tokenising: shorter texts cost less than handing them to a thread.
_THREAD_CHARS = 4096
# What a text costs besides, counted in characters.
_TEXT_CHARS = 64

T = TypeVar("T")


class Prompts:
    """Makes prompts for one model. Thread-safe, immutable."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        tokens = (tokenizer.token(index) for index in range(tokenizer.vocab_size))
        # A vocabulary entry is at least as long as the text that it stands for.
        self._max_chars = max_model_len * max(len(token or "") for token in tokens)

    async def completion(self, prompt: Any) -> list[list[int]]:
        """The prompts of ``/v1/completions``: a string, strings, token ids or lists of token ids.

        The ids themselves are checked by the engine.

        Raises:
            RequestError: it is none of these, or empty, or more than 1024 prompts.
            ContextLengthError: token ids are more than fit, or a text is so long that no tokens
                could make it fit.
        """
        prompts = _as_list(prompt)
        for item in prompts:
            if not isinstance(item, str):
                self._check_length(item)
        size = sum(len(item) + _TEXT_CHARS for item in prompts if isinstance(item, str))
        return await _in_thread_if_long(
            size,
            lambda: [self._encode(item) if isinstance(item, str) else item for item in prompts],
        )

    async def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of a conversation, ready for the assistant's next turn.

        Raises:
            RequestError: the model has no chat template, or its template refuses the messages.
            ContextLengthError: its text is so long that no tokens could make it fit.
        """
        return await _in_thread_if_long(
            _size(messages), lambda: self._encode_chat(self._tokenizer.render_chat(messages))
        )

    async def chat_prefix(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids that conversations begin with that begin with these messages.

        Raises:
            RequestError: the model has no chat template, or its template refuses the messages.
            ContextLengthError: its text is so long that no tokens could make it fit.
        """
        return await _in_thread_if_long(
            _size(messages), lambda: self._tokenizer.chat_prefix(messages, self._encode_chat)
        )

    def _check_length(self, ids: list[int]) -> None:
        room = self._max_model_len - 1
        if len(ids) > room:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens; with one to generate at most "
                f"{self._max_model_len} fit here, so shorten it by {len(ids) - room}"
            )

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) > self._max_chars:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters; more than {self._max_chars} cannot be "
                f"the {self._max_model_len} tokens that fit here"
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _encode_chat(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


def _as_list(prompt: Any) -> list[str | list[int]]:
    if prompt == []:
        raise RequestError("prompt is empty; send a text or a token id at least", param="prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not isinstance(prompt, list):
        raise _wrong_kind("is", prompt)
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed",
            param="prompt",
        )
    for item in prompt:
        if not isinstance(item, str | list):
            raise _wrong_kind("holds", item)
    return prompt


def _wrong_kind(verb: str, value: Any) -> RequestError:
    return RequestError(
        f"prompt {verb} {shown(value)}; it must be a string, token ids, or a list of either",
        param="prompt",
    )


def _size(messages: list[dict[str, str]]) -> int:
    return sum(len(text) + _TEXT_CHARS for message in messages for text in message.values())


async def _in_thread_if_long(size: int, encode: Callable[[], T]) -> T:
    return await asyncio.to_thread(encode) if size > _THREAD_CHARS else encode()
