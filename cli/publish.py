"""`weightcast publish`: one checkpoint, or every one that a trainer writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weightcast.schemas.errors import WeightcastError

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write_fields, write_json
from .text import share, size

if TYPE_CHECKING:
    from weightcast.manifest.stream import StreamReader
    from weightcast.publisher import Publisher
    from weightcast.publisher.checkpoint import Checkpoint
    from weightcast.schemas.manifest import VersionManifest
    from weightcast.schemas.settings import PublisherSettings

_FOLDER = click.Path(path_type=Path)
_ONE_ONLY = {
    "step": "--step",
    "reset": "--reset",
    "drop": "--drop",
    "metadata": "--metadata",
    "as_json": "--json",
}
_WATCH_ONLY = {
    "http": "--http",
    "settle": "--settle",
    "poll": "--poll",
    "marker": "--marker",
    "existing": "--existing",
    "every": "--every",
    "json_logs": "--json-logs",
}


@dataclass(frozen=True)
class Request:
    """What to publish of a checkpoint, and how."""

    step: int | None
    metadata: dict[str, str]
    drop: tuple[str, ...]
    reset: bool


@click.command("publish")
@root_argument
@click.argument("checkpoint", metavar="[CHECKPOINT_DIR]", required=False, type=_FOLDER)
@click.option(
    "--step", type=click.IntRange(min=0), help="Trainer's step; from the folder's name if not given."
)
@click.option(
    "--metadata", multiple=True, metavar="KEY=VALUE", help="Text kept with the version (repeatable)."
)
@click.option("--drop", multiple=True, metavar="NAME", help="Tensor that is meant to be gone (repeatable).")
@click.option("--reset", is_flag=True, help="Start afresh from a snapshot, whatever the stream holds.")
@json_option
@click.option(
    "--cast", multiple=True, metavar="PATTERN=DTYPE", help="Round tensors of these names (repeatable)."
)
@click.option(
    "--baseline",
    type=_FOLDER,
    metavar="FILE",
    help="Keep the last version here, so that the next run need not fetch it.",
)
@click.option(
    "--codec",
    type=click.Choice(["gap", "class", "auto"]),
    help="How deltas are coded: class is smaller, but live engines need a mirror to follow it; auto goes by the link.",
)
@click.option("--writer", metavar="NAME", help="Name of this publisher in manifests.")
@click.option(
    "--single-writer",
    is_flag=True,
    help="Accept a store without create-only writes: one publisher will ever run.",
)
@click.option("--config", type=_FOLDER, metavar="FILE", help="Settings in TOML (also: WEIGHTCAST_CONFIG).")
@click.option(
    "--watch",
    type=_FOLDER,
    metavar="FOLDER",
    help="Publish every checkpoint that appears in FOLDER, until stopped.",
)
@click.option("--http", metavar="HOST:PORT", help="With --watch: serve /healthz, /readyz and /metrics.")
@click.option(
    "--settle",
    type=float,
    metavar="S",
    help="With --watch: seconds without a change after which a checkpoint is finished.",
)
@click.option("--poll", type=float, metavar="S", help="With --watch: seconds between two looks.")
@click.option("--marker", metavar="NAME", help="With --watch: file that a finished checkpoint has.")
@click.option(
    "--existing",
    type=click.Choice(["newest", "all", "ignore"]),
    help="With --watch: what to do with checkpoints that are there at the start.",
)
@click.option(
    "--every",
    is_flag=True,
    help="With --watch: publish each of several finished checkpoints, not the newest alone.",
)
@click.option("--json-logs", is_flag=True, help="With --watch: log in JSON.")
@store_options
def command(root: str, checkpoint: Path | None, watch: Path | None, store: StoreOptions, **given: Any) -> int:
    """Publish the Hugging Face checkpoint CHECKPOINT_DIR as the next version, or watch a folder for
    checkpoints.

    The first version, and one with --reset, is a snapshot; any other the difference to the version before.
    Nothing is ever written into the checkpoint's folder.
    """
    if (checkpoint is None) == (watch is None):
        raise click.UsageError("give either CHECKPOINT_DIR or --watch FOLDER")
    for name, option in (_ONE_ONLY if watch is not None else _WATCH_ONLY).items():
        if given[name] not in (None, False, ()):
            raise click.UsageError(
                f"{option} does not go with {'--watch' if watch is not None else 'CHECKPOINT_DIR'}"
            )
    metadata = _pairs(given["metadata"], "--metadata", "KEY=VALUE")
    casts = _pairs(given["cast"], "--cast", "PATTERN=DTYPE")
    flags = {
        "cast": {pattern: dtype.upper() for pattern, dtype in casts.items()} or None,
        "baseline": given["baseline"],
        "codec": given["codec"],
        "writer": given["writer"],
        "single_writer": given["single_writer"] or None,
    }
    from weightcast.schemas.settings import PublisherSettings, load

    settings = load(PublisherSettings, flags, given["config"])
    if watch is not None:
        return _watch(root, watch, store, settings, given)
    if checkpoint is None:
        raise click.UsageError("give either CHECKPOINT_DIR or --watch FOLDER")
    request = Request(given["step"], metadata, given["drop"], given["reset"])
    _publish_one(root, checkpoint, store, settings, request, as_json=given["as_json"])
    return 0


def _pairs(values: Sequence[str], option: str, form: str) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, equals, rest = value.rpartition("=") if option == "--cast" else value.partition("=")
        if not key or not equals or not rest:
            raise click.UsageError(f"{option} {value!r} is not {form}")
        pairs[key] = rest
    return pairs


def _publish_one(
    root: str,
    folder: Path,
    store: StoreOptions,
    settings: PublisherSettings,
    request: Request,
    *,
    as_json: bool,
) -> None:
    """Publish one checkpoint and say what came of it. What is wrong with the checkpoint is found before the
    store is asked.
    """
    opened = store.open(root, single_writer=settings.single_writer)
    from weightcast.publisher import Publisher
    from weightcast.publisher.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder)
    step = request.step if request.step is not None else _step_of(checkpoint.folder)
    publisher = Publisher(root, settings, store=opened, fence=False, resume=not request.reset)
    # Not a context manager: when this is interrupted, nothing is waited for, and what is not committed does
    # not exist.
    try:
        manifest = _publish(publisher, checkpoint, step, request)
    except Exception:
        with suppress(WeightcastError):  # says the same once more
            publisher.close()
        raise
    publisher.close()
    from weightcast.manifest.stream import StreamReader

    _write_result(manifest, StreamReader.open(opened), as_json=as_json)


def _publish(
    publisher: Publisher, checkpoint: Checkpoint, step: int | None, request: Request
) -> VersionManifest:
    from weightcast.publisher.label import Label
    from weightcast.publisher.sources import Casts, recast

    casts = Casts(publisher.settings.cast)
    label = Label(step, request.metadata, checkpoint.companions())
    with checkpoint.items() as contents:  # going through them ends with a check that no file was written to
        found = (recast(item, casts) for item in contents.values())
        pending = publisher.publish_items(found, label, drop=request.drop, reset=request.reset)
    return pending.wait()


def _step_of(folder: Path) -> int | None:
    """The step that the folder's name and its trainer state agree on; None if neither says.

    Raises:
        UsageError: they disagree.
    """
    from weightcast.publisher.checkpoint import TRAINER_STATE_NAME, check_step, step_in_name

    step = step_in_name(folder)
    if step is not None:
        check_step(folder, step)
        return step
    try:
        found = json.loads((folder / TRAINER_STATE_NAME).read_bytes())["global_step"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return found if type(found) is int and found >= 0 else None


def _write_result(manifest: VersionManifest, reader: StreamReader, *, as_json: bool) -> None:
    from weightcast.manifest.inspect import kind_of

    elements = manifest.totals.elements
    changed = elements if manifest.reset else manifest.totals.changed
    wire_bytes = manifest.totals.bytes + len(manifest.encode()) + _snapshot_bytes(manifest, reader)
    if as_json:
        write_json(
            {
                "version": manifest.version,
                "kind": kind_of(manifest),
                "step": manifest.step,
                "changed": changed,
                "elements": elements,
                "wire_bytes": wire_bytes,
                "dense_bytes": manifest.totals.dense_bytes,
                "tensors": manifest.layout.tensors,
                "shards": len(manifest.shards),
                "digest": manifest.digest_after,
                "time": manifest.time,
                "writer": manifest.writer,
                "run": manifest.run,
            }
        )
        return
    write_fields(
        [
            ("version", f"{manifest.version} ({kind_of(manifest)})"),
            ("step", manifest.step),
            ("changed", f"{changed} of {elements} elements ({share(changed, elements)})"),
            ("bytes", f"{size(wire_bytes)}, of {size(manifest.totals.dense_bytes)}"),
        ]
    )


def _snapshot_bytes(manifest: VersionManifest, reader: StreamReader) -> int:
    """Bytes of the snapshot that a version starts from: its files and its manifest."""
    if manifest.snapshot is None:
        return 0
    snapshot = reader.snapshot(manifest.snapshot.key, reader.position(manifest.version)).manifest
    return snapshot.bytes + sum(f.size for f in snapshot.files) + manifest.snapshot.size


def _watch(
    root: str, folder: Path, store: StoreOptions, settings: PublisherSettings, given: dict[str, Any]
) -> int:
    from weightcast.publisher.watch import WatchSettings

    from .sidecar import run_watch

    named = {"settle_s": given["settle"], "poll_s": given["poll"], "marker": given["marker"]}
    flags = named | {"existing": given["existing"], "every": given["every"]}
    watch = WatchSettings(**{name: value for name, value in flags.items() if value is not None})
    opened = store.open(root, single_writer=settings.single_writer)
    return run_watch(
        root, folder, settings, watch, store=opened, http=given["http"], json_logs=given["json_logs"]
    )
