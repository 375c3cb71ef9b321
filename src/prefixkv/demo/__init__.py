"""``prefixkv demo``: the same requests with the prefix cache on and off, side by side.

A document is asked several questions, then a chat about it grows turn by turn. Each request runs on
an engine with the cache on and then on another with it off; the two share nothing but the model's
files. A table shows what was cached, what was computed and how long the first token took.
"""

from prefixkv.demo.play import run
from prefixkv.demo.script import Script, default_script

__all__ = ["Script", "default_script", "run"]
