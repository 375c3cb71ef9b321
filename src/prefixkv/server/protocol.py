"""The bodies of ``/v1/chat/completions`` and ``/v1/completions`` that are honoured.

Types are checked here, ranges of sampling parameters by ``SamplingParams``.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from prefixkv.errors import RequestError
from prefixkv.request import (
    MAX_BEAM_WIDTH,
    MAX_STOP_STRINGS,
    BeamSearchParams,
    Params,
    SamplingParams,
)
from prefixkv.server.errors import shown, validation_error
from prefixkv.server.fields import honoured

MAX_FIELDS = 128
MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_STOP_TOKEN_IDS = 4096
MAX_NAME_CHARS = 1024
MAX_SALT_CHARS = 1024
DEFAULT_COMPLETION_TOKENS = 16

INT32_MAX = 2**31 - 1


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# FailFast: only the first fault is told, and each that is kept costs as much as a good value.
Count = Annotated[int, Field(le=INT32_MAX)]
Stop = Annotated[
    list[str], FailFast(), Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_listed)
]
StopTokenIds = Annotated[list[Count], FailFast(), Field(max_length=MAX_STOP_TOKEN_IDS)]
Messages = Annotated[list[dict[str, Any]], FailFast(), Field(max_length=MAX_MESSAGES)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_long", "too many fields", {"max_length": MAX_FIELDS})
        return value


class StreamOptions(_Body):
    """``include_usage`` adds a last piece with the usage; obfuscation is never added."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Request(_Body):
    model: str | None = Field(None, max_length=MAX_NAME_CHARS)
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)


class CompletionBase(_Request):
    """What both dialects share."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Count = 0
    min_p: float = 0.0
    max_tokens: Count | None = None
    min_tokens: Count = 0
    stop: Stop = []
    stop_token_ids: StopTokenIds = []
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool = True

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The parameters of the choices of a prompt.

        Raises:
            RequestError: a value is out of its limits.
        """
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,  # others write -1 for "all"
            min_p=self.min_p,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )


class ChatRequest(CompletionBase):
    """The body of ``/v1/chat/completions``; the messages are read by ``messages.py``."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def params(self) -> SamplingParams:
        """The parameters of all choices; without a limit a reply may fill the context."""
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise RequestError(
                f"max_tokens is {older} and max_completion_tokens is {newer}; give one of them",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs} without logprobs; set logprobs to true",
                param="top_logprobs",
            )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(max_tokens=older if newer is None else newer, logprobs=logprobs)


class CompletionRequest(CompletionBase):
    """The body of ``/v1/completions``; the prompt is read by ``prompts.py``."""

    prompt: Any
    logprobs: int | None = None
    use_beam_search: bool = False
    best_of: int | None = Field(None, ge=1, le=MAX_BEAM_WIDTH)
    length_penalty: float = 1.0
    early_stopping: Any = False  # true, false or "never"

    def params(self) -> Params:
        """The parameters of all choices; without a limit a completion has 16 tokens.

        Raises:
            RequestError: a value is out of its limits, or a field has no meaning beside another.
        """
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if self.use_beam_search:
            return self._beam_search_params(limit)
        for name in _OF_BEAM_SEARCH & self.model_fields_set:
            raise RequestError(
                f"{name} is {shown(getattr(self, name))} without beam search; leave it out, or set "
                "use_beam_search to true",
                param=name,
            )
        return self.sampling_params(max_tokens=limit, logprobs=self.logprobs)

    def _beam_search_params(self, max_tokens: int) -> BeamSearchParams:
        for name, neutral in _OF_SAMPLING.items():
            value = getattr(self, name)
            if value not in neutral:
                raise RequestError(
                    f"{name} is {shown(value)}, which has no meaning in beam search; leave it out",
                    param=name,
                )
        return BeamSearchParams(
            width=self.n if self.best_of is None else self.best_of,
            n=self.n,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )


_OF_BEAM_SEARCH = {"length_penalty", "early_stopping"}
# Fields of sampling, with what they may be in beam search, which is greedy over the beams.
_OF_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "stop": ([],),
}


class ReservationRequest(_Request):
    """The body of ``/v1/reservations``: a prompt or messages."""

    prompt: Any = None
    messages: Messages = []


_EITHER = {"prompt", "messages"}

Body = TypeVar("Body", bound=_Request)


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Read a request.

    Raises:
        RequestError: it is no JSON object, or one of its fields is wrong, unknown or unsupported.
    """
    try:
        fields = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise RequestError(f"the body is {shown(fields)}; it must be a JSON object")
    if len(fields) > MAX_FIELDS:
        raise RequestError(f"the body has {len(fields)} fields; at most {MAX_FIELDS} are allowed")
    try:
        body = kind.model_validate(honoured(fields))
    except ValidationError as error:
        raise validation_error(error) from None
    if isinstance(body, CompletionBase) and body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if isinstance(body, ReservationRequest) and len(body.model_fields_set & _EITHER) != 1:
        raise RequestError("send a prompt or messages: one of the two", param="prompt")
    return body
