"""`weightcast snapshot`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write_fields, write_json
from .text import size

if TYPE_CHECKING:
    from weightcast.manifest.rebuild import State
    from weightcast.manifest.stream import Snapshot, StreamReader
    from weightcast.schemas.layout import TensorSpec


@click.command("snapshot")
@root_argument
@json_option
@store_options
def command(root: str, as_json: bool, store: StoreOptions) -> None:
    """Write a snapshot of the newest version, so that readers can start there.

    Rebuilds that version from the store: takes the memory of one model. The publisher may be at work
    meanwhile.
    """
    from weightcast.manifest.inspect.pool import workers
    from weightcast.manifest.rebuild import rebuild
    from weightcast.schemas.errors import NotFound

    reader = store.reader(root)
    head = reader.head()
    if head is None:
        raise NotFound(f"no version in {reader.store.url} yet")
    position = reader.position(head)
    found = reader.own_snapshot(position)
    written = found is None
    if found is None:
        with workers() as pool:
            found = _write(reader, rebuild(reader, head, pool))
    if as_json:
        write_json(
            {
                "version": head,
                "folder": found.folder,
                "bytes": found.manifest.bytes,
                "files": len(found.manifest.weights) + len(found.manifest.files),
                "written": written,
            }
        )
    else:
        note = "" if written else ", was there already"
        write_fields([("version", head), ("snapshot", f"{found.folder}, {size(found.manifest.bytes)}{note}")])


def _write(reader: StreamReader, state: State) -> Snapshot:
    from weightcast.manifest.commit import Writer
    from weightcast.manifest.export import fetch_files
    from weightcast.manifest.snapshot import write_snapshot
    from weightcast.schemas.names import snapshot_folder
    from weightcast.schemas.settings import PublisherSettings

    manifest = state.position.manifest

    def read(spec: TensorSpec, begin: int, end: int) -> bytes:
        return state.memory.tensor(spec.name).reshape(-1)[begin:end].tobytes()

    ref = write_snapshot(
        reader.store,
        snapshot_folder(manifest.version),
        stream=manifest.stream,
        version=manifest.version,
        layout=state.layout,
        layout_ref=manifest.layout,
        digest=manifest.digest_after,
        read=read,
        files=fetch_files(reader, manifest.files),
        writer=Writer.fresh("snapshot"),
        max_file_bytes=PublisherSettings.model_fields["snapshot_file_bytes"].default,
    )
    return reader.snapshot(ref.key, state.position)
