"""Runs a step: from the scheduler's work to logits. Never calls the cache manager."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixkv.cache import step_arrays
from prefixkv.engine.step import Step
from prefixkv.model.attention import PagedAttention, StepLayout
from prefixkv.model.llama import Llama


class Runner:
    """A model and the K/V of all blocks."""

    def __init__(self, model: Llama, attention: PagedAttention) -> None:
        self.model = model
        self.attention = attention

    def run(self, step: Step) -> Tensor:
        """Write the K/V of the step's tokens and return the logits that it asks for.

        Returns:
            float32 [R, vocab]: each work's ``num_logits`` last rows, work after work.
        """
        self.attention.copy_blocks(step.copies)
        token_ids, positions, query_start, num_computed, table_start, block_ids = step_arrays(
            [work.seq for work in step.work],
            [work.table for work in step.work],
            [work.start for work in step.work],
            [work.stop for work in step.work],
        )
        self.attention.begin(StepLayout(query_start, num_computed, table_start, block_ids))
        rows = [
            row
            for work, end in zip(step.work, query_start[1:].tolist(), strict=True)
            for row in range(end - work.num_logits, end)
        ]
        device = self.attention.k_cache.device
        return self.model.forward(
            torch.from_numpy(token_ids).to(device),
            torch.from_numpy(positions).to(device),
            self.attention,
            torch.tensor(rows, dtype=torch.int64, device=device),
        )
