"""`weightcast demo`."""

from __future__ import annotations

import importlib

import click

PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@click.command("demo", context_settings=PASSED_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> int:
    """Train a small policy and cast its weights to two rollout processes."""
    code = importlib.import_module("weightcast.demo.run").main(list(arguments))
    return code if isinstance(code, int) else 0
