"""`weightcast log`."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write_json, write_table
from .text import share, size


@click.command("log")
@root_argument
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Versions to list."
)
@click.option(
    "--before", type=click.IntRange(min=0), metavar="VERSION", help="List versions before this one."
)
@json_option
@store_options
def command(root: str, limit: int, before: int | None, as_json: bool, store: StoreOptions) -> None:
    """List versions, newest first. Checks their hash chain."""
    from weightcast.manifest.inspect import log

    entries = log(store.reader(root), limit, before)
    if as_json:
        write_json({"versions": [asdict(e) for e in entries]})
    elif entries:
        write_table(
            ("version", "step", "time", "kind", "changed", "bytes", "shards", "writer"),
            (
                (
                    e.version,
                    e.step,
                    e.time,
                    e.kind,
                    share(e.changed, e.elements),
                    size(e.bytes),
                    e.shards,
                    e.writer,
                )
                for e in entries
            ),
        )
    else:
        sys.stderr.write("no version was committed yet\n")
