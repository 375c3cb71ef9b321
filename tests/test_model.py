"""The forward pass against `transformers` in float32, on small random models."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixkv.model.attention import PagedAttention, StepLayout
from prefixkv.model.config import RopeConfig
from prefixkv.model.llama import Llama
from prefixkv.model.loader import LoadedModel, load_model
from prefixkv.model.ops import TorchOps
from prefixkv.model.rope import rope_frequencies
from prefixkv.model.weights import HuggingFaceWeights, WeightReader
from tiny_model import random_tokens, write_tiny_gguf, write_tiny_model

BLOCK_SIZE = 16


class Sequence:
    """One sequence and its K/V, with a block table of its own."""

    def __init__(self, loaded: LoadedModel, max_tokens: int) -> None:
        config = loaded.config
        self.model = loaded.model
        self.num_computed = 0
        self.num_blocks = -(-max_tokens // BLOCK_SIZE)
        self.attention = PagedAttention(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
            backend="torch",
        )

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Appends tokens; the logits after each of them."""
        rows = torch.arange(len(tokens))
        self.attention.begin(
            StepLayout(
                query_start=np.array([0, len(tokens)], dtype=np.int32),
                num_computed=np.array([self.num_computed], dtype=np.int32),
                table_start=np.array([0, self.num_blocks], dtype=np.int32),
                block_ids=np.arange(self.num_blocks, dtype=np.int32),
            )
        )
        positions = rows + self.num_computed
        self.num_computed += len(tokens)
        return self.model.forward(torch.tensor(tokens), positions, self.attention, rows)


def logits_of(loaded: LoadedModel, tokens: list[int], chunk: int | None = None) -> torch.Tensor:
    """Teacher-forced logits of every token, computed ``chunk`` tokens at a time."""
    sequence, size = Sequence(loaded, len(tokens)), chunk or len(tokens)
    chunks = (tokens[start : start + size] for start in range(0, len(tokens), size))
    return torch.cat([sequence.logits(part) for part in chunks])


