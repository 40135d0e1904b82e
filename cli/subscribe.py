"""`weightcast subscribe`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write_fields, write_json
from .targets import ENGINES, PAUSES, Chosen, paused_s
from .text import size

if TYPE_CHECKING:
    from weightcast.manifest.chain import Position
    from weightcast.schemas.settings import SubscriberSettings
    from weightcast.subscriber import Target

_FOLDER = click.Path(path_type=Path)


@click.command("subscribe")
@root_argument
@click.option("--into", type=_FOLDER, metavar="DIR", help="Checkpoint folder to keep at the newest version.")
@click.option(
    "--engine", type=click.Choice(list(ENGINES)), help="Keep the weights of a server of this kind there."
)
@click.option("--url", metavar="URL", help="The engine's server, on this host.")
@click.option(
    "--mirror", type=_FOLDER, metavar="DIR", help="Keep a checkpoint folder beside the engine, too."
)
@click.option("--pause", type=click.Choice(PAUSES), help="What happens to the engine's requests in flight.")
@click.option(
    "--verify-every",
    type=click.IntRange(min=0),
    metavar="K",
    help="Versions between two full proofs of the engine's weights.",
)
@click.option("--once", is_flag=True, help="Go to the newest version and stop.")
@click.option(
    "--cut-through",
    is_flag=True,
    help="Fetch and decode shards before their version is committed; costs listings.",
)
@click.option("--poll", type=float, metavar="S", help="Seconds between two polls, at most.")
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
def command(root: str, once: bool, as_json: bool, store: StoreOptions, **given: Any) -> int:
    """Keep a checkpoint folder, or the live weights of an engine, at the newest version, until stopped.

    They are patched in place; whoever loads the folder, or asks the engine, gets whole versions. With --json
    each version that is applied is a JSON document in a line.
    """
    if once and given["http"]:
        raise click.UsageError("--http does not go with --once")
    from weightcast.schemas.settings import SubscriberSettings, load

    flags = {
        "poll_s": given["poll"],
        "max_lag": given["max_lag"],
        "cut_through": given["cut_through"] or None,
        "lease": False if given["no_lease"] else None,
        "pause": given["pause"],
        "verify_every": given["verify_every"],
    }
    chosen = Chosen(given["into"], given["engine"], given["url"], given["mirror"])
    settings = load(SubscriberSettings, flags, given["config"])
    target = chosen.open(settings)
    if once:
        _once(root, chosen, target, store, settings, as_json=as_json)
        return 0
    return _follow(root, chosen, target, store, settings, given, as_json=as_json)


def _once(
    root: str,
    chosen: Chosen,
    target: Target,
    store: StoreOptions,
    settings: SubscriberSettings,
    *,
    as_json: bool,
) -> None:
    from weightcast.subscriber import Subscriber

    with Subscriber(root, target, settings, store=store.open(root)) as subscriber:
        write_applied(subscriber.once(), chosen, target, as_json=as_json)


def write_applied(position: Position, chosen: Chosen, target: Target, *, as_json: bool) -> None:
    """Say which version a target holds now."""
    manifest = position.manifest
    paused = paused_s(target)
    if as_json:
        write_json(
            {
                "version": manifest.version,
                "step": manifest.step,
                **chosen.told(),
                "paused_s": paused,
                "digest": manifest.digest_after,
                "dense_bytes": manifest.totals.dense_bytes,
            }
        )
    else:
        write_fields(
            [
                ("version", manifest.version),
                ("step", manifest.step),
                *chosen.told().items(),
                ("paused", None if paused is None else f"{paused:.3f} s"),
                ("size", size(manifest.totals.dense_bytes)),
            ]
        )


def _follow(
    root: str,
    chosen: Chosen,
    target: Target,
    store: StoreOptions,
    settings: SubscriberSettings,
    given: dict[str, Any],
    *,
    as_json: bool,
) -> int:
    from weightcast.subscriber import Subscriber

    from .sidecar_subscribe import run_subscribe

    def applied(position: Position) -> None:
        if as_json:
            write_applied(position, chosen, target, as_json=True)
            sys.stdout.flush()

    subscriber = Subscriber(root, target, settings, store=store.open(root))
    return run_subscribe(subscriber, applied, http=given["http"], json_logs=given["json_logs"])
