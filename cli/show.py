"""`weightcast show`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write, write_fields, write_json, write_table
from .text import share, size

if TYPE_CHECKING:
    from weightcast.manifest.inspect.values import VersionDetails


@click.command("show")
@root_argument
@click.argument("version", type=click.IntRange(min=0))
@click.option("--tensors", is_flag=True, help="Count the changes of every tensor, from the version's shards.")
@json_option
@store_options
def command(root: str, version: int, tensors: bool, as_json: bool, store: StoreOptions) -> None:
    """Show one version: where it comes from, what it changed, what the trainer said about it."""
    from weightcast.manifest.inspect import show

    details = show(store.reader(root), version, tensors)
    if as_json:
        document = asdict(details)
        entry = document.pop("entry")
        write_json({**entry, "tensor_count": entry["tensors"], **document})
        return
    _write_version(details)
    if details.tensors is not None:
        write("\n")
        write_table(
            ("tensor", "dtype", "shape", "changed", "elements", "share", "tied to"),
            (
                (
                    t.name,
                    t.dtype,
                    list(t.shape),
                    t.changed,
                    t.elements,
                    share(t.changed, t.elements),
                    t.tied_to,
                )
                for t in details.tensors
            ),
        )


def _write_version(details: VersionDetails) -> None:
    entry = details.entry
    kind = f"{entry.kind}, new layout" if entry.relaid and entry.version else entry.kind
    write_fields(
        [
            ("version", entry.version),
            ("kind", f"{kind}, data may be pruned" if details.pruned else kind),
            ("step", entry.step),
            ("time", entry.time),
            ("writer", f"{entry.writer} run {entry.run}"),
            (
                "changed",
                f"{entry.changed} of {entry.elements} elements ({share(entry.changed, entry.elements)})",
            ),
            ("bytes", f"{size(entry.bytes)} in {entry.shards} shards, of {size(entry.dense_bytes)}"),
            ("tensors", entry.tensors),
            ("layout", details.layout_sha256),
            ("parent", details.parent_sha256),
            ("manifest", f"{details.manifest_sha256}, {details.manifest_bytes} bytes"),
            ("before", details.digest_before),
            ("after", entry.digest),
            ("snapshot", details.snapshot),
            ("files", " ".join(details.files)),
            ("metadata", json.dumps(details.metadata, ensure_ascii=False) if details.metadata else None),
        ]
    )
