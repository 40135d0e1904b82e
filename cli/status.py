"""`weightcast status`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write, write_fields, write_json, write_table
from .text import age, size

if TYPE_CHECKING:
    from weightcast.manifest.inspect.values import Status


@click.command("status")
@root_argument
@json_option
@store_options
def command(root: str, as_json: bool, store: StoreOptions) -> None:
    """Show head, snapshots, pruning and readers at a glance."""
    from weightcast.manifest.inspect import status

    found = status(store.reader(root), datetime.now(UTC))
    if as_json:
        write_json(asdict(found))
    else:
        _write_status(found)


def _write_status(found: Status) -> None:
    head = found.head
    snapshot = None
    if found.snapshot is not None:
        snapshot = (
            f"version {found.snapshot}, then {found.behind_snapshot} deltas of {size(found.chain_bytes)}"
        )
    write_fields(
        [
            ("stream", f"{found.stream} at {found.url}"),
            ("created", f"{found.created}, for a single writer" if found.single_writer else found.created),
            (
                "head",
                f"version {head.version}, {age(found.age_s)} ago" if head else "nothing was committed yet",
            ),
            ("step", head.step if head else None),
            ("writer", f"{head.writer} run {head.run}" if head else None),
            ("model", f"{head.tensors} tensors, {size(head.dense_bytes)}" if head else None),
            ("start from", snapshot),
            ("floor", found.floor),
            ("stored", f"{size(found.delta_bytes)} of deltas, {size(found.snapshot_bytes)} of snapshots"),
            ("readers", len(found.readers)),
        ]
    )
    if found.readers:
        write("\n")
        rows = ((r.reader, r.version, r.lag, age(r.age_s)) for r in found.readers)
        write_table(("reader", "version", "lag", "seen, ago"), rows)
