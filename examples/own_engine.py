"""An engine of your own: transformers (5.24 or newer) computes, prefixkv.cache shares prefixes.

    python examples/own_engine.py [hash|radix|paged]    # needs prefixkv[engine]

The K/V of all requests lies in blocks of one tensor. The cache says which of them a request reads
and writes, what is in them already, and what to give up when there is no room.
"""

import sys
from dataclasses import dataclass
from itertools import takewhile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from prefixkv.cache import BlockTable, Sequence, make_cache
from prefixkv.model.default_model import wheel_model_directory


@dataclass
class Request:
    seq: Sequence
    table: BlockTable
    tokens: list[int]
    num_cached_tokens: int


class Engine:
    def __init__(self, model, system: str, num_blocks: int = 256, block_size: int = 16) -> None:
        self.model, config = model, model.config
        self.cache = make_cache(system, num_blocks=num_blocks, block_size=block_size)
        head_size = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        block = (block_size, config.num_key_value_heads, head_size)
        self.kv = torch.zeros(config.num_hidden_layers, 2, num_blocks, *block, dtype=model.dtype)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Request]:
        """Greedy continuations of prompts, which run together as far as there is room."""
        requests, running = list[Request](), list[Request]()
        while running or len(requests) < len(prompts):
            admitted = (self.admit(prompt, max_tokens) for prompt in prompts[len(requests) :])
            requests += takewhile(bool, admitted)
            running = [request for request in requests if request.table.blocks]
            if not running and len(requests) < len(prompts):
                raise MemoryError("a request needs more blocks than there are")
            for request in running:
                is_full = len(request.tokens) == request.table.num_tokens
                if not is_full and request.tokens[-1] != self.model.config.eos_token_id:
                    self.step(request)
                else:
                    self.cache.free(request.table)  # stays cached until its room is needed
        return requests

    def admit(self, prompt: list[int], max_tokens: int) -> Request | None:
        """Start a request: room for all of it, and its prompt computed, or None for now."""
        seq, table = self.cache.sequence(prompt), self.cache.table()
        hit = self.cache.lookup(seq)
        grant = self.cache.allocate(table, len(prompt) + max_tokens, hit)
        if grant is None:
            return None
        for source, target in grant.copies:  # a block that is shared, and will be written
            self.kv[:, :, target] = self.kv[:, :, source]
        request = Request(seq, table, list(prompt), hit.num_tokens)
        self.step(request)  # at once, so that the next one finds it
        return request

    @torch.inference_mode()
    def step(self, request: Request) -> None:
        """Compute the tokens that have no K/V yet; the likeliest next token follows."""
        table, size, past = request.table, self.cache.block_size, DynamicCache()
        start, stop = table.num_computed_tokens, len(request.tokens)
        slots = (torch.tensor(table.blocks)[:, None] * size + torch.arange(size)).flatten()[:stop]
        layers = self.kv.flatten(2, 3)  # [layer, key or value, slot, head, head size]
        for layer, kv in enumerate(layers):
            past.update(*kv[:, slots[:start]].transpose(1, 2)[:, None], layer)
        logits = self.model(torch.tensor([request.tokens[start:]]), cache=past).logits
        for kv, layer in zip(layers, past.layers, strict=True):
            kv[0, slots[start:]] = layer.keys[0, :, start:].transpose(0, 1)
            kv[1, slots[start:]] = layer.values[0, :, start:].transpose(0, 1)
        self.cache.commit(table, request.seq, stop)  # written: from here on others may find it
        request.tokens.append(int(logits[0, -1].argmax()))
        request.seq.append(request.tokens[-1:])


def main() -> None:
    directory, system = wheel_model_directory(), (sys.argv[1:] or ["hash"])[0]
    engine = Engine(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), system)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    document = tokenizer.encode("The fox is red. The hen is white. The cat is black. " * 8)
    if system == "paged":  # where only what is reserved is found
        first = engine.admit(document, 1)
        engine.cache.reserve(first.table, len(document))
        engine.cache.free(first.table)
    asked = [document + tokenizer.encode(f"The {animal} is") for animal in ("fox", "hen", "cat")]
    for request in engine.generate(asked, 3):
        print(request.num_cached_tokens, "tokens cached:", tokenizer.decode(request.tokens[-6:]))


if __name__ == "__main__":
    main()