def greedy(loaded: LoadedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """The greedy continuation, its end token included."""
    sequence = Sequence(loaded, len(prompt) + max_tokens)
    answer = [int(sequence.logits(prompt)[-1].argmax())]
    while len(answer) < max_tokens and answer[-1] not in loaded.tokenizer.eos_token_ids:
        answer.append(int(sequence.logits(answer[-1:])[-1].argmax()))
    return answer


def reference_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    """The same by `transformers`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0]


def assert_same_logits(directory: Path, count: int = 96, atol: float = 1e-4) -> None:
    loaded = load_model(directory, dtype="float32")
    tokens = random_tokens(count, loaded.tokenizer.vocab_size)
    expected = reference_logits(directory, tokens)
    torch.testing.assert_close(logits_of(loaded, tokens), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_equal_those_of_transformers(tmp_path: Path, architecture: str, tie: bool) -> None:
    assert_same_logits(write_tiny_model(tmp_path, architecture=architecture, tie=tie))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_optional_biases_are_used(tmp_path: Path, architecture: str) -> None:
    bias = {"bias": True} if architecture == "llama" else {"bias": True, "mlp_bias": False}
    assert_same_logits(write_tiny_model(tmp_path, architecture=architecture, **bias))


def test_head_size_may_differ_from_hidden_size_over_heads(tmp_path: Path) -> None:
    assert_same_logits(write_tiny_model(tmp_path, head_dim=32))


def test_bfloat16_weights_are_read_exactly(tmp_path: Path) -> None:
    assert_same_logits(write_tiny_model(tmp_path, dtype=torch.bfloat16))


def test_float16_weights_are_read_exactly(tmp_path: Path) -> None:
    assert_same_logits(write_tiny_model(tmp_path, dtype=torch.float16))


def test_sharded_directory_is_read_whole(tmp_path: Path) -> None:
    assert_same_logits(write_tiny_model(tmp_path, shards=3))


ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with its own scale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.9,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", ROPE_SCALINGS)
def test_rope_scaling_equals_that_of_transformers(tmp_path: Path, name: str) -> None:
    scaling = ROPE_SCALINGS[name]
    directory = write_tiny_model(tmp_path, rope_scaling=scaling, max_position_embeddings=256)
    assert_same_logits(directory, count=200)


@pytest.mark.parametrize("name", ROPE_SCALINGS)
def test_rope_scaling_changes_the_logits(tmp_path: Path, name: str) -> None:
    plain = load_model(write_tiny_model(tmp_path / "plain"), dtype="float32")
    scaled = load_model(
        write_tiny_model(tmp_path / "scaled", rope_scaling=ROPE_SCALINGS[name]), dtype="float32"
    )
    tokens = random_tokens(200, plain.tokenizer.vocab_size)
    difference = logits_of(plain, tokens) - logits_of(scaled, tokens)
    assert difference.abs().max() > 0.1


def test_rope_parameters_in_the_newer_spelling_are_read(tmp_path: Path) -> None:
    rope = {**ROPE_SCALINGS["llama3"], "rope_theta": 500000.0}
    directory = write_tiny_model(tmp_path, rope_parameters=rope, rope_theta=None)
    assert load_model(directory).config.rope.theta == 500000.0
    assert_same_logits(directory, count=200)


def test_yarn_stretches_the_context_length(tmp_path: Path) -> None:
    directory = write_tiny_model(
        tmp_path,
        max_position_embeddings=256,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    )
    assert load_model(directory).config.max_position_embeddings == 1024


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_logits_do_not_depend_on_the_chunks(tmp_path: Path, chunk: int) -> None:
    loaded = load_model(write_tiny_model(tmp_path), dtype="float32")
    tokens = random_tokens(80, loaded.tokenizer.vocab_size)
    torch.testing.assert_close(
        logits_of(loaded, tokens, chunk), logits_of(loaded, tokens), atol=1e-4, rtol=0
    )


def test_only_the_wanted_rows_reach_the_head(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_model(tmp_path), dtype="float32")

    def no_attention(_layer: int, q: torch.Tensor, _k: Any, _v: Any) -> torch.Tensor:
        return torch.zeros(len(q), q.shape[1] * q.shape[2])

    ids, positions = torch.arange(3, 13), torch.arange(10)
    every = loaded.model.forward(ids, positions, no_attention, torch.arange(10))
    some = loaded.model.forward(ids, positions, no_attention, torch.tensor([9, 2]))
    assert torch.equal(some, every[[9, 2]])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_first_of_200_tokens_changes_the_last_logits(tmp_path: Path, architecture: str) -> None:
    loaded = load_model(write_tiny_model(tmp_path, architecture=architecture), dtype="float32")
    tokens = random_tokens(200, loaded.tokenizer.vocab_size)
    other = [tokens[0] + 1 if tokens[0] < 100 else tokens[0] - 1, *tokens[1:]]
    difference = logits_of(loaded, tokens)[-1] - logits_of(loaded, other)[-1]
    assert difference.abs().max() > 0.5


def test_greedy_continuations_are_not_constant(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_model(tmp_path), dtype="float32")
    vocab_size = loaded.tokenizer.vocab_size
    answers = [tuple(greedy(loaded, random_tokens(30, vocab_size, i), 12)) for i in range(4)]
    assert len(set(answers)) == 4
    assert all(len(set(answer)) > 2 for answer in answers)


def test_torch_ops_give_the_same_logits(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_model(tmp_path), dtype="float32")
    reader = WeightReader(HuggingFaceWeights(tmp_path))
    plain = Llama(loaded.config, TorchOps("cpu", torch.float32), reader)
    tokens = random_tokens(50, loaded.tokenizer.vocab_size)
    native = logits_of(loaded, tokens)
    other = LoadedModel("plain", loaded.config, plain, loaded.tokenizer, torch.float32, "cpu")
    torch.testing.assert_close(native, logits_of(other, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_logits_of_its_directory(tmp_path: Path, architecture: str) -> None:
    directory = write_tiny_model(tmp_path / "hf", architecture=architecture, tie=False)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", directory)
    one, other = load_model(directory, dtype="float32"), load_model(path, dtype="float32")
    tokens = random_tokens(60, one.tokenizer.vocab_size)
    torch.testing.assert_close(logits_of(one, tokens), logits_of(other, tokens), atol=1e-4, rtol=0)


def test_rope_divisors_of_a_gguf_file_are_the_llama3_scaling(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "hf", rope_scaling=ROPE_SCALINGS["llama3"])
    one = load_model(directory, dtype="float32")
    scaled, _ = rope_frequencies(one.config.rope, one.config.head_dim)
    plain, _ = rope_frequencies(RopeConfig(one.config.rope.theta), one.config.head_dim)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", directory, rope_divisors=plain / scaled)
    other = load_model(path, dtype="float32")
    tokens = random_tokens(200, one.tokenizer.vocab_size)
    torch.testing.assert_close(logits_of(one, tokens), logits_of(other, tokens), atol=1e-4, rtol=0)


def test_loading_imports_no_transformers(tmp_path: Path) -> None:
    """It takes seconds to import."""
    program = (
        "import sys\n"
        "from prefixkv.model.loader import load_model\n"
        "loaded = load_model(sys.argv[1])\n"
        "loaded.tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}])\n"
        "sys.exit('transformers' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(write_tiny_model(tmp_path))]
    assert subprocess.run(command, check=False).returncode == 0
