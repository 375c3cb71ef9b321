"""Plain data of one request: what is asked, what comes out, how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefixkv.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends; OpenAI's names where OpenAI has one.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it. 0..2.
        top_p: keep the smallest set of most likely tokens whose probability reaches it. (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the most likely one. [0, 1].
        max_tokens: most tokens to generate; None means up to the model's context.
        min_tokens: end-of-sequence and stop conditions do not count before this many tokens; stop
            strings are looked for in what follows them.
        stop: strings that end the output; they are not part of it. At most 16.
        stop_token_ids: token ids that end the output; their text is not part of it.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        seed: makes a request repeatable whatever runs beside it; None draws one.
        logprobs: give the log-probability of each generated token and of this many most likely
            alternatives, 0..20; None gives none. They are of the model's distribution, before
            temperature and truncation.
        prompt_logprobs: the same for the prompt's tokens. That needs the logits of every prompt
            token, so such a request computes its whole prompt: it takes no prefix hit.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: a value is out of its limits; ``param`` names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._within("temperature", 0.0, 2.0)
        self._within("top_p", 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; it must be above 0 and at most 1", param="top_p")
        self._within("min_p", 0.0, 1.0)
        self._whole("top_k", 0)
        self._whole("min_tokens", 0)
        if self.max_tokens is not None:
            self._whole("max_tokens", 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}",
                    param="min_tokens",
                )
        if self.seed is not None:
            self._whole("seed", -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0, MAX_LOGPROBS)
        self._check_stop(stop)

    def _check_stop(self, stop: tuple[str, ...]) -> None:
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed",
                param="stop",
            )
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"stop holds {text!r}; each must be a string with a character or more",
                    param="stop",
                )
        for token in self.stop_token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise RequestError(
                    f"stop_token_ids holds {token!r}; each must be a token id, 0 or more",
                    param="stop_token_ids",
                )

    def _within(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and low <= value <= high):
            raise RequestError(
                f"{name} is {value!r}; it must be a number from {low:g} to {high:g}", param=name
            )

    def _whole(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and low <= value and (high is None or value <= high)):
            limit = f"{low} or more" if high is None else f"from {low} to {high}"
            raise RequestError(
                f"{name} is {value!r}; it must be a whole number, {limit}", param=name
            )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability (natural) of one token and of the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RequestMetrics:
    """Seconds since the request arrived; None until it happens. Queue time is in all of them."""

    queue: float | None = None
    time_to_first_token: float | None = None
    total: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A prompt whose K/V stays in the cache until it is released.

    ``num_tokens`` of its ``num_prompt_tokens`` are held: all in ``paged``, full blocks in ``hash``
    and ``radix``. ``num_computed_tokens`` had to be computed for it; the others were cached.
    """

    id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced: since the last one when streaming, in all at the end.

    ``text`` leaves out a stop string and what follows it. ``num_cached_tokens`` counts the prompt
    tokens whose K/V came from the cache when the request was first admitted.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None
    reservation: Reservation | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def extend(self, later: RequestOutput) -> None:
        """Append a streamed piece to what came before it."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.num_prompt_tokens = later.num_prompt_tokens
        self.num_cached_tokens = later.num_cached_tokens
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.metrics = later.metrics
        self.error = later.error
        self.reservation = later.reservation
