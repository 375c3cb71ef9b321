"""prefixkv as a side of the engine benchmark: python prefixkv_side.py '{"prefix_cache": "off"}'."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

import numpy
import torch

import prefixkv
from closed_loop import Piece
from prefixkv.config import EngineOptions
from prefixkv.engine.engine import Engine
from prefixkv.errors import PrefixKVError
from prefixkv.request import SamplingParams
from side_process import serve

_WARM_UP_TOKENS = 64


class _Stages:
    """Names each stage of long work (fetch, convert, load) once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, stage: str, _done: int, _total: int) -> None:
        if stage not in self._seen:
            self._seen.add(stage)
            print(f"  {stage} ...", file=sys.stderr, flush=True)


class PrefixKVSide:
    """The synchronous engine; options are those of ``EngineOptions``."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._engine = Engine(EngineOptions(**options), _Stages())
        self._warm_up()

    def describe(self) -> dict[str, Any]:
        return {
            "summary": self._engine.summary,
            "versions": {
                "prefixkv": prefixkv.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": numpy.__version__,
            },
            "max_model_len": self._engine.max_model_len,
        }

    def encode(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text, add_special_tokens=False)

    def reset(self, common: list[int]) -> None:
        """In ``paged`` nothing is found unless it is reserved, so there the common prefix is."""
        for reservation in self._engine.reservations:
            self._engine.release(reservation.id)
        if not self._engine.cache.reset():
            raise RuntimeError("blocks are held although nothing is in flight")
        if common and self._engine.options.prefix_cache == "paged":
            self._engine.add(common, SamplingParams(), reserve=True)
            while self._engine.has_work:
                self._engine.step()

    def add(self, prompt: list[int], max_tokens: int) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return self._engine.add(prompt, params)

    def step(self) -> list[Piece]:
        pieces = []
        for output in self._engine.step():
            if output.finish_reason == "error":
                raise RuntimeError(f"a step failed: {output.error}")
            pieces.append(
                Piece(
                    output.request_id, output.token_ids, output.finished, output.num_cached_tokens
                )
            )
        return pieces

    def computed_tokens(self) -> int:
        return self._engine.stats().computed_tokens

    def _warm_up(self) -> None:
        """Pay for what only a first request pays: page faults, lazy imports."""
        length = min(_WARM_UP_TOKENS, self._engine.max_model_len // 2)
        self.add([0] * length, 2)
        while self._engine.has_work:
            self.step()


if __name__ == "__main__":
    try:
        serve(lambda: PrefixKVSide(json.loads(sys.argv[1])))
    except PrefixKVError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:  # the parent got it too, and ends this process
        sys.exit(130)
