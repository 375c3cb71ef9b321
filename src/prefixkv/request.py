"""Plain data of one request: what is asked, what comes out, how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

from prefixkv.errors import RequestError, brief

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_SAMPLES = 1024
MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 16.0


class _Checked:
    """Checks of fields; each error names the value, the limit and the field."""

    __slots__ = ()

    def _fail(self, name: str, must: str) -> NoReturn:
        raise RequestError(f"{name} is {brief(getattr(self, name))}; it must be {must}", param=name)

    def _within(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and low <= value <= high):
            self._fail(name, f"a number from {low:g} to {high:g}")

    def _whole(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and low <= value and (high is None or value <= high)):
            limit = f"{low} or more" if high is None else f"from {low} to {high}"
            self._fail(name, f"a whole number, {limit}")

    def _check_length(self, max_tokens: int | None, min_tokens: int) -> None:
        self._whole("min_tokens", 0)
        if max_tokens is None:
            return
        self._whole("max_tokens", 1)
        if min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {min_tokens}, above max_tokens, {max_tokens}", param="min_tokens"
            )

    def _check_stop_tokens(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise RequestError(
                    f"stop_token_ids holds {token!r}; each must be a token id, 0 or more",
                    param="stop_token_ids",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(_Checked):
    """How tokens are chosen and when a request ends; OpenAI's names where OpenAI has one.

    Args:
        n: samples of the prompt, computed once for all. Sample i is what a request of its own
            with the seed ``seed + i`` gives. 1..1024.
        temperature: 0 is greedy; otherwise logits are divided by it. 0..2.
        top_p: keep the smallest set of most likely tokens whose probability reaches it. (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the most likely one. [0, 1].
        max_tokens: most tokens to generate, in each sample; None means up to the model's context.
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

    n: int = 1
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
        self._whole("n", 1, MAX_SAMPLES)
        self._within("temperature", 0.0, 2.0)
        self._within("top_p", 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; it must be above 0 and at most 1", param="top_p")
        self._within("min_p", 0.0, 1.0)
        self._whole("top_k", 0)
        self._check_length(self.max_tokens, self.min_tokens)
        if self.seed is not None:
            self._whole("seed", -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0, MAX_LOGPROBS)
        self._check_stop(stop)
        self._check_stop_tokens(self.stop_token_ids)

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

    def seed_of(self, index: int) -> int | None:
        """The seed of a sample: they grow by one a sample, round the int64s."""
        return None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams(_Checked):
    """Beam search: keep the ``width`` most likely continuations, step by step.

    The sequences and scores are those of ``transformers`` 5.24 (``generate(num_beams=width)``),
    ended hypotheses included. A hypothesis scores the sum of its tokens' log-probabilities divided
    by their number ** ``length_penalty``; its end-of-sequence token counts.

    Args:
        width: beams, 1..128.
        n: hypotheses to give, the best first, at most ``width``; None gives all of them.
        length_penalty: above 0 favours long hypotheses, below 0 short ones. -16..16.
        early_stopping: True ends as soon as ``width`` hypotheses have ended; False when the best
            beam, as long as it is now, no longer beats the worst of them; ``"never"`` when no
            continuation of it can.
        max_tokens: most tokens to generate; None means up to the model's context.
        min_tokens: no hypothesis ends before this many tokens.
        stop_token_ids: token ids that end a hypothesis; their text is not part of it.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        logprobs: as in ``SamplingParams``.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: a value is out of its limits; ``param`` names it.
    """

    width: int = 4
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._whole("width", 1, MAX_BEAM_WIDTH)
        if self.n is not None:
            self._whole("n", 1, self.width)
        self._within("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            self._fail("early_stopping", "true, false or 'never'")
        self._check_length(self.max_tokens, self.min_tokens)
        if self.logprobs is not None:
            self._whole("logprobs", 0, MAX_LOGPROBS)
        self._check_stop_tokens(self.stop_token_ids)


Params = SamplingParams | BeamSearchParams


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
class SampleOutput:
    """One continuation of a prompt: a sample, or a hypothesis of beam search with its ``score``.

    ``text`` leaves out a stop string and what follows it.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    score: float | None = None

    def extend(self, later: SampleOutput) -> None:
        """Append a streamed piece to what came before it."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.score = later.score


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced: since the last one when streaming, in all at the end.

    A streamed piece has the samples that got something. Beam search gives its hypotheses, the best
    first, in one piece at its end. ``num_cached_tokens`` counts the prompt tokens whose K/V came
    from the cache when the request was first admitted. ``text``, ``token_ids``, ``finish_reason``,
    ``stop_reason`` and ``logprobs`` are those of the first of ``samples``.
    """

    request_id: str
    samples: list[SampleOutput] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None
    reservation: Reservation | None = None
    finished: bool = False

    @property
    def text(self) -> str:
        return self.samples[0].text if self.samples else ""

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids if self.samples else []

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.samples[0].finish_reason if self.samples else None

    @property
    def stop_reason(self) -> str | int | None:
        return self.samples[0].stop_reason if self.samples else None

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.samples[0].logprobs if self.samples else None

    def extend(self, later: RequestOutput) -> None:
        """Add a streamed piece to what came before it."""
        known = {sample.index: sample for sample in self.samples}
        for sample in later.samples:
            if sample.index in known:
                known[sample.index].extend(sample)
            else:
                self.samples.append(replace(sample, token_ids=list(sample.token_ids)))
        self.samples.sort(key=lambda sample: sample.index)
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.num_prompt_tokens = later.num_prompt_tokens
        self.num_cached_tokens = later.num_cached_tokens
        self.metrics = later.metrics
        self.error = later.error
        self.reservation = later.reservation
        self.finished = later.finished
