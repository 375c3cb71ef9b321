"""The commands. What they need is imported when they run, so that help is quick."""

from __future__ import annotations

import sys
from typing import Any

import click

from prefixkv import __version__
from prefixkv.cli import MISUSE
from prefixkv.cli.flags import flags, take
from prefixkv.cli.sampling import sampling_flags, sampling_params
from prefixkv.config import EngineOptions
from prefixkv.server.settings import ServerOptions

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


_EPILOG = """The default model comes from a package and is converted once, into the directory that
PREFIXKV_CACHE_DIR names, or prefixkv in the user's cache directory."""


@click.group(context_settings=_SETTINGS, epilog=_EPILOG, invoke_without_command=True)
@click.version_option(__version__, message="prefixkv %(version)s")
@click.pass_context
def app(context: click.Context) -> None:
    """Serve language models and compute every shared prompt prefix once."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(MISUSE)


@app.command(short_help="Serve a model over HTTP, in the OpenAI dialect.")
@flags(ServerOptions, EngineOptions)
def serve(**values: Any) -> None:
    """Serve a model over HTTP, in the OpenAI dialect."""
    server, engine = take(ServerOptions, values), take(EngineOptions, values)
    from prefixkv.cli.serve import run

    run(engine, server)


@app.command(short_help="Continue a prompt.")
@click.argument("prompt", default="-")
@click.option("--chat", is_flag=True, help="Put the prompt through the model's chat template")
@click.option("-v", "--verbose", is_flag=True, help="Say what was cached and computed, on stderr")
@sampling_flags(max_tokens=256)
@flags(EngineOptions)
def generate(prompt: str, chat: bool, verbose: bool, **values: Any) -> None:
    """Continue PROMPT; without one, or with -, the prompt is read from stdin."""
    params, options = sampling_params(values), take(EngineOptions, values)
    from prefixkv.cli.generate import run

    run(options, sys.stdin.read() if prompt == "-" else prompt, params, chat, verbose)


@app.command(short_help="Talk with a model; each turn says what the cache saved.")
@click.option("--system", help="A system message that comes first")
@sampling_flags(max_tokens=512)
@flags(EngineOptions)
def chat(system: str | None, **values: Any) -> None:
    """Talk with a model; each turn says what the cache saved."""
    params, options = sampling_params(values), take(EngineOptions, values)
    from prefixkv.cli.chat import run

    run(options, system, params)


@app.command(short_help="Show what the prefix cache saves.")
@flags(EngineOptions)
def demo(**values: Any) -> None:
    """Show what the prefix cache saves: one document, several questions, then a chat."""
    options = take(EngineOptions, values)
    from rich.console import Console

    from prefixkv import demo

    demo.run(options, Console())
