"""Automatic prefix caching for language-model serving: compute every shared prompt prefix once.

``prefixkv.cache`` works alone; ``LLM`` needs the extra ``prefixkv[engine]``.
"""

from typing import TYPE_CHECKING, Any

from prefixkv.request import RequestMetrics, RequestOutput, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from prefixkv.engine.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Loaded when asked for, so that `prefixkv.cache` never imports torch.
    if name == "LLM":
        from prefixkv.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
