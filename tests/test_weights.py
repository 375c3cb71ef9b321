"""Reading weights: GGUF tensor types, and errors that name the culprit."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as TensorType
from safetensors.torch import load_file, save_file

from prefixkv.errors import ConfigError, ModelError
from prefixkv.model.gguf_file import SUPPORTED_TYPES, GGUFFile
from prefixkv.model.gguf_weights import GGUFWeights, gguf_config
from prefixkv.model.loader import load_model
from prefixkv.model.safetensors_file import SafetensorsFile, write_safetensors
from prefixkv.model.weights import HuggingFaceWeights
from tiny_model import tiny_tokenizer, write_json, write_tiny_gguf, write_tiny_model


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})


def refusal(path: Path | str) -> str:
    with pytest.raises(ModelError) as error:
        load_model(path)
    return str(error.value)


# --- GGUF tensor types ---


def gguf_with(path: Path, data: np.ndarray, type_: TensorType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


QUANTIZABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# Largest error of one value, as a share of the largest value, that rounding to the type allows.
ROUNDING = {"F32": 0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.01, "Q5_0": 0.07, "Q5_1": 0.07}


def test_every_supported_type_has_a_test() -> None:
    assert {t.name for t in SUPPORTED_TYPES} == {*QUANTIZABLE, *K_QUANTS}


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantized_values_come_back(tmp_path: Path, name: str) -> None:
    type_ = TensorType[name]
    values = np.random.default_rng(0).standard_normal((37, 96)).astype(np.float32)
    read = GGUFFile(gguf_with(tmp_path / "x.gguf", gguf.quantize(values, type_), type_)).read("x")
    assert read.shape == (37, 96)
    bound = ROUNDING.get(name, 0.14) * np.abs(values).max()
    assert np.abs(read.float().numpy() - values).max() <= bound


@pytest.mark.parametrize("name", K_QUANTS)
def test_k_quants_equal_the_dequantiser_block_by_block(tmp_path: Path, name: str) -> None:
    type_ = TensorType[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    raw = random_blocks(np.random.default_rng(0), rows=700, blocks=2, type_=type_)
    path = gguf_with(tmp_path / "x.gguf", raw, type_)
    read = GGUFFile(path).read("x").numpy()
    blocks = raw.reshape(-1, 1, block_bytes)
    expected = np.concatenate([gguf.dequantize(b, type_) for b in blocks]).reshape(700, 2 * block)
    assert np.array_equal(read, expected)


def random_blocks(
    numbers: np.random.Generator, *, rows: int, blocks: int, type_: TensorType
) -> np.ndarray:
    """Random bytes of a K-quant type whose float16 scales are finite."""
    block_bytes = gguf.GGML_QUANT_SIZES[type_][1]
    raw = numbers.integers(0, 256, (rows, blocks, block_bytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for start in (0, 2, block_bytes - 4, block_bytes - 2):  # wherever the type keeps its scales
        raw[:, :, start : start + 2] = scale
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_rows_of_q_and_k_come_back_in_their_order(tmp_path: Path, name: str) -> None:
    directory = write_tiny_model(tmp_path / "hf", tie=False)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", directory, TensorType[name])
    quantized, exact = GGUFWeights(GGUFFile(path)), HuggingFaceWeights(directory)
    assert quantized.shapes == exact.shapes
    for tensor in exact.shapes:
        found, wanted = quantized.read(tensor).float(), exact.read(tensor)
        assert (found - wanted).abs().max() < 0.15 * wanted.abs().max(), tensor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantized_model_runs(tmp_path: Path, dtype: str) -> None:
    directory = write_tiny_model(tmp_path / "hf")
    path = write_tiny_gguf(tmp_path / "tiny.gguf", directory, TensorType.Q4_0)
    loaded = load_model(path, dtype=dtype)
    logits = loaded.model.forward(
        torch.tensor([5]), torch.tensor([0]), lambda _l, q, _k, _v: q.flatten(1), torch.tensor([0])
    )
    assert logits.shape == (1, loaded.config.vocab_size)
    assert logits.isfinite().all()


def test_gguf_config_says_what_the_directory_says(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "hf", architecture="qwen2")
    config = gguf_config(GGUFFile(write_tiny_gguf(tmp_path / "tiny.gguf", directory)))
    own = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    assert config["rms_norm_eps"] == pytest.approx(own["rms_norm_eps"])
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings"):
        assert config[key] == own[key], key


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "linear"),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 1024,
            },
            "yarn",
        ),
    ],
)
def test_gguf_rope_scaling_is_read(tmp_path: Path, metadata: dict[str, float], kind: str) -> None:
    directory = write_tiny_model(tmp_path / "hf")
    path = write_tiny_gguf(tmp_path / "tiny.gguf", directory, metadata=metadata)
    rope = load_model(path).config.rope
    assert (rope.kind, rope.factor) == (kind, 4.0)


# --- Errors ---


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors: not found" in refusal(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors: not found" in refusal(tmp_path)


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert "tokenizer.json: not found" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_corrupt_json_is_named(tmp_path: Path, file: str) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / file).write_text("{ not json", encoding="utf-8")
    assert file in refusal(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.5, 0.999])
def test_truncated_safetensors_are_named(tmp_path: Path, share: float) -> None:
    path = write_tiny_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    message = refusal(tmp_path)
    assert "model.safetensors" in message
    assert "truncated" in message


def test_garbage_in_place_of_safetensors_is_named(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path) / "model.safetensors"
    path.write_bytes((100).to_bytes(8, "little") + b"\xff" * 1000)
    assert "model.safetensors: the safetensors header is corrupt" in refusal(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.999])
def test_truncated_gguf_is_named(tmp_path: Path, share: float) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_model(tmp_path / "hf"))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert "tiny.gguf" in refusal(path)


def test_a_gguf_file_of_an_unknown_version_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_model(tmp_path / "hf"))
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 99)
    path.write_bytes(data)
    assert "version 99" in refusal(path)


def test_an_unsupported_gguf_tensor_type_is_named(tmp_path: Path) -> None:
    blocks = np.zeros((4, 136), np.uint8)
    path = gguf_with(tmp_path / "x.gguf", blocks, TensorType.IQ4_XS)
    message = refusal(path)
    assert "'x'" in message
    assert "IQ4_XS" in message


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(tmp_path, lambda t: t.update({name: torch.zeros(127, 64)}))
    message = refusal(tmp_path)
    assert name in message
    assert "[127, 64]" in message
    assert "[128, 64]" in message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensors(tmp_path, lambda t: t.pop(name))
    assert f"{name!r} is missing" in refusal(tmp_path)


def test_a_missing_gguf_tensor_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "hf", num_layers=1)
    edit_tensors(directory, lambda t: t.pop("model.norm.weight"))
    path = write_tiny_gguf(tmp_path / "tiny.gguf", directory)
    assert "model.norm.weight" in refusal(path)


def test_a_tensor_that_is_not_of_the_model_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    name = "model.layers.0.self_attn.sinks"
    edit_tensors(tmp_path, lambda t: t.update({name: torch.zeros(4)}))
    assert name in refusal(tmp_path)


def test_rotary_tables_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(tmp_path, lambda t: t.update({name: torch.zeros(8)}))
    assert load_model(tmp_path).config.num_layers == 2


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(64).int()}))
    message = refusal(tmp_path)
    assert "model.norm.weight" in message
    assert "I32" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"sliding_window": 128, "model_type": "mistral"}, "sliding_window = 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "divisors"}}, "divisors"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    write_tiny_model(tmp_path)
    edit_config(tmp_path, **changes)
    message = refusal(tmp_path)
    assert "config.json" in message
    assert named in message


def test_a_sliding_window_that_is_switched_off_is_no_obstacle(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, architecture="qwen2", sliding_window=128, use_sliding_window=False)
    assert load_model(tmp_path).config.architecture == "qwen2"


@pytest.mark.parametrize(
    "metadata",
    [
        {"expert_count": 8},
        {"attention.sliding_window": 128},
        {"rope.dimension_count": 8},
        {"logit_scale": 2.0},
        {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
    ],
)
def test_gguf_features_outside_the_family_are_named(
    tmp_path: Path, metadata: dict[str, int | float | bool | str]
) -> None:
    directory = write_tiny_model(tmp_path / "hf")
    path = write_tiny_gguf(tmp_path / "tiny.gguf", directory, metadata=metadata)
    message = refusal(path)
    assert "tiny.gguf" in message
    assert next(iter(metadata)).split(".")[-1] in message or "longrope" in message


def test_an_unknown_gguf_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "mamba" in refusal(tmp_path / "x.gguf")


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="float16"):
        load_model(tmp_path, dtype="float16")


# --- Writing ---


def test_written_safetensors_are_read_by_the_library(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.zeros(0, 4)}
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {n: tuple(t.shape) for n, t in tensors.items()}, tensors.__getitem__)
    read, own = load_file(path), SafetensorsFile(path)
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)
        assert torch.equal(own.read(name), tensor)


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    write_tiny_model(tmp_path)
    load_model(tmp_path, progress=lambda *step: seen.append(step))
    total = len(load_file(tmp_path / "model.safetensors"))
    assert seen == [("load", i + 1, total) for i in range(total)]


def test_the_tokenizer_of_a_gguf_file_is_that_of_its_directory(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_model(tmp_path / "hf"))
    text = "the rain in Spain, 12345 <|im_end|> naïve 日本"
    assert load_model(path).tokenizer.encode(text) == tiny_tokenizer().encode(text).ids
