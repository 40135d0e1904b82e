"""The subscriber's sidecar: follows a stream with a checkpoint folder, and says how that goes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from weightcast.schemas.errors import WeightcastError

from .sidecar_http import Health, serving
from .sidecar_log import configure_logging
from .sidecar_signals import Stop, stop_on_signals

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from weightcast.manifest.chain import Position
    from weightcast.subscriber import Subscriber

log = logging.getLogger(__name__)


class SubscriberHealth(Health):
    """Ready is what the subscriber says at the moment of the question."""

    def __init__(self, subscriber: Subscriber) -> None:
        super().__init__()
        self._subscriber = subscriber
        self.started()

    @property
    def reasons(self) -> list[str]:
        """Why it is not ready."""
        status = self._subscriber.status()
        if status.version is None:
            own = [f"no version applied yet{': ' if status.error else ''}{status.error}"]
        else:
            own = (
                [] if status.ready else [f"at version {status.version}, {status.lag} behind. {status.error}"]
            )
        return super().reasons + own


class SubscriberMetrics:
    """In base units, under `weightcast_subscriber_`; NaN where nothing is known."""

    def __init__(self, registry: CollectorRegistry, subscriber: Subscriber) -> None:
        from prometheus_client import Counter, Gauge

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"weightcast_subscriber_{name}", text, registry=registry).set_function(value)

        def number(value: int | None) -> float:
            return float("nan") if value is None else value

        gauge("version", "Version applied", lambda: number(subscriber.status().version))
        gauge("head_version", "Newest version seen", lambda: number(subscriber.status().head))
        gauge("lag_versions", "Versions that are seen and not applied", lambda: subscriber.status().lag)
        gauge(
            "behind_seconds",
            "Since a version was seen that is not applied",
            lambda: subscriber.status().behind_s,
        )
        gauge(
            "store_answer_age_seconds", "Since the store last answered", lambda: subscriber.status().checked_s
        )
        gauge(
            "ready",
            "1 if a version is applied and the lag is within max_lag",
            lambda: subscriber.status().ready,
        )
        self._step = Gauge(
            "weightcast_subscriber_step", "Trainer step of the version applied", registry=registry
        )
        self._applied_at = Gauge(
            "weightcast_subscriber_last_apply_timestamp_seconds",
            "Time of the last apply, Unix",
            registry=registry,
        )
        self._step.set(float("nan"))
        self._applied_at.set(float("nan"))
        self._applied = Counter(
            "weightcast_subscriber_applied_total",
            "Applies; versions in a row may go together",
            registry=registry,
        )

    def take(self, position: Position) -> None:
        """Note an apply."""
        step = position.manifest.step
        self._step.set(float("nan") if step is None else step)
        self._applied_at.set_to_current_time()
        self._applied.inc()


def run_subscribe(
    subscriber: Subscriber,
    applied: Callable[[Position], None],
    *,
    http: str | None = None,
    json_logs: bool = False,
    stop: threading.Event | None = None,
) -> int:
    """Follow until `stop` is set, by default by SIGTERM or SIGINT.

    Args:
        subscriber: what follows; closed at the end.
        applied: told each version that was applied.
        http: HOST:PORT for health and metrics.
        json_logs: log in JSON.
        stop: ends it.

    Returns:
        The exit code: 0 when stopped as asked, 130 by Ctrl-C.

    Raises:
        WeightcastError: something that trying again does not help.
    """
    from prometheus_client import CollectorRegistry

    configure_logging(json=json_logs)
    stop = stop_on_signals() if stop is None else stop
    registry, health = CollectorRegistry(), SubscriberHealth(subscriber)
    metrics = SubscriberMetrics(registry, subscriber)
    with serving(http, health, registry), subscriber:
        try:
            for position in subscriber.follow(stop):
                metrics.take(position)
                applied(position)
        except WeightcastError as error:
            health.die(str(error))
            raise
    return stop.exit_code if isinstance(stop, Stop) else 0
