"""The Python API: a model and its engine in one object."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from prefixkv.config import EngineOptions
from prefixkv.engine.engine import Engine, Progress
from prefixkv.engine.reservations import reservation_of
from prefixkv.errors import ConfigError, RequestError
from prefixkv.request import (
    BeamSearchParams,
    Params,
    RequestOutput,
    Reservation,
    SamplingParams,
)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A language model with automatic prefix caching.

    Calls from several threads are served one after the other; ``AsyncEngine`` serves many at once.

        llm = LLM()
        first, second = llm.generate([document + a, document + b], SamplingParams(max_tokens=64))
        print(second.text, second.num_cached_tokens)

    Args:
        model: a Hugging Face directory or a GGUF file; None is SmolLM2-135M-Instruct, fetched once.
        progress: called with (stage, done, total) during long work: fetch, convert, load.
        **options: the fields of ``EngineOptions``, which are the flags of ``prefixkv serve``.

    Raises:
        ModelError: the model cannot be found, read or served.
        ConfigError: an option is unknown, out of its limits, or does not fit the machine.
    """

    def __init__(
        self, model: str | Path | None = None, *, progress: Progress | None = None, **options: Any
    ) -> None:
        known = EngineOptions.__dataclass_fields__
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown option {unknown[0]!r}; there are {', '.join(sorted(known))}"
            )
        self.engine = Engine(EngineOptions(model=model, **options), progress)
        self._lock = threading.Lock()
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once; outputs come in the order of the prompts.

        Args:
            prompts: text or token ids; one prompt or a list of them.
            params: for all prompts, or one for each; None means the defaults. With
                ``SamplingParams(n=4)`` or ``BeamSearchParams(width=4)`` an output has 4
                ``samples``.
            cache_salt: prefixes are shared only between requests with the same salt.

        Raises:
            RequestError, ContextLengthError: a prompt cannot be served; none is then run.
        """
        listed = _as_list(prompts)
        token_ids = [self._encoded(prompt) for prompt in listed]
        return self._run(token_ids, _params_for(params, len(listed)), cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations in the model's chat format: one (a list of messages) or several."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations = cast(
            "Sequence[Sequence[Message]]", [messages] if one and messages else messages
        )
        token_ids = [
            self.engine.tokenizer.apply_chat_template([dict(message) for message in conversation])
            for conversation in conversations
        ]
        return self._run(token_ids, _params_for(params, len(token_ids)), cache_salt)

    def reserve(self, prompt: Prompt, *, cache_salt: str | None = None) -> Reservation:
        """Compute the K/V of a prompt and hold it until ``release``.

        Prompts that begin with it find it (in ``paged`` to the token, in ``hash`` and ``radix`` its
        full blocks), whatever is served in between. A text's last token may read otherwise when
        more text follows: end it where words end.

        Args:
            prompt: text or token ids.
            cache_salt: only requests with the same salt find it.

        Raises:
            RequestError, ContextLengthError: it cannot be served; the cache is ``off``; or too few
                blocks would be left for the longest request.
        """
        return self._reserve(self._encoded(prompt), cache_salt)

    def reserve_chat(
        self, messages: Sequence[Message], *, cache_salt: str | None = None
    ) -> Reservation:
        """``reserve`` what every conversation has in common that begins with these messages."""
        return self._reserve(self.engine.tokenizer.chat_prefix(messages), cache_salt)

    def release(self, reservation: Reservation | str) -> None:
        """End a reservation, by itself or by its id.

        Raises:
            RequestError: there is none of this id.
        """
        with self._lock:
            self.engine.release(
                reservation.id if isinstance(reservation, Reservation) else reservation
            )

    @property
    def reservations(self) -> list[Reservation]:
        """What is reserved, the oldest first."""
        return self.engine.reservations

    def _encoded(self, prompt: Prompt) -> list[int]:
        return self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _reserve(self, prompt: list[int], cache_salt: str | None) -> Reservation:
        (output,) = self._run([prompt], [SamplingParams()], cache_salt, reserve=True)
        return reservation_of(output)

    def _run(
        self,
        prompts: list[list[int]],
        params: list[Params],
        cache_salt: str | None,
        *,
        reserve: bool = False,
    ) -> list[RequestOutput]:
        with self._lock:
            return self._run_alone(prompts, params, cache_salt, reserve)

    def _run_alone(
        self,
        prompts: list[list[int]],
        params: list[Params],
        cache_salt: str | None,
        reserve: bool,
    ) -> list[RequestOutput]:
        engine = self.engine
        for prompt, each in zip(prompts, params, strict=True):
            engine.validate(prompt, each, cache_salt)
        outputs: dict[str, RequestOutput] = {}
        try:
            for prompt, each in zip(prompts, params, strict=True):
                request_id = f"llm-{next(self._ids)}"
                outputs[request_id] = RequestOutput(request_id)
                engine.add(
                    prompt, each, request_id=request_id, cache_salt=cache_salt, reserve=reserve
                )
            while engine.has_work:
                for piece in engine.step():
                    outputs[piece.request_id].extend(piece)
        finally:  # an interrupt leaves nothing behind
            for request_id in outputs:
                engine.abort(request_id)
        return list(outputs.values())


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [cast("list[int]", items)]
    return cast("list[Prompt]", items)


def _params_for(params: Params | Sequence[Params] | None, count: int) -> list[Params]:
    if params is None or isinstance(params, SamplingParams | BeamSearchParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"there are {len(params)} params for {count} prompts; give one, or one for each",
            param="params",
        )
    return list(params)
