"""Every error that prefixkv raises on purpose: each names the value, the limit and what to do.

PrefixKVError
├── ConfigError            an option is out of its limits, or options contradict each other
├── ModelError             a model cannot be found, read or served
├── RequestError           a request cannot be served as it stands (HTTP 400)
│   └── ContextLengthError   its prompt does not fit the context or the pool
├── CacheError             the cache manager was misused; its state is as before the call
│   └── StaleHitError        a hit whose blocks were evicted since the lookup
└── EngineError            the engine failed or has stopped
"""

import reprlib
from typing import Any


def brief(value: Any) -> str:
    """A value as messages show it: its ``repr``, with what is long or deep in it left out."""
    short = reprlib.Repr()
    short.maxlevel = 2
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


class PrefixKVError(Exception):
    """Base of all errors of this package."""


class ConfigError(PrefixKVError, ValueError):
    """An option is out of its limits, or options contradict each other."""


class ModelError(PrefixKVError):
    """A model cannot be found, read or served."""


class RequestError(PrefixKVError, ValueError):
    """A request cannot be served as it stands.

    ``param`` is the name of the field at fault and ``code`` a machine-readable reason; both may be
    None. The server turns them into the OpenAI error object with status 400.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt does not fit the model's context or the block pool."""

    def __init__(self, message: str, *, param: str | None = "prompt") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class CacheError(PrefixKVError, ValueError):
    """The cache manager was misused; nothing changed."""


class StaleHitError(CacheError):
    """A block of the hit was evicted or reused since the lookup; look up again."""


class EngineError(PrefixKVError, RuntimeError):
    """The engine failed or has stopped."""
