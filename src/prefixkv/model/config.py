"""What a model of the Llama family is made of, read from a Hugging Face ``config.json``.

GGUF metadata are translated to the same dictionary first (`gguf_weights`), so every check is here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefixkv.errors import ModelError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "divisors")

_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_MISTRAL_WINDOW = 4096
# Rotary tables are made for every position; more than any model has is a corrupt number.
_LONGEST_CONTEXT = 1 << 22


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base wavelength and how it is stretched to longer contexts.

    ``kind`` is one of `ROPE_TYPES`; the fields that it does not use keep their defaults.
    ``divisors`` (head_dim / 2 of them) divide the frequencies one by one: the form in which a GGUF
    file carries the llama3 scaling.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of the forward pass.

    ``max_position_embeddings`` is the context length in tokens, stretched by yarn if the model is.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def parse_config(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Reads a ``config.json`` dictionary; ``where`` names its file in errors.

    Raises `ModelError` for an architecture or a feature that would be computed wrongly, and for a
    value that is missing or out of its range.
    """
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{where}: architecture {architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(config, architecture, where)
    hidden_size = _positive_int(config, "hidden_size", where)
    num_heads = _positive_int(config, "num_attention_heads", where)
    num_kv_heads = _positive_int(config, "num_key_value_heads", where, default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    default_head_dim = 128 if architecture == "qwen3" else hidden_size // num_heads
    head_dim = _positive_int(config, "head_dim", where, default=default_head_dim)
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim = {head_dim} is odd; rotary embedding needs pairs")
    max_position_embeddings = _positive_int(
        config, "max_position_embeddings", where, default=_MAX_POSITIONS[architecture]
    )
    if max_position_embeddings > _LONGEST_CONTEXT:
        raise ModelError(
            f"{where}: max_position_embeddings = {max_position_embeddings}; "
            f"at most {_LONGEST_CONTEXT} are supported"
        )
    rope = _parse_rope(config, head_dim, max_position_embeddings, where)
    if rope.kind == "yarn":
        stretched = int(rope.original_max_positions * rope.factor)
        max_position_embeddings = max(max_position_embeddings, stretched)
    attention_bias = architecture in ("llama", "qwen3") and bool(config.get("attention_bias"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive_int(config, "vocab_size", where),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size", where),
        num_layers=_positive_int(config, "num_hidden_layers", where),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=_positive_float(config, "rms_norm_eps", where, default=1e-6),
        rope=rope,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=architecture == "llama" and bool(config.get("mlp_bias")),
        qk_norm=architecture == "qwen3",
    )


def _refuse_unsupported(config: Mapping[str, Any], architecture: str, where: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{where}: hidden_act = {activation!r} is not supported; only 'silu' is")
    quantization = config.get("quantization_config")
    if quantization:
        method = dict(quantization).get("quant_method", "unknown")
        raise ModelError(
            f"{where}: weights quantized with {method!r} are not supported; "
            "take the unquantized model or a GGUF file"
        )
    for key in ("num_local_experts", "num_experts", "expert_count"):
        if config.get(key):
            raise ModelError(f"{where}: mixture of experts ({key}) is not supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            raise ModelError(f"{where}: {key} = {config[key]} is not supported")
    if "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        raise ModelError(f"{where}: the model brings code of its own (auto_map); not supported")
    window = _active_window(config, architecture)
    if window:
        raise ModelError(f"{where}: {window}; models that attend to a window are not supported")


def _active_window(config: Mapping[str, Any], architecture: str) -> str | None:
    """Describes the sliding window that limits attention, if there is one."""
    other = sorted({str(t) for t in config.get("layer_types") or ()} - {"full_attention"})
    if other:
        return f"layer_types holds {other[0]!r}"
    window = config.get("sliding_window", _MISTRAL_WINDOW if architecture == "mistral" else None)
    if architecture in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        unused = first >= config.get("num_hidden_layers", 0)
        if not config.get("use_sliding_window") or unused:
            return None
    limit = config.get("max_position_embeddings", _MAX_POSITIONS[architecture])
    if not window or window >= limit:
        return None
    return f"sliding_window = {window} is below max_position_embeddings = {limit}"


def _parse_rope(
    config: Mapping[str, Any], head_dim: int, max_position_embeddings: int, where: str
) -> RopeConfig:
    """``rope_theta`` beside ``rope_scaling``, or, newer, all of it in ``rope_parameters``."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor = {partial} is not supported")
    theta = _positive_float({**config, **rope}, "rope_theta", where, default=10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(
            f"{where}: rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    if kind == "default":
        return RopeConfig(theta)
    if kind == "divisors":
        return RopeConfig(theta, kind, divisors=_divisors(rope, head_dim, where))
    factor = _positive_float(rope, "factor", where)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    original = config.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", max_position_embeddings
    )
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            factor,
            low_freq_factor=_positive_float(rope, "low_freq_factor", where),
            high_freq_factor=_positive_float(rope, "high_freq_factor", where),
            original_max_positions=int(original),
        )
    return RopeConfig(
        theta,
        kind,
        factor,
        original_max_positions=int(original),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=rope.get("attention_factor"),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
    )


def _divisors(rope: Mapping[str, Any], head_dim: int, where: str) -> tuple[float, ...]:
    divisors = rope.get("divisors") or ()
    if len(divisors) != head_dim // 2:
        raise ModelError(
            f"{where}: {len(divisors)} rope divisors for a head of {head_dim}; "
            f"expected {head_dim // 2}"
        )
    return tuple(divisors)


def _positive_int(
    config: Mapping[str, Any], key: str, where: str, default: int | None = None
) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: {key} = {value!r}; expected a whole number of at least 1")
    return value


def _positive_float(
    config: Mapping[str, Any], key: str, where: str, default: float | None = None
) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelError(f"{where}: {key} = {value!r}; expected a number above 0")
    return float(value)
