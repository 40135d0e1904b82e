"""The publisher sidecar's figures for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from weightcast.publisher.watch import Outcome


class PublisherMetrics:
    """In base units, under `weightcast_publisher_`. Gauges are NaN until there was a commit."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def named(name: str) -> str:
            return f"weightcast_publisher_{name}"

        unknown = float("nan")
        self.version = Gauge(named("version"), "Last committed version", registry=registry)
        self.step = Gauge(named("step"), "Trainer step of the last committed version", registry=registry)
        self.committed_at = Gauge(
            named("last_commit_timestamp_seconds"), "Time of the last commit, Unix", registry=registry
        )
        for gauge in (self.version, self.step, self.committed_at):
            gauge.set(unknown)
        self.published = Counter(named("published_total"), "Committed versions", registry=registry)
        self.wire_bytes = Counter(
            named("wire_bytes_total"),
            "Bytes of committed shards; of all tensors for a reset",
            registry=registry,
        )
        self.changed = Counter(named("changed_elements_total"), "Elements that changed", registry=registry)
        self.failures = Counter(
            named("failures_total"), "Checkpoints and looks that failed", ["kind"], registry=registry
        )
        self.seconds = Histogram(
            named("publish_seconds"),
            "From the first byte of a checkpoint to its commit",
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500),
            registry=registry,
        )

    def take(self, outcome: Outcome) -> None:
        """Count what a step of the watcher did."""
        for error in outcome.failures:
            self.failures.labels(error.kind).inc()
        manifest = outcome.published
        if manifest is None:
            return
        totals = manifest.totals
        self.published.inc()
        self.version.set(manifest.version)
        self.step.set(float("nan") if manifest.step is None else manifest.step)
        self.committed_at.set_to_current_time()
        self.wire_bytes.inc(totals.dense_bytes if manifest.reset else totals.bytes)
        self.changed.inc(totals.elements if manifest.reset else totals.changed)
        self.seconds.observe(outcome.seconds)
