"""Small random models of every supported architecture, made on the spot.

Their weights are scaled so that every logit depends on the whole context (`test_model` proves it):
attention is spread over all positions and outweighs the token's own embedding.
"""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = ("Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "a n", "Ġ s", "e n", "in g")
_GAINS = {
    "embed_tokens": 0.5,
    "lm_head": 0.5,
    "q_proj": 1.5,
    "k_proj": 1.5,
    "v_proj": 2.0,
    "o_proj": 4.0,
    "gate_proj": 1.0,
    "up_proj": 1.0,
    "down_proj": 2.0,
}


def write_tiny_model(
    directory: Path,
    *,
    architecture: str = "llama",
    seed: int = 0,
    tie: bool = True,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 128,
    max_position_embeddings: int = 4096,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **config: Any,
) -> Path:
    """Writes config, weights, tokenizer and chat template; returns the directory.

    ``bias`` adds the biases that a Llama or Qwen3 may have; further ``config`` goes into
    ``config.json`` as it is.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    values = {
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "model_type": architecture,
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tie,
        "attention_bias": bias,
        "mlp_bias": bias,
        "sliding_window": None,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **config,
    }
    if architecture == "qwen2":
        del values["head_dim"]
    write_json(directory / "config.json", values)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _save(directory, _tensors(values, torch.Generator().manual_seed(seed), dtype), shards)
    return directory


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: every text encodes, and a few pairs of letters merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    tokens = [*_SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in _SPECIAL_TOKENS])
    return tokenizer


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor that a model of this ``config.json`` has."""
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = (config[k] * head_dim for k in ("num_attention_heads", "num_key_value_heads"))
    qkv_bias = config["attention_bias"] or config["model_type"] == "qwen2"
    linears = {
        "self_attn.q_proj": (q, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, q, config["attention_bias"]),
        "mlp.gate_proj": (inner, hidden, config["mlp_bias"]),
        "mlp.up_proj": (inner, hidden, config["mlp_bias"]),
        "mlp.down_proj": (hidden, inner, config["mlp_bias"]),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, width, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, width)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        if config["model_type"] == "qwen3":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _tensors(
    config: dict[str, Any], generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        kind = name.split(".")[-2]
        if name.endswith(".bias"):
            values *= 0.3
        elif kind in ("embed_tokens", "lm_head"):
            values *= _GAINS[kind]
        elif kind in _GAINS:
            values *= _GAINS[kind] / math.sqrt(shape[1])
        else:
            # Where q and k have norms, these set how sharp attention is.
            values = (1.5 if kind in ("q_norm", "k_norm") else 1.0) + 0.1 * values
        tensors[name] = values.to(dtype)
    return tensors


def _save(directory: Path, tensors: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        part = {name: tensors[name] for name, own in weight_map.items() if own == file}
        save_file(part, directory / file, {"format": "pt"})
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map}
    )


def write_tiny_gguf(
    path: Path,
    directory: Path,
    tensor_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    pre: str = "gpt-2",
    metadata: dict[str, int | float | bool | str] | None = None,
    rope_divisors: Tensor | None = None,
) -> Path:
    """Writes the model of a directory as a GGUF file, as llama.cpp's converter does.

    Matrices get ``tensor_type``, vectors stay float32. ``metadata`` is added under the
    architecture's prefix, ``rope_divisors`` is how the converter writes a llama3 rope scaling.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    # Mistral's files say llama; both have q and k rows in the order that llama.cpp rotates.
    llama = config["model_type"] in ("llama", "mistral")
    architecture = "llama" if llama else config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        add.get(type(value), writer.add_string)(f"{architecture}.{key}", value)
    _add_tokenizer(writer, pre)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.numpy())
    names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}.get(
            architecture, gguf.MODEL_ARCH.QWEN3
        ),
        config["num_hidden_layers"],
    )
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(directory / "model.safetensors").items():
        kind = name.split(".")[-2]
        if llama and kind in heads:
            tensor = _permute(tensor, heads[kind])
        type_ = tensor_type if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(tensor.float().numpy(), type_)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    tokenizer = tiny_tokenizer()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [types.CONTROL if t in _SPECIAL_TOKENS else types.NORMAL for t in tokens]
    )
    writer.add_token_merges(list(_MERGES))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _permute(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of the rows of q and k (its ``LlamaModel.permute``)."""
    half = tensor.shape[0] // heads // 2
    return (
        tensor.view(heads, 2, half, *tensor.shape[1:])
        .swapaxes(1, 2)
        .reshape(tensor.shape)
        .contiguous()
    )


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Token ids that are no special tokens."""
    numbers = np.random.default_rng(seed)
    return [int(i) for i in numbers.integers(len(_SPECIAL_TOKENS), vocab_size, count)]
