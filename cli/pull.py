"""`weightcast pull`."""

from __future__ import annotations

from pathlib import Path

import click

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write_fields, write_json
from .text import size


@click.command("pull")
@root_argument
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--version", type=click.IntRange(min=0), help="Version to write; the newest one if not given.")
@click.option("--force", is_flag=True, help="Replace the checkpoint that DIR holds.")
@json_option
@store_options
def command(
    root: str, folder: Path, version: int | None, force: bool, as_json: bool, store: StoreOptions
) -> None:
    """Write one version as the Hugging Face checkpoint DIR.

    DIR appears whole or not at all. Takes the memory of one model.
    """
    from weightcast.manifest.export import check_free, export, fetch_files
    from weightcast.manifest.inspect.pool import workers
    from weightcast.manifest.rebuild import rebuild
    from weightcast.schemas.errors import NotFound

    reader = store.reader(root)
    check_free(folder.resolve(), replace=force)
    if version is None:
        version = reader.head()
        if version is None:
            raise NotFound(f"no version in {reader.store.url} yet")
    manifest = reader.position(version).manifest
    files = fetch_files(reader, manifest.files)
    with workers() as pool:
        state = rebuild(reader, version, pool)
    names = export(state, files, folder, replace=force)
    if as_json:
        write_json(
            {
                "version": version,
                "step": manifest.step,
                "folder": str(folder.resolve()),
                "files": names,
                "tensors": len(state.layout),
                "bytes": sum(spec.nbytes for spec in state.layout),
                "digest": manifest.digest_after,
            }
        )
    else:
        write_fields(
            [
                ("version", version),
                ("step", manifest.step),
                ("folder", folder.resolve()),
                ("tensors", f"{len(state.layout)}, {size(sum(spec.nbytes for spec in state.layout))}"),
            ]
        )
