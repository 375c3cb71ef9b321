"""Text to tokens and back, with the model's own chat template."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from prefixkv.errors import ModelError, RequestError
from prefixkv.model.chat_template import ChatTemplate
from prefixkv.model.weights import read_json

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# What chat templates close a turn with; some models list only their end of text as end token.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>")
_INCOMPLETE = "\ufffd"


class Tokenizer:
    """A model's tokenizer; thread-safe, immutable."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        chat_template: ChatTemplate | None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._template = chat_template
        self.eos_token_ids = eos_token_ids | self._turn_ends()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's own may be larger, for alignment."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; ``add_special_tokens`` adds what the model wants around it."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id as it stands, byte alphabet included; None if unknown."""
        return self._backend.id_to_token(token_id)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation; ``kwargs`` are further variables of the template.

        Raises `RequestError` if the model has no chat template or the template refuses the
        messages.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def chat_prefix(
        self,
        messages: Sequence[Mapping[str, Any]],
        encode: Callable[[str], list[int]] | None = None,
    ) -> list[int]:
        """Token ids that conversations begin with that begin with these messages.

        After a user's message that is the prompt for its answer; else what two conversations have
        in common that go on with different messages of the user. A message that begins with white
        space may cut the last of these tokens otherwise. ``encode`` replaces the tokenizer's own
        for the rendered text, say to refuse one that is too long.

        Raises `RequestError` as `apply_chat_template` does.
        """
        if encode is None:
            encode = functools.partial(self.encode, add_special_tokens=False)
        if messages and messages[-1].get("role") == "user":
            return encode(self.render_chat(messages))
        one, other = (
            encode(self.render_chat([*messages, {"role": "user", "content": text}]))
            for text in ("a", "1")
        )
        same = (a == b for a, b in zip(one, other, strict=False))
        return one[: next((i for i, is_same in enumerate(same) if not is_same), len(one))]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text that `apply_chat_template` encodes."""
        if self._template is None:
            raise RequestError(
                "the model has no chat template; send plain prompts instead", param="messages"
            )
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, **kwargs
        )

    def detokenizer(self, *, skip_special_tokens: bool = True) -> "Detokenizer":
        """A new incremental decoder for one answer."""
        return Detokenizer(self, skip_special_tokens=skip_special_tokens)

    def _turn_ends(self) -> frozenset[int]:
        if self._template is None:
            return frozenset()
        named = (token for token in _TURN_ENDS if token in self._template.source)
        ids = (self._backend.token_to_id(token) for token in named)
        return frozenset(i for i in ids if i is not None)


class Detokenizer:
    """Decodes one answer token by token; the pieces add up to the text of the whole.

    Tokens are decoded in a window that starts at a point where the text was complete, because a
    character can span tokens and some decoders treat the first token apart.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._num_given = 0
        self._given = ""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith(_INCOMPLETE):
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What is left at the end of the answer; an incomplete character comes as U+FFFD."""
        return self._give(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        if new:
            # Keep the last piece as context for the next one, drop what came before it.
            del self._ids[: self._num_given]
            self._num_given = len(self._ids)
            self._given = self._decode()
        return new


def load_tokenizer(directory: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face directory; ``config`` is its ``config.json``.

    Reads ``tokenizer.json`` and, where they exist, ``tokenizer_config.json``,
    ``generation_config.json`` and ``chat_template.jinja``.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path}: not found; save the model's fast tokenizer there (save_pretrained writes it)"
        )
    settings = _optional_json(directory / "tokenizer_config.json")
    template = directory / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    generation = _optional_json(directory / "generation_config.json")
    eos = [*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
    return make_tokenizer(read_backend(path), settings, eos, str(directory))


def make_tokenizer(
    backend: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    eos_token_ids: Iterable[int],
    where: str,
) -> Tokenizer:
    """A tokenizer from its parts; ``settings`` is a ``tokenizer_config.json``.

    Its eos token joins ``eos_token_ids``; its chat template becomes the tokenizer's.
    """
    variables = _special_tokens(settings)
    eos: set[int | None] = set(eos_token_ids)
    if "eos_token" in variables:
        eos.add(backend.token_to_id(variables["eos_token"]))
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return Tokenizer(
        backend,
        eos_token_ids=frozenset(i for i in eos if i is not None),
        chat_template=ChatTemplate(source, variables, where) if source else None,
    )


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """A ``tokenizer.json``; `ModelError` if it is corrupt."""
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: not a valid tokenizer: {error}") from error


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a ``tokenizer_config.json``, written as text or as objects."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
