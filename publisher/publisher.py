"""`Publisher`: what a trainer calls."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any, SupportsIndex

import torch

from weightcast.codec.threads import Workers
from weightcast.manifest.chain import Position
from weightcast.manifest.commit import Writer, create_stream
from weightcast.manifest.store import Store, open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import (
    Conflict,
    NotFound,
    WeightcastError,
)
from weightcast.schemas.settings import PublisherSettings

from .audience import Audience
from .baseline import Baseline
from .closing import OneProcess
from .detectors.detection import Detection
from .detectors.detector import Detector, Named
from .job import PendingVersion
from .label import Label
from .pipeline import Pipeline
from .resume import FENCE_TRIES, Keeper, load_baseline, newest_snapshot
from .rounds import Rounds, Source
from .sources import Casts, Item, Tensors, items
from .upload import Uploader


class Publisher(Audience, OneProcess):
    """Publishes a policy's weights to one stream. Close it, or use it as a context manager.

    Opening an existing stream proves the head's state (from the kept baseline or the store) and commits an empty
    version of this run, so that a predecessor that was only slow can commit nothing more.

    Args:
        root: URL or path of the stream; made with the first version if nothing is there.
        settings: how to work; from the environment and defaults if not given.
        store: an opened store, instead of `root`'s.
        fence: whether to commit that empty version. A one-shot publisher needs none.

    Raises:
        Conflict: another publisher is committing to the stream right now.
        Gap, Corrupt, Untrusted: the stream cannot be continued; `publish(..., reset=True)` of a publisher opened
            with `resume=False` starts it afresh.
        StorageError: the store failed.
    """

    def __init__(
        self,
        root: str,
        settings: PublisherSettings | None = None,
        *,
        store: Store | None = None,
        fence: bool = True,
        resume: bool = True,
    ) -> None:
        self.settings = settings or PublisherSettings()
        self._store = store or open_store(root)
        self._casts = Casts(self.settings.cast)
        self._compute = Workers(self.settings.threads, "weightcast-encode")
        self._transfer = Workers(8, "weightcast-upload")
        self._writer = Writer.fresh(self.settings.writer)
        self._keeper = Keeper(self.settings.baseline)
        self.detection = Detection.of(self.settings, self._store, self._compute)
        self._publishing = threading.Lock()
        self._pipeline: Pipeline | None = None
        self._rounds = Rounds(self.settings, self._compute, self.detection)
        OneProcess.__init__(self)
        try:
            self._open(resume, fence)
        except BaseException:
            self._stop()
            raise

    def _open(self, resume: bool, fence: bool) -> None:
        try:
            reader = StreamReader.open(self._store)
        except NotFound:
            return
        if resume:
            self._resume(reader, fence)
        else:
            head = reader.head()
            self._start(reader, parent=reader.position(head) if head is not None else None)

    def _resume(self, reader: StreamReader, fence: bool) -> None:
        """Go on from the head; and again from a newer one, if a predecessor was just committing that."""
        for attempt in range(FENCE_TRIES):
            head = reader.head()
            if head is None:
                return
            state = load_baseline(reader, head, self._compute, self._keeper)
            pipeline = self._start(reader, baseline=Baseline(state))
            pipeline.snapshots.resume(*newest_snapshot(reader, head, self._compute))
            try:
                if fence:
                    pipeline.fence(Label(metadata={"fence": True}))
                return
            except Conflict:
                pipeline.close(None)
                if attempt == FENCE_TRIES - 1:
                    raise

    @property
    def version(self) -> int | None:
        """The last committed version that this publisher knows of."""
        baseline = self._pipeline.baseline if self._pipeline else None
        return baseline.position.version if baseline else None

    @property
    def broken(self) -> WeightcastError | None:
        """Why this publisher can publish nothing more, if so; open another, or stop if it is a Conflict."""
        return self._pipeline.dead if self._pipeline else None

    def publish(
        self,
        tensors: Tensors,
        *,
        step: SupportsIndex | None = None,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        drop: Collection[str] = (),
        reset: bool = False,
    ) -> PendingVersion:
        """Publish these tensors as the next version.

        Returns as soon as they have been compared, or copied for a first version: from then on the trainer may change
        them. The rest happens in the background. At most one version is in flight and one waits; a newer one
        replaces the one that waits.

        Args:
            tensors: all tensors of the model, as a mapping (`model.state_dict()`) or (name, tensor) pairs.
            step: the trainer's step, kept beside the version.
            metadata: JSON values, for people and frameworks; at most 64 KiB.
            files: companion files by name (config, tokenizer); None: as in the version before.
            drop: names that the version before has and this one no longer has.
            reset: start afresh from a snapshot, whatever the stream held.

        Raises:
            UsageError: the tensors do not cover the last version, or cannot be published; nothing was.
            Corrupt: the tensors changed while they were compared; nothing was published.
            WeightcastError: an earlier version failed in the background and no later one made up for it; once, and
                this one was not published.
        """
        label = Label.of(step, metadata, files)
        baseline = self._pipeline.baseline if self._pipeline else None
        known = baseline.layout.stored_by_name if baseline else {}

        def again() -> Iterable[Item]:
            return items(tensors, self._casts, known)

        return self._publish(
            Source(again(), again if isinstance(tensors, Mapping) else None), label, drop, reset
        )

    def publish_items(
        self, found: Iterable[Item], label: Label, *, drop: Collection[str] = (), reset: bool = False
    ) -> PendingVersion:
        """`publish` for tensors that are bits already, such as those of a checkpoint folder."""
        return self._publish(Source(found), label, drop, reset)

    @property
    def detector(self) -> Detector | None:
        """What finds changes without a copy; None with the default settings, which keep one."""
        return self.detection.detector if self.detection is not None else None

    def watch(self, optimizer: torch.optim.Optimizer | None, tensors: Named) -> None:
        """Have the detector watch `tensors`, which `optimizer` steps: see `Detector.watch`. Nothing without a detector.

        Call it before the first step, and before another hook of the optimizer that publishes is registered.

        Raises:
            UsageError: there is nothing to watch.
        """
        if self.detection is not None:
            self.detection.watch(optimizer, tensors)

    def _publish(self, source: Source, label: Label, drop: Collection[str], reset: bool) -> PendingVersion:
        self._check_usable()
        with self._publishing:
            pipeline = self._pipeline
            if pipeline is None:
                reader = create_stream(self._store, single_writer=self.settings.single_writer)
                pipeline = self._start(reader)
            return self._rounds.publish(pipeline, source, label, drop, reset)

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until everything published is settled; False if time ran out."""
        return self._pipeline is None or self._pipeline.wait_idle(timeout)

    def snapshot(self) -> None:
        """Write a snapshot of the last committed version now, beside the chain, and wait for it."""
        self._check_usable()
        with (
            self._publishing
        ):  # so that nothing is committed, and no other snapshot begun, before this one has begun
            if self._pipeline is not None:
                self._pipeline.wait_idle()
            if self._pipeline is None or self._pipeline.baseline is None:
                raise NotFound("nothing was published yet, so there is nothing to take a snapshot of")
            self._pipeline.check_alive()
            snapshots, baseline = self._pipeline.snapshots, self._pipeline.baseline
            snapshots.join(None)
            snapshots.start(baseline.position, baseline)
        snapshots.join(None)

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is on its way, then stop.

        Raises:
            WeightcastError: a version was not committed and nobody was told yet, or time ran out.
        """
        self._closed = True
        if self._is_copy:
            return
        try:
            if self._pipeline is not None:
                self._pipeline.close(timeout)
        finally:
            self._stop()

    def _stop(self) -> None:
        if self.detection is not None:
            self.detection.close()
        if self._pipeline is not None:
            self._pipeline.stop()
        self._compute.shutdown(wait=False)
        self._transfer.shutdown(wait=False)

    def _start(
        self, reader: StreamReader, *, baseline: Baseline | None = None, parent: Position | None = None
    ) -> Pipeline:
        uploader = Uploader(reader, self._writer, self.settings, self._transfer)
        self._pipeline = Pipeline(uploader, baseline, self.settings, self._compute, self._keeper, parent)
        return self._pipeline
