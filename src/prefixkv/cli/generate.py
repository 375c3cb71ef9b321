"""``prefixkv generate``."""

from __future__ import annotations

import click

from prefixkv.cli.session import Session, counts
from prefixkv.config import EngineOptions
from prefixkv.request import RequestOutput, SamplingParams


def run(
    options: EngineOptions, prompt: str, params: SamplingParams, chat: bool, verbose: bool
) -> None:
    """Print the text as it comes; ``verbose`` adds the counts on stderr."""
    output = RequestOutput("")
    with Session(options) as session:
        tokenizer = session.engine.tokenizer
        if chat:
            token_ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        else:
            token_ids = tokenizer.encode(prompt)
        try:
            session.stream(token_ids, params, output, lambda text: click.echo(text, nl=False))
        finally:
            if output.token_ids:
                click.echo()
    if verbose:
        click.echo(counts(output), err=True)
