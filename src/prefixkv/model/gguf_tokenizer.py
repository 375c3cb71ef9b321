"""Builds a tokenizer from the vocabulary and merges that a GGUF file carries.

The library's own conversions lose how a text is split before merging, which changes the tokens of
digits, for one; so the two kinds of vocabulary that the Llama family uses are put together here.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from prefixkv.errors import ModelError

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_SPACE = "\u2581"
_SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
# Splits before merging, as in the models' own tokenizer.json.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_GPT2 = ("default", "gpt-2", "gpt2")
_SMOLLM = ("smollm",)


def gguf_tokenizer(
    metadata: Mapping[str, Any], where: str
) -> tuple[Tokenizer, dict[str, Any], list[int]]:
    """The tokenizer, its ``tokenizer_config.json`` and the ids that end an answer.

    Raises `ModelError` for a kind of vocabulary or of splitting that is not known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{where}: has no tokenizer (tokenizer.ggml.tokens)")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{where}: tokenizer kind {kind!r} is not supported; supported are 'gpt2' and 'llama'"
        )
    build = _byte_level if kind == "gpt2" else _sentencepiece
    settings = _settings(metadata, tokens)
    try:
        tokenizer = build(metadata, tokens, where)
        _add_special_tokens(tokenizer, metadata, tokens)
        _add_ends(tokenizer, metadata, settings)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{where}: the tokenizer's metadata are corrupt: {error}") from error
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return tokenizer, settings, [i for i in eos if isinstance(i, int)]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError(f"{where}: has no tokenizer.ggml.merges")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_pair(merge, where) for merge in merges],
            ignore_merges=pre in _LLAMA3,
        )
    )
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_splits(pre, where))
    return tokenizer


def _pair(merge: str, where: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelError(f"{where}: corrupt entry in tokenizer.ggml.merges: {merge!r}")
    return left, right


def _splits(pre: str, where: str) -> list[pre_tokenizers.PreTokenizer]:
    if pre in _SMOLLM:
        return [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    if pre in _GPT2:
        return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if pre in _LLAMA3 or pre in _QWEN2:
        split = _LLAMA3_SPLIT if pre in _LLAMA3 else _QWEN2_SPLIT
        return [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    known = ", ".join((*_SMOLLM, *_LLAMA3, *_QWEN2, *_GPT2))
    raise ModelError(
        f"{where}: tokenizer.ggml.pre = {pre!r} is not supported; supported are {known}"
    )


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{where}: tokenizer.ggml.scores does not match the {len(tokens)} tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, scores, types),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", _SPACE)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Merges that give sentencepiece's order: the result with the best score first."""
    found: list[tuple[float, str, str]] = []
    for token, index in vocab.items():
        if types[index] in (_CONTROL, _USER_DEFINED, _BYTE):
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found.extend((scores[index], *pair) for pair in known)
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _add_special_tokens(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]
) -> None:
    types = metadata.get("tokenizer.ggml.token_type") or []
    for kind in (_CONTROL, _USER_DEFINED):
        special = kind == _CONTROL
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, type_ in zip(tokens, types, strict=False)
            if type_ == kind
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _settings(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in _SPECIAL_TOKENS.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int) and index < len(tokens):
            settings[name] = tokens[index]
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return settings


def _add_ends(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """The tokens that a plain text gets around it."""
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    unsaid = kind == "llama" or pre in _LLAMA3
    parts = ["$A"]
    if metadata.get("tokenizer.ggml.add_bos_token", unsaid) and "bos_token" in settings:
        parts.insert(0, settings["bos_token"])
    if metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in settings:
        parts.append(settings["eos_token"])
    special = [(token, tokenizer.token_to_id(token)) for token in parts if token != "$A"]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(parts), special_tokens=special
        )
