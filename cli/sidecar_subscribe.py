"""The subscriber's sidecar: follows a stream with a checkpoint folder or an engine, and says how that goes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from weightcast.schemas.errors import WeightcastError

from .sidecar_http import Health, serving
from .sidecar_log import configure_logging
from .sidecar_signals import Stop, stop_on_signals
from .targets import paused_s

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from weightcast.manifest.chain import Position
    from weightcast.schemas.engine import InstallReport, VerifyReport
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
            why = status.error or "what it keeps at a version is being proved or changed"
            own = [] if status.ready else [f"at version {status.version}, {status.lag} behind. {why}"]
        return super().reasons + own


class SubscriberMetrics:
    """In base units, under `weightcast_subscriber_`; NaN where nothing is known."""

    def __init__(self, registry: CollectorRegistry, subscriber: Subscriber) -> None:
        from prometheus_client import Counter, Gauge, Histogram

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
            "1 if a version is applied, the target is whole, and the lag is within max_lag",
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

        buckets = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
        self._pause = Histogram(
            "weightcast_subscriber_engine_pause_seconds",
            "Pauses of the engine, from the request until generation goes on",
            buckets=buckets,
            registry=registry,
        )
        self._write = Histogram(
            "weightcast_subscriber_engine_write_seconds",
            "Of a pause, what writing and confirming took",
            buckets=buckets,
            registry=registry,
        )
        self._proofs = Counter(
            "weightcast_subscriber_engine_proofs_total",
            "Full proofs of the engine's weights",
            ["outcome"],
            registry=registry,
        )

    def observe(self, report: InstallReport | VerifyReport) -> None:
        """Note what an engine did."""
        from weightcast.schemas.engine import InstallReport

        if isinstance(report, InstallReport):
            self._pause.observe(report.paused_s)
            self._write.observe(report.write_s)
        else:
            self._proofs.labels("good" if report.good else "bad").inc()

    def take(self, position: Position, paused_s: float | None = None) -> None:
        """Note an apply, and for how long it paused an engine, unless `observe` is told."""
        if paused_s is not None:
            self._pause.observe(paused_s)
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

    from weightcast.subscriber import VllmServer

    configure_logging(json=json_logs)
    stop = stop_on_signals() if stop is None else stop
    registry, health = CollectorRegistry(), SubscriberHealth(subscriber)
    metrics = SubscriberMetrics(registry, subscriber)
    target = subscriber.target
    observed = isinstance(target, VllmServer)
    if isinstance(target, VllmServer):
        target.observe(metrics.observe)
    with serving(http, health, registry), subscriber:
        try:
            for position in subscriber.follow(stop):
                metrics.take(position, None if observed else paused_s(target))
                applied(position)
        except WeightcastError as error:
            health.die(str(error))
            raise
    return stop.exit_code if isinstance(stop, Stop) else 0
