"""What a user may choose about the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prefixkv.errors import ConfigError

MIB = 2**20


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the server listens and what it accepts; a field's ``help`` is its flag's help.

    Raises:
        ConfigError: a value is out of its limits.
    """

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 is every IPv4 interface")
    port: int = _option(8000, "Port to listen on; 0 takes a free one")
    served_model_name: tuple[str, ...] = _option(
        (), "Name that requests use; give it again for more names [default: the model's own]"
    )
    max_body_size: int = _option(8, "Largest request body, in MiB")
    reserve: tuple[str, ...] = _option(
        (),
        "File whose prompts are computed at the start and stay in the cache: a text, .json (a "
        "prompt, messages, or a list of either) or .jsonl (one a line); give it again for more",
    )
    admin_key_file: str | None = _option(
        None,
        "File with the key for /v1/reservations, which is closed without one [default: the value "
        "of PREFIXKV_ADMIN_KEY]",
    )
    shutdown_timeout: int = _option(30, "Seconds that running requests get when it stops")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be from 0 to 65535")
        if any(not name for name in self.served_model_name):
            raise ConfigError("served_model_name is empty; give a name or leave it out")
        if self.max_body_size < 1:
            raise ConfigError(f"max_body_size is {self.max_body_size}; it must be 1 MiB or more")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout is {self.shutdown_timeout}; it must be 0 or more")
