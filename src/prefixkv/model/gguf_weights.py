"""A GGUF file seen as a Hugging Face model: the same config keys, tensor names and row order."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from prefixkv.errors import ModelError
from prefixkv.model.gguf_file import GGUFFile

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"
# Metadata that change what a layer computes; each must be absent or hold this value.
_NEUTRAL = {
    "expert_count": 0,
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.causal": True,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "logit_scale": 0,
    "residual_scale": 0,
    "embedding_scale": 0,
    "use_parallel_residual": False,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
}


class GGUFWeights:
    """Tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._architecture = file.metadata.get("general.architecture")
        self._names = {
            _huggingface_name(name): name for name in file.shapes if name != _ROPE_DIVISORS
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by its Hugging Face name."""
        shapes = self._file.shapes
        return {name: shapes[own] for name, own in self._names.items()}

    def where(self, name: str | None = None) -> str:
        """The file, and the tensor's own name in it, for errors."""
        own = "" if name is None else f": tensor {self._names.get(name, name)!r}"
        return f"{self._file.path}{own}"

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised, rows in Hugging Face order."""
        tensor = self._file.read(self._names[name])
        projection = name.split(".")[-2]
        if self._architecture == "llama" and projection in ("q_proj", "k_proj"):
            key = "head_count" if projection == "q_proj" else "head_count_kv"
            default = self._file.metadata["llama.attention.head_count"]
            heads = self._file.metadata.get(f"llama.attention.{key}", default)
            return _unpermute(tensor, heads)
        return tensor


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The metadata as the dictionary of a ``config.json``, for `config.parse_config`.

    Raises `ModelError` for an architecture or a feature outside the Llama family, and for a file
    that is one part of several.
    """
    metadata, where = file.metadata, str(file.path)
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{where}: architecture {architecture!r} is not supported; "
            f"supported in GGUF files are {', '.join(_ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{where}: one of {metadata['split.count']} parts; join them with llama-gguf-split"
        )
    own = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    _refuse_unsupported(own, where)
    shapes = file.shapes
    config: dict[str, Any] = {
        "model_type": architecture,
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "hidden_size": own.get("embedding_length"),
        "intermediate_size": own.get("feed_forward_length"),
        "num_hidden_layers": own.get("block_count"),
        "num_attention_heads": own.get("attention.head_count"),
        "num_key_value_heads": own.get("attention.head_count_kv"),
        "head_dim": own.get("attention.key_length"),
        "max_position_embeddings": own.get("context_length"),
        "rms_norm_eps": own.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": own.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, own, where),
        "tie_word_embeddings": "output.weight" not in shapes,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def _refuse_unsupported(own: Mapping[str, Any], where: str) -> None:
    for key, neutral in _NEUTRAL.items():
        value = own.get(key, neutral)
        if value != neutral:
            raise ModelError(f"{where}: {key} = {value} is not supported; only {neutral} is")
    window, context = own.get("attention.sliding_window"), _whole(own, "context_length")
    if window and not _whole(own, "attention.sliding_window") >= context:
        raise ModelError(
            f"{where}: attention.sliding_window = {window} is below context_length = {context}; "
            "models that attend to a window are not supported"
        )
    heads = max(1, _whole(own, "attention.head_count"))
    head_dim = own.get("attention.key_length", _whole(own, "embedding_length") // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise ModelError(
                f"{where}: {key} = {own[key]} differs from the head size {head_dim}; not supported"
            )


def _whole(own: Mapping[str, Any], key: str) -> int:
    """The value if it is a whole number, else 0; `parse_config` complains about the others."""
    value = own.get(key)
    return value if isinstance(value, int) else 0


def _rope_scaling(file: GGUFFile, own: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "linear")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 0.0))
    scaled = kind != "none" and factor not in (0, 1)
    if _ROPE_DIVISORS in file.shapes:
        if scaled:
            raise ModelError(f"{where}: {_ROPE_DIVISORS} with rope scaling {kind!r} is unsupported")
        return {"rope_type": "divisors", "divisors": file.read(_ROPE_DIVISORS).flatten().tolist()}
    if not scaled:
        return None
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
        "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": own.get("rope.scaling.yarn_beta_slow"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _huggingface_name(name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``; unknown names stay."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Undoes llama.cpp's row order of q and k, which puts rows i and i + d/2 side by side."""
    half = tensor.shape[0] // heads // 2
    pairs = tensor.view(heads, half, 2, *tensor.shape[1:])
    return torch.swapaxes(pairs, 1, 2).reshape(tensor.shape)
