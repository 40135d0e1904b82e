"""`weightcast subscribe`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write_fields, write_json
from .text import size

if TYPE_CHECKING:
    from weightcast.manifest.chain import Position
    from weightcast.schemas.settings import SubscriberSettings

_FOLDER = click.Path(path_type=Path)


@click.command("subscribe")
@root_argument
@click.option(
    "--into",
    type=_FOLDER,
    required=True,
    metavar="DIR",
    help="Checkpoint folder to keep at the newest version.",
)
@click.option("--once", is_flag=True, help="Go to the newest version and stop.")
@click.option("--poll", type=float, metavar="S", help="Seconds between two polls.")
@click.option(
    "--max-lag",
    type=click.IntRange(min=0),
    metavar="N",
    help="Not ready when more versions behind than this.",
)
@click.option(
    "--no-lease", is_flag=True, help="Write nothing to the store; pruning then does not know of this reader."
)
@click.option("--http", metavar="HOST:PORT", help="Serve /healthz, /readyz and /metrics.")
@click.option("--json-logs", is_flag=True, help="Log in JSON.")
@click.option("--config", type=_FOLDER, metavar="FILE", help="Settings in TOML (also: WEIGHTCAST_CONFIG).")
@json_option
@store_options
def command(root: str, into: Path, once: bool, as_json: bool, store: StoreOptions, **given: Any) -> int:
    """Keep a checkpoint folder at the newest version, patched in place, until stopped.

    Readers that load the folder see whole versions. With --json each version that is applied is a JSON
    document in a line.
    """
    if once and given["http"]:
        raise click.UsageError("--http does not go with --once")
    from weightcast.schemas.settings import SubscriberSettings, load

    flags = {
        "poll_s": given["poll"],
        "max_lag": given["max_lag"],
        "lease": False if given["no_lease"] else None,
    }
    settings = load(SubscriberSettings, flags, given["config"])
    if once:
        _once(root, into, store, settings, as_json=as_json)
        return 0
    return _follow(root, into, store, settings, given, as_json=as_json)


def _once(root: str, into: Path, store: StoreOptions, settings: SubscriberSettings, *, as_json: bool) -> None:
    from weightcast.subscriber import CheckpointFolder, Subscriber

    with Subscriber(root, CheckpointFolder(into), settings, store=store.open(root)) as subscriber:
        write_applied(subscriber.once(), into, as_json=as_json)


def write_applied(position: Position, into: Path, *, as_json: bool) -> None:
    """Say which version a folder holds now."""
    manifest = position.manifest
    if as_json:
        write_json(
            {
                "version": manifest.version,
                "step": manifest.step,
                "folder": str(into.resolve()),
                "digest": manifest.digest_after,
                "dense_bytes": manifest.totals.dense_bytes,
            }
        )
    else:
        write_fields(
            [
                ("version", manifest.version),
                ("step", manifest.step),
                ("folder", f"{into.resolve()}, {size(manifest.totals.dense_bytes)}"),
            ]
        )


def _follow(
    root: str,
    into: Path,
    store: StoreOptions,
    settings: SubscriberSettings,
    given: dict[str, Any],
    *,
    as_json: bool,
) -> int:
    from weightcast.subscriber import CheckpointFolder, Subscriber

    from .sidecar_subscribe import run_subscribe

    def applied(position: Position) -> None:
        if as_json:
            write_applied(position, into, as_json=True)
            sys.stdout.flush()

    subscriber = Subscriber(root, CheckpointFolder(into), settings, store=store.open(root))
    return run_subscribe(subscriber, applied, http=given["http"], json_logs=given["json_logs"])
