"""Tokenizers from directories and GGUF metadata, chat templates, incremental decoding."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from prefixkv.errors import ModelError, RequestError
from prefixkv.model.chat_template import ChatTemplate
from prefixkv.model.gguf_tokenizer import gguf_tokenizer
from prefixkv.model.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from tiny_model import tiny_tokenizer, write_json, write_tiny_model

TEXTS = (
    "",
    "The rain in Spain",
    "don't  stop:\n\n\tdef f(x):\n        return x + 1\n",
    "pi is 3.14159, 2026-11-30, 1234567890",
    "naïve café, 日本語のテキスト, мир, 🙂👩‍👩‍👧",
    "trailing spaces   ",
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(write_tiny_model(tmp_path), {})


# --- Text and tokens ---


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_left_out_unless_wanted(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>")
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>"


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    backend = tiny_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "no limit on the length"
    assert load_tokenizer(tmp_path, {}).encode(text) == tiny_tokenizer().encode(text).ids


def test_end_tokens_come_from_every_file_that_names_one(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 6]})
    # 0 and 2: the eos token of tokenizer_config.json, and what the chat template ends a turn with.
    assert load_tokenizer(tmp_path, {"eos_token_id": 7}).eos_token_ids == {0, 2, 5, 6, 7}


# --- Incremental decoding ---


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert "".join(pieces_of(tokenizer, tokenizer.encode(text))) == text


def test_pieces_hold_whole_characters(tokenizer: Tokenizer) -> None:
    pieces = pieces_of(tokenizer, tokenizer.encode("日本🙂"))
    assert [piece for piece in pieces if piece] == ["日", "本", "🙂"]


def test_an_incomplete_character_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")[:-1]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "\ufffd"]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_random_tokens_add_up_to_their_decoding(tokenizer: Tokenizer, seed: int) -> None:
    """Random bytes are mostly no UTF-8; special tokens are among them."""
    numbers = random.Random(seed)
    ids = [numbers.randrange(tokenizer.vocab_size) for _ in range(200)]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


# --- Chat templates ---


def template(source: str, **variables: str) -> ChatTemplate:
    return ChatTemplate(source, variables, "here")


MESSAGES = [{"role": "user", "content": "Hi & <bye>"}]


def test_a_conversation_becomes_a_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template(MESSAGES)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHi & <bye><|im_end|>\n<|im_start|>assistant\n"


def test_the_generation_prompt_can_be_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_end|>\n")


def test_a_jinja_file_goes_before_the_config(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert load_tokenizer(tmp_path, {}).render_chat(MESSAGES) == "Hi & <bye>"


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    templates = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": templates})
    assert load_tokenizer(tmp_path, {}).render_chat(MESSAGES) == "plain"


def test_without_a_template_a_chat_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path, {})
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def test_templates_see_special_tokens_and_further_variables() -> None:
    source = "{{ bos_token }}{{ mood }}{% if tools %}tools{% endif %}"
    assert template(source, bos_token="<s>").render(MESSAGES, mood="calm") == "<s>calm"


def test_tojson_does_not_escape() -> None:
    rendered = template("{{ messages[0] | tojson }}").render(MESSAGES)
    assert rendered == '{"role": "user", "content": "Hi & <bye>"}'


def test_blocks_leave_no_lines_behind() -> None:
    source = "{% if true %}\n  {% if true %}\n{{ bos_token }}\n  {% endif %}\n{% endif %}"
    assert template(source, bos_token="<s>").render(MESSAGES) == "<s>\n"


def test_loop_controls_and_generation_blocks_are_known() -> None:
    body = "{% generation %}{{ m.role }}{% endgeneration %}{% break %}"
    source = "{% for m in messages %}" + body + "{% endfor %}"
    assert template(source).render([*MESSAGES, *MESSAGES]) == "user"


def test_strftime_now_gives_the_date() -> None:
    assert len(template("{{ strftime_now('%Y-%m-%d') }}").render(MESSAGES)) == 10


def test_null_fields_are_as_absent() -> None:
    source = "{{ 'calls' if messages[0].tool_calls is defined else 'none' }}"
    assert template(source).render([{**MESSAGES[0], "tool_calls": None}]) == "none"


def test_what_a_template_raises_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render(MESSAGES)


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(RequestError, match="unsafe"):
        template("{{ messages.__class__.__mro__ }}").render(MESSAGES)


def test_a_template_that_does_not_compile_names_its_model() -> None:
    with pytest.raises(ModelError, match="here: the chat template"):
        template("{% for %}")


# --- Vocabularies of GGUF files ---


def byte_level_metadata(pre: str, **more: Any) -> dict[str, Any]:
    backend = tiny_tokenizer()
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    merges = [*("Ġ t", "h e", "Ġt he"), "1 2", "12 3", "Ġ 1"]
    tokens += ["12", "123", "Ġ1"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


def tokens_of(metadata: dict[str, Any], text: str) -> list[str]:
    backend, _, _ = gguf_tokenizer(metadata, "file")
    return backend.encode(text).tokens


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["Ġthe", "Ġ", "1", "2", "3", "4"]),
        ("qwen2", ["Ġthe", "Ġ", "1", "2", "3", "4"]),
        ("gpt-2", ["Ġthe", "Ġ", "123", "4"]),
        ("llama-bpe", ["<|endoftext|>", "Ġthe", "Ġ", "123", "4"]),
    ],
)
def test_digits_split_as_the_model_learnt_them(pre: str, expected: list[str]) -> None:
    assert tokens_of(byte_level_metadata(pre), " the 1234") == expected


def test_bos_can_be_switched_off() -> None:
    metadata = byte_level_metadata("llama-bpe", **{"tokenizer.ggml.add_bos_token": False})
    assert tokens_of(metadata, "1") == ["1"]


def test_control_tokens_stay_whole() -> None:
    assert tokens_of(byte_level_metadata("smollm"), "1<|im_end|>2") == ["1", "<|im_end|>", "2"]


def test_gguf_end_tokens_and_template_are_taken() -> None:
    metadata = byte_level_metadata(
        "smollm",
        **{"tokenizer.ggml.eot_token_id": 1, "tokenizer.chat_template": "{{ eos_token }}"},
    )
    tokenizer = make_tokenizer(*gguf_tokenizer(metadata, "file"), "file")
    assert tokenizer.eos_token_ids == {1, 2}
    assert tokenizer.render_chat(MESSAGES) == "<|im_end|>"


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "gpt-2", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_gguf_vocabularies(pre: str, text: str) -> None:
    tokenizer = make_tokenizer(*gguf_tokenizer(byte_level_metadata(pre), "file"), "file")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(ModelError, match="chameleon"):
        gguf_tokenizer(byte_level_metadata("chameleon"), "file")


def test_an_unknown_kind_of_vocabulary_is_named() -> None:
    metadata = byte_level_metadata("smollm", **{"tokenizer.ggml.model": "bert"})
    with pytest.raises(ModelError, match="bert"):
        gguf_tokenizer(metadata, "file")


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    pieces = ["▁", "t", "h", "e", "▁t", "he", "▁the", "a", "n", "an", "▁a", "▁an", "l"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * (3 + 256) + [-float(i) for i in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def test_sentencepiece_merges_the_best_score_first() -> None:
    tokens = tokens_of(sentencepiece_metadata(), "the anthe")
    assert tokens == ["<s>", "▁the", "▁an", "t", "he"]


def test_sentencepiece_falls_back_to_bytes() -> None:
    assert tokens_of(sentencepiece_metadata(), "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]


def test_sentencepiece_can_leave_out_the_space_in_front() -> None:
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    assert tokens_of(metadata, "the") == ["<s>", "t", "he"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_sentencepiece(text: str) -> None:
    tokenizer = make_tokenizer(*gguf_tokenizer(sentencepiece_metadata(), "file"), "file")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(pieces_of(tokenizer, ids)) == text


def test_sentencepiece_agrees_with_transformers() -> None:
    conversion = pytest.importorskip("transformers.integrations.gguf")
    metadata = sentencepiece_metadata()
    names = {"tokens": "tokens", "scores": "scores", "token_type": "token_type"}
    theirs: Backend = conversion.convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "llama",
            **{n: metadata[f"tokenizer.ggml.{key}"] for key, n in names.items()},
        },
    )[0]
    ours = gguf_tokenizer(metadata, "file")[0]
    for text in TEXTS[1:]:
        own = ours.encode(text, add_special_tokens=False).ids
        assert own == theirs.encode(text, add_special_tokens=False).ids
