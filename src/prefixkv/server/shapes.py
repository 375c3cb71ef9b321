"""Answers in the two OpenAI shapes, whole and in streamed pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from prefixkv.request import RequestOutput, SampleOutput
from prefixkv.server.generation import Job
from prefixkv.server.logprobs import chat_logprobs, completion_logprobs
from prefixkv.server.serving import TokenTexts

Object = dict[str, Any]


class Shape(Protocol):
    """One dialect. A shape serves one request: it may keep what earlier pieces held."""

    whole: str
    piece: str

    def opening(self, index: int) -> Object | None:
        """The choice that comes before all text, if the dialect has one."""

    def delta(self, index: int, piece: SampleOutput) -> Object | None:
        """A streamed piece of a choice; None when it has nothing to say."""

    def choice(self, index: int, output: SampleOutput) -> Object:
        """A whole choice."""


class ChatShape:
    """``chat.completion``: messages and deltas."""

    whole = "chat.completion"
    piece = "chat.completion.chunk"

    def __init__(self, token_text: TokenTexts) -> None:
        self._token_text = token_text

    def opening(self, index: int) -> Object | None:
        return _choice(index, "delta", {"role": "assistant", "content": ""}, SampleOutput())

    def delta(self, index: int, piece: SampleOutput) -> Object | None:
        if _says_nothing(piece):
            return None
        delta = {"content": piece.text} if piece.text else {}
        return self._with_logprobs(_choice(index, "delta", delta, piece), piece)

    def choice(self, index: int, output: SampleOutput) -> Object:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return self._with_logprobs(_choice(index, "message", message, output), output)

    def _with_logprobs(self, choice: Object, output: SampleOutput) -> Object:
        if output.logprobs is not None:
            content = chat_logprobs(output.logprobs, self._token_text)
            choice["logprobs"] = {"content": content, "refusal": None}
        return choice


class CompletionShape:
    """``text_completion``: plain text; logprobs count their offsets along each choice.

    A hypothesis of beam search has its ``score``, which OpenAI's choices have not.
    """

    whole = "text_completion"
    piece = "text_completion"

    def __init__(self, token_text: TokenTexts) -> None:
        self._token_text = token_text
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> Object | None:  # noqa: ARG002 - text has no role
        return None

    def delta(self, index: int, piece: SampleOutput) -> Object | None:
        return None if _says_nothing(piece) else self.choice(index, piece)

    def choice(self, index: int, output: SampleOutput) -> Object:
        choice = _choice(index, "text", output.text, output)
        if output.score is not None:
            choice["score"] = output.score
        if output.logprobs is not None:
            offset = self._offsets.get(index, 0)
            entries, end = completion_logprobs(output.logprobs, self._token_text, offset)
            choice["logprobs"] = entries
            self._offsets[index] = end
        return choice


def envelope(job: Job, created: int, kind: str, choices: Sequence[Object]) -> Object:
    """What is around the choices of an answer or a piece."""
    return {
        "id": job.id,
        "object": kind,
        "created": created,
        "model": job.model,
        "choices": list(choices),
    }


def usage(outputs: Sequence[RequestOutput]) -> Object:
    """Token counts of a request: its prompts once, the output of all its choices."""
    prompt = sum(output.num_prompt_tokens for output in outputs)
    completion = sum(len(each.token_ids) for output in outputs for each in output.samples)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _says_nothing(piece: SampleOutput) -> bool:
    return not (piece.text or piece.logprobs or piece.finish_reason)


def _choice(index: int, name: str, content: Any, output: SampleOutput) -> Object:
    return {
        "index": index,
        name: content,
        "logprobs": None,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
