"""Cosine and sine tables of the rotary position embedding (RoFormer, arXiv:2104.09864).

The frequencies and their rounding follow `transformers`, whose float32 logits are the reference.
"""

import math

import numpy as np
import torch
from torch import Tensor

from prefixkv.model.config import ModelConfig, RopeConfig


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, float32 [max_position_embeddings, head_dim / 2] each."""
    frequencies, scale = rope_frequencies(config.rope, config.head_dim)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = (positions[:, None] * frequencies).numpy().astype(np.float64)
    # NumPy's, because torch's first cos or sin of a process is at times good to 12 bits only.
    cos, sin = (torch.from_numpy(function(angles) * scale).float() for function in (np.cos, np.sin))
    return cos, sin


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians a position, float32 [head_dim / 2], and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wave = rope.theta**exponents
    if rope.kind == "yarn":
        return _yarn(rope, wave, head_dim), _yarn_scale(rope)
    frequencies = 1.0 / wave
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "divisors":
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies, 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended."""
    length = rope.original_max_positions
    waves = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = (length / waves - low) / (high - low)
    blended = (1 - kept) * frequencies / rope.factor + kept * frequencies
    stretched = torch.where(waves > length / low, frequencies / rope.factor, frequencies)
    between = (waves >= length / high) & (waves <= length / low)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, wave: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv:2309.00071): a ramp over the dimensions from kept to stretched."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / width
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * wave) * (1 - kept) + 1.0 / wave * kept


def _yarn_scale(rope: RopeConfig) -> float:
    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
