"""`weightcast diff`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write_fields, write_json, write_table
from .text import share

if TYPE_CHECKING:
    from weightcast.manifest.inspect.changes import Diff, TensorDiff


@click.command("diff")
@root_argument
@click.argument("a", type=click.IntRange(min=0))
@click.argument("b", type=click.IntRange(min=0))
@json_option
@store_options
def command(root: str, a: int, b: int, as_json: bool, store: StoreOptions) -> None:
    """Compare versions A and B bit by bit.

    Both are rebuilt from the store, which takes the memory of two models. Only tensors that differ are
    listed.
    """
    from weightcast.manifest.inspect.changes import diff

    found = diff(store.reader(root), a, b)
    if as_json:
        document = asdict(found)
        document["tensors"] = [t for t in document["tensors"] if t["kind"] != "same"]
        write_json(document)
    else:
        _write_diff(found)


def _write_diff(found: Diff) -> None:
    differing = [t for t in found.tensors if t.kind != "same"]
    if found.identical:
        write_fields([("versions", f"{found.a} and {found.b} are identical"), ("elements", found.elements)])
        return
    changed = f"{found.changed} of {found.elements} elements ({share(found.changed, found.elements)})"
    write_fields([("versions", f"{found.a} to {found.b}"), ("changed", changed)])
    write_table(
        ("tensor", "kind", "dtype", "shape", "changed", "elements", "share"),
        (
            (t.name, t.kind, *_forms(t), t.changed, t.elements, share(t.changed, t.elements))
            for t in differing
        ),
    )


def _forms(tensor: TensorDiff) -> tuple[str, str]:
    """dtype and shape, or old and new where they differ."""
    dtypes = [d for d in (tensor.dtype_a, tensor.dtype_b) if d is not None]
    shapes = [str(list(s)) for s in (tensor.shape_a, tensor.shape_b) if s is not None]
    return " -> ".join(dict.fromkeys(dtypes)), " -> ".join(dict.fromkeys(shapes))
