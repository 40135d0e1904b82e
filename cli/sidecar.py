"""The publisher's sidecar, and what it shares with the subscriber's: logging, health, HTTP, signals.

Nothing here is global but what a process has once: its signal handlers and its loggers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weightcast.schemas.errors import StorageError, WeightcastError

from .sidecar_http import Health, HttpServer, parse_address, serve_http, serving
from .sidecar_log import JsonFormatter, configure_logging
from .sidecar_metrics import PublisherMetrics
from .sidecar_signals import Stop, end, stop_on_signals

if TYPE_CHECKING:
    from weightcast.manifest.store import Store
    from weightcast.publisher import Publisher
    from weightcast.publisher.watch import Outcome, WatchSettings
    from weightcast.schemas.settings import PublisherSettings

__all__ = [
    "Health",
    "HttpServer",
    "JsonFormatter",
    "PublisherMetrics",
    "Stop",
    "configure_logging",
    "end",
    "parse_address",
    "run_watch",
    "serve_http",
    "serving",
    "stop_on_signals",
]

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0


def run_watch(
    root: str,
    folder: Path,
    settings: PublisherSettings | None = None,
    watch: WatchSettings | None = None,
    *,
    store: Store | None = None,
    http: str | None = None,
    json_logs: bool = False,
    stop: threading.Event | None = None,
) -> int:
    """Publish what appears in `folder` until `stop` is set, by default by SIGTERM or SIGINT.

    Args:
        root: URL or path of the stream.
        folder: the folder that the trainer writes checkpoints into.
        settings: the publisher's.
        watch: the watcher's.
        store: an opened store, instead of `root`'s.
        http: HOST:PORT for health and metrics.
        json_logs: log in JSON.

    Returns:
        0 once `stop` is set. If a signal did that, the process ends instead: with 0, or 130 after Ctrl-C.

    Raises:
        Conflict: another publisher has taken over the stream.
        WeightcastError: something that trying again does not help.
    """
    from prometheus_client import CollectorRegistry

    from weightcast.publisher.watch import Watcher

    configure_logging(json=json_logs)
    stop = stop_on_signals() if stop is None else stop
    health, registry = Health(), CollectorRegistry()
    metrics = PublisherMetrics(registry)

    def report(outcome: Outcome) -> None:
        metrics.take(outcome)
        if outcome.published is not None:
            health.obstacle("store", None)
        elif outcome.retrying and outcome.failures:
            health.obstacle("store", str(outcome.failures[-1]))

    with serving(http, health, registry):
        publisher = _open_publisher(root, settings, store, stop, health)
        if publisher is not None:
            if publisher.version is not None:
                metrics.version.set(publisher.version)
            _watch_until(stop, publisher, Watcher(folder, publisher, watch).run, report, health)
    return end(stop)


def _open_publisher(
    root: str, settings: PublisherSettings | None, store: Store | None, stop: threading.Event, health: Health
) -> Publisher | None:
    """Open the stream, again and again while the store is down; None if stopped before."""
    from weightcast.manifest.store import open_store
    from weightcast.publisher import Publisher

    store = store or open_store(root)
    pause_s = FIRST_PAUSE_S
    while not stop.is_set():
        try:
            publisher = Publisher(root, settings, store=store)
        except StorageError as error:
            health.obstacle("store", str(error))
            log.warning("cannot open %s, will try again in %.0f s: %s", store.url, pause_s, error)
            stop.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        else:
            health.obstacle("store", None)
            health.started()
            return publisher
    return None


def _watch_until(
    stop: threading.Event,
    publisher: Publisher,
    run: Callable[[threading.Event, Callable[[Outcome], None]], None],
    report: Callable[[Outcome], None],
    health: Health,
) -> None:
    """Run the watch, then finish what is in flight."""
    try:
        run(stop, report)
    except WeightcastError as error:
        health.die(str(error))
        with suppress(WeightcastError):  # says the same once more
            publisher.close()
        raise
    try:
        publisher.close()
    except WeightcastError as error:
        log.warning("stopped with a version not committed: %s", error)
