"""`weightcast bench`."""

from __future__ import annotations

import importlib

import click

from .demo import PASSED_ON


@click.command("bench", context_settings=PASSED_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> int:
    """Measure speed and size on this machine."""
    code = importlib.import_module("weightcast.benchmarks.__main__").main(list(arguments))
    return code if isinstance(code, int) else 0
