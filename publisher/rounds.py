"""One call of `publish`: from what the trainer hands over to a job on its way. A publisher makes one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import Layout
from weightcast.schemas.settings import PublisherSettings

from .baseline import Baseline
from .capture import Capture, DeltaCapture, capture_fresh
from .detectors.detection import Detection
from .job import Job, PendingVersion
from .label import Label
from .olds import Olds
from .pipeline import Pipeline
from .sources import Item


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be published: its items, and what gives the same items once more, if anything does."""

    found: Iterable[Item]
    again: Callable[[], Iterable[Item]] | None = None


class Rounds:
    """Captures and queues versions, told from the baseline, by a detector, or from nothing."""

    def __init__(self, settings: PublisherSettings, pool: Executor, detection: Detection | None) -> None:
        self._settings = settings
        self._pool = pool
        self._detection = detection
        self._dropped: set[str] = set()  # names that a version which is not committed no longer has

    def publish(
        self, pipeline: Pipeline, source: Source, label: Label, drop: Collection[str], reset: bool
    ) -> PendingVersion:
        """See `Publisher.publish`."""
        if pipeline.baseline is None or reset or self._detection is not None:
            # A delta can only be told from a state that is committed, so a first version is waited for; and so is
            # each one without a copy, on which no later one can be put.
            pipeline.wait_idle()
        pipeline.check()
        if pipeline.baseline is None or reset:
            return self._whole(pipeline, source.found, label)
        if self._detection is not None:
            return self._detected(self._detection, pipeline, pipeline.baseline, source, label, drop)
        return self._delta(pipeline, pipeline.baseline, Job(Capture(label)), source.found, drop)

    def _whole(
        self,
        pipeline: Pipeline,
        found: Iterable[Item],
        label: Label,
        before: Layout | None = None,
        drop: Collection[str] = (),
    ) -> PendingVersion:
        """Publish a whole version. One that nobody asked for must cover the layout `before`, but for `drop`."""
        detection = self._detection
        found = detection.following(found) if detection else found
        job = Job(capture_fresh(found, label, self._pool, before=before, drop=drop))
        if detection is not None:
            detection.captured(job, None)
        last, layout = pipeline.baseline, job.capture.layout
        self._dropped = {s.name for s in last.layout if s.name not in layout} if last is not None else set()
        pipeline.queue(job)
        return PendingVersion(job.futures[0], pipeline.told)

    def _detected(
        self,
        detection: Detection,
        pipeline: Pipeline,
        baseline: Baseline,
        source: Source,
        label: Label,
        drop: Collection[str],
    ) -> PendingVersion:
        """Publish what the detector finds; or all, where it cannot tell. Nothing is on its way."""
        found, again = source.found, source.again
        pipeline.baseline = baseline = detection.thinned(baseline, again is not None)
        olds, reason = detection.olds(baseline, again is not None)
        if not reason:
            job = Job(Capture(label))
            try:
                pending = self._delta(pipeline, baseline, job, detection.following(found), drop, olds)
            except (Corrupt, UsageError) as error:
                relaid = job.capture.relaid  # tensors are new or gone, which only a copy could tell from
                if olds is None or again is None or not (isinstance(error, Corrupt) or relaid):
                    raise
                found, reason = again(), error.message
            else:
                detection.captured(job, olds)
                return pending
        detection.fall_back(reason)
        return self._whole(pipeline, found, label, baseline.layout, self._dropped.union(drop))

    def _delta(
        self,
        pipeline: Pipeline,
        baseline: Baseline,
        job: Job,
        found: Iterable[Item],
        drop: Collection[str],
        olds: Olds | None = None,
    ) -> PendingVersion:
        """Publish what changed; `olds` has the bits from before, or else the baseline."""
        drop = self._dropped.union(drop)
        if drop or baseline.position.manifest.totals.bytes > self._settings.max_pending_bytes // 2:
            pipeline.wait_idle()
            pipeline.check()
        future = job.futures[0]
        baseline.gate.hold()
        try:
            active = pipeline.offer(job)
            DeltaCapture(
                job.capture,
                baseline.state,
                self._pool,
                row_elements=self._settings.row_elements,
                level=self._settings.level,
                codec=pipeline.codec,
                olds=olds,
            ).run(found, drop)
            layout = job.capture.layout
            self._dropped = {name for name in drop if name in baseline.layout and name not in layout}
            if not active:
                pipeline.queue(job)
        except BaseException:
            job.capture.rows.finish(failed=True)  # or the pipeline would wait for its rows
            raise
        finally:
            job.capture.rows.when_coded(baseline.gate.let_go)  # rows are told from bits that hold still
        return PendingVersion(future, pipeline.told)
