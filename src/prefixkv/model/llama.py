"""The forward pass of the Llama family: Llama, SmolLM, Mistral, Qwen2 and Qwen3.

The families differ in switches of `ModelConfig` only: biases on the projections (Qwen2), a norm on
each head of q and k (Qwen3), one matrix for embedding and head. Reference: `transformers`, float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixkv.model.config import ModelConfig
from prefixkv.model.ops import Linear, Ops
from prefixkv.model.rope import rope_tables
from prefixkv.model.weights import WeightReader

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """A loaded model: packed weights and the forward pass over them. Holds no K/V and no state."""

    def __init__(
        self, config: ModelConfig, ops: Ops, reader: WeightReader, device: str = "cpu"
    ) -> None:
        """Takes every tensor from ``reader`` and packs it with ``ops`` at once.

        No more than one stack of matrices is held unpacked. Raises `ModelError` for a tensor that
        is missing, has another shape, or is left over.
        """
        self.config = config
        self._ops = ops
        self._embedding = ops.linear(
            reader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        )
        self._layers = [
            _load_layer(config, ops, reader, device, i) for i in range(config.num_layers)
        ]
        self._norm = _vector(reader, device, "model.norm.weight", config.hidden_size)
        self._head = self._embedding
        if config.tie_word_embeddings:
            reader.skip("lm_head.weight")
        else:
            head = reader.take("lm_head.weight", config.vocab_size, config.hidden_size)
            self._head = ops.linear(head)
        reader.finish()
        cos, sin = rope_tables(config)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, rows: Tensor
    ) -> Tensor:
        """Logits of the wanted rows, float32 [R, vocab_size].

        ``token_ids`` and ``positions`` are int64 [T]: the new tokens of any number of sequences.
        ``attention(layer, q, k, v)`` writes K/V, attends and returns [T, num_heads * head_dim];
        q is [T, num_heads, head_dim], k and v are [T, num_kv_heads, head_dim] views. ``rows``,
        int64 [R], picks the tokens whose logits are wanted; only they pass through the head.
        """
        ops, eps = self._ops, self.config.rms_norm_eps
        residual = self._embedding.rows(token_ids)
        x = ops.rms_norm(residual, self._layers[0].attention_norm, eps)
        for index, layer in enumerate(self._layers):
            if index:
                x = ops.add_rms_norm(x, residual, layer.attention_norm, eps)
            q, k, v = self._qkv(layer, x, positions)
            x = layer.output(attention(index, q, k, v))
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
        x = ops.add_rms_norm(x[rows], residual[rows], self._norm, eps)
        return self._head(x).to(torch.float32)

    def _qkv(self, layer: _Layer, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(x).view(len(x), heads + 2 * kv_heads, config.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._ops.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = self._ops.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        self._ops.rope_(q, k, self._cos, self._sin, positions)
        return q, k, v


def _load_layer(
    config: ModelConfig, ops: Ops, reader: WeightReader, device: str, index: int
) -> _Layer:
    prefix = f"model.layers.{index}"
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def linear(names: dict[str, int], width: int, bias: bool) -> Linear:
        """The named projections stacked, so that one product makes them all."""
        weights = [reader.take(f"{prefix}.{n}.weight", rows, width) for n, rows in names.items()]
        if not bias:
            return ops.linear(weights)
        biases = [reader.take(f"{prefix}.{n}.bias", rows) for n, rows in names.items()]
        return ops.linear(weights, biases)

    def norm(name: str, size: int) -> Tensor:
        return _vector(reader, device, f"{prefix}.{name}.weight", size)

    attention = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    return _Layer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=linear(attention, hidden, config.qkv_bias),
        q_norm=norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
        output=linear({"self_attn.o_proj": hidden}, q, config.output_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
        down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
    )


def _vector(reader: WeightReader, device: str, name: str, size: int) -> Tensor:
    return reader.take(name, size).to(device, torch.float32)
