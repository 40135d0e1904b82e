"""`weightcast doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write_fields, write_json
from .text import size

if TYPE_CHECKING:
    from weightcast.manifest.store.types import ProbeResult


@click.command("doctor")
@root_argument
@json_option
@store_options
@click.pass_context
def command(context: click.Context, root: str, as_json: bool, store: StoreOptions) -> None:
    """Probe whether a store does what a stream needs, and how fast it is.

    Writes and removes some small objects and one of 4 MiB under ROOT. Exit code 15 if a property does not
    hold.
    """
    from weightcast.manifest.stream import StreamReader
    from weightcast.schemas.errors import NotFound

    opened = store.open(root)
    found = opened.probe()
    try:
        stream = StreamReader.open(opened).stream.stream
    except NotFound:
        stream = None
    if as_json:
        write_json(
            {
                "url": opened.url,
                "stream": stream,
                "usable": found.usable,
                "create_only": found.create_only,
                "read_after_write": found.read_after_write,
                "list_after_write": found.list_after_write,
                "bodies_intact": found.bodies_intact,
                "put_latency_s": found.put_latency_s,
                "get_latency_s": found.get_latency_s,
                "write_bytes_s": found.write_bytes_s,
                "read_bytes_s": found.read_bytes_s,
                "problems": list(found.problems),
            }
        )
    else:
        _write_probe(opened.url, stream, found)
    context.exit(0 if found.usable else 15)


def _write_probe(url: str, stream: str | None, found: ProbeResult) -> None:
    write_fields(
        [
            ("store", url),
            ("stream", stream or "none here yet"),
            ("create-only writes", _word(found.create_only)),
            ("read after write", _word(found.read_after_write)),
            ("list after write", _word(found.list_after_write)),
            ("bodies intact", _word(found.bodies_intact)),
            ("small write", f"{1000 * found.put_latency_s:.1f} ms"),
            ("small read", f"{1000 * found.get_latency_s:.1f} ms"),
            ("one stream out", f"{size(int(found.write_bytes_s))}/s"),
            ("one stream in", f"{size(int(found.read_bytes_s))}/s"),
            *(("problem", sentence) for sentence in found.problems),
        ]
    )


def _word(holds: bool) -> str:
    return "yes" if holds else "NO"
