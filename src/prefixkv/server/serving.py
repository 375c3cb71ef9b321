"""What every handler shares: the engine, the names of its model, the limits and the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from prefixkv.engine.async_engine import AsyncEngine
from prefixkv.errors import brief
from prefixkv.model.tokenizer import Tokenizer
from prefixkv.server.body import Bodies
from prefixkv.server.errors import HTTPError
from prefixkv.server.metrics import Latencies
from prefixkv.server.prompts import Prompts
from prefixkv.server.settings import MIB, ServerOptions

CACHED_TOKEN_TEXTS = 1 << 16


class TokenTexts:
    """The text of single tokens, special ones included, as logprobs show them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        decode = tokenizer.decode
        self._text = lru_cache(CACHED_TOKEN_TEXTS)(
            lambda token: decode([token], skip_special_tokens=False)
        )

    def __call__(self, token: int) -> str:
        return self._text(token)


@dataclass(frozen=True, slots=True)
class Serving:
    """Made once by the app; read by the handlers."""

    engine: AsyncEngine
    model_names: tuple[str, ...]
    bodies: Bodies
    created: int
    prompts: Prompts
    token_text: TokenTexts
    admin_key: str | None = field(default=None, repr=False)
    latencies: Latencies = field(default_factory=Latencies)

    @classmethod
    def of(
        cls, engine: AsyncEngine, options: ServerOptions, created: int, admin_key: str | None
    ) -> Serving:
        names = options.served_model_name or (engine.model_name,)
        return cls(
            engine,
            names,
            Bodies(options.max_body_size * MIB),
            created,
            Prompts(engine.tokenizer, engine.max_model_len),
            TokenTexts(engine.tokenizer),
            admin_key,
        )

    def model(self, name: str | None) -> str:
        """The name to answer with; requests that name no model mean the one that is served.

        Raises:
            HTTPError: no model of that name is served (404).
        """
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise HTTPError(
                404,
                f"model {brief(name)} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            )
        return name or self.model_names[0]
