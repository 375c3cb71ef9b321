"""Which requests an engine takes, and how long they may become."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefixkv.config import SchedulerConfig, blocks_for
from prefixkv.errors import ContextLengthError, RequestError, brief
from prefixkv.request import BeamSearchParams, Params

MAX_SALT_LENGTH = 1024


class Admission:
    """The limits of one engine.

    Args:
        blocks_left: how many blocks no reservation holds.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        blocks_left: Callable[[], int],
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._blocks_left = blocks_left

    def check(self, prompt: list[int], params: Params, cache_salt: str | None) -> None:
        """Raise RequestError or ContextLengthError if the request could not be served."""
        if not prompt:
            raise RequestError("the prompt is empty; it needs a token or more", param="prompt")
        most = self._config.max_model_len
        if len(prompt) >= most:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; with one to generate at most {most} fit "
                f"here, so shorten it by {len(prompt) - most + 1}"
            )
        self._check_ids("prompt", prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if params.min_tokens > 0 and len(self.end_token_ids(params)) >= self._vocab_size:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, and every token of the vocabulary would end "
                "the request; leave some out of stop_token_ids",
                param="min_tokens",
            )
        if isinstance(params, BeamSearchParams):
            self._check_beams(prompt, params)
        if cache_salt is not None:
            _check_salt(cache_salt)

    def end_token_ids(self, params: Params) -> frozenset[int]:
        """Tokens that end a sequence."""
        end = frozenset(params.stop_token_ids)
        return end if params.ignore_eos else end | self._eos_token_ids

    def max_tokens(self, prompt: list[int], params: Params) -> int:
        """The most tokens that each sequence of a request may get."""
        room = self._config.max_model_len - len(prompt)
        if isinstance(params, BeamSearchParams) and params.max_tokens is None:
            room = min(room, self._room_for_beams(prompt, params.width))
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _room_for_beams(self, prompt: list[int], width: int) -> int:
        """The most tokens that each beam can get when all have their blocks; maybe below 1."""
        block_size = self._config.block_size
        shared = len(prompt) // block_size
        return (shared + (self._blocks_left() - shared) // width) * block_size - len(prompt)

    def _check_beams(self, prompt: list[int], params: BeamSearchParams) -> None:
        """All beams go on together, so they must fit together."""
        for limit, of in (
            (self._config.max_num_seqs, "sequences run at once (max_num_seqs)"),
            (self._vocab_size - len(self.end_token_ids(params)), "tokens do not end a sequence"),
        ):
            if params.width > limit:
                raise RequestError(
                    f"the beam search has width {params.width}, and {limit} {of}; use a smaller "
                    "one",
                    param="width",
                )
        room, wanted = self._room_for_beams(prompt, params.width), self.max_tokens(prompt, params)
        if max(wanted, 1) > room:
            raise RequestError(
                f"the beam search has width {params.width}: after {len(prompt)} tokens of prompt "
                f"the pool has room for {max(room, 0)} in each beam, and {max(wanted, 1)} are "
                "asked for; lower width or max_tokens, or give the pool more blocks",
                param="width",
            )

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if not ids or (
            set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) < self._vocab_size
        ):
            return
        for at, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{name} holds {brief(token)} at position {at}; token ids of this model are "
                    f"whole numbers from 0 to {self._vocab_size - 1}",
                    param=name,
                )


def blocks_for_beams(width: int, num_prompt: int, max_tokens: int, block_size: int) -> int:
    """The most that a search can hold: full blocks of the prompt once, all others for each beam."""
    shared = num_prompt // block_size
    return shared + width * (blocks_for(num_prompt + max_tokens, block_size) - shared)


def _check_salt(cache_salt: str) -> None:
    if not isinstance(cache_salt, str):
        raise RequestError(
            f"cache_salt is {brief(cache_salt)}; it must be a string", param="cache_salt"
        )
    if not 1 <= len(cache_salt) <= MAX_SALT_LENGTH:
        raise RequestError(
            f"cache_salt has {len(cache_salt)} characters; 1 to {MAX_SALT_LENGTH} are allowed",
            param="cache_salt",
        )
    try:
        cache_salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"cache_salt is {brief(cache_salt)}, which is no valid text: {error.reason}",
            param="cache_salt",
        ) from None
