"""Automatic prefix caching for language-model serving: compute every shared prompt prefix once.

``prefixkv.cache`` works alone; ``LLM`` needs the extra ``prefixkv[engine]``.
"""

from typing import TYPE_CHECKING, Any

from prefixkv.request import (
    BeamSearchParams,
    RequestMetrics,
    RequestOutput,
    Reservation,
    SampleOutput,
    SamplingParams,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from prefixkv.engine.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchParams",
    "RequestMetrics",
    "RequestOutput",
    "Reservation",
    "SampleOutput",
    "SamplingParams",
    "TokenLogprobs",
    "__version__",
    "how_to_install",
]


def how_to_install(extra: str) -> str:
    """The command that installs one of the package's extras."""
    return f"pip install '.[{extra}]' in a checkout, or 'prefixkv[{extra}]'"


def __getattr__(name: str) -> Any:
    # Loaded when asked for, so that `prefixkv.cache` never imports torch.
    if name == "LLM":
        try:
            from prefixkv.engine.llm import LLM
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("", "prefixkv"):
                raise
            raise ImportError(f"LLM needs torch and more: {how_to_install('engine')}") from error
        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
