"""When a detector is asked, when the baseline lets go of its bits, and what happens where a detector cannot tell.

A publisher begins with a whole baseline, from a first version, a reset or the store. Once the detector has looked at
the tensors of the committed version, the baseline's bits are let go. Whatever the detector says is proved by digest
before a version is committed; where it cannot tell, or the proof fails, the version becomes a whole one, and for some
versions the baseline keeps its bits: the more often that happened, the longer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Final

import torch

from weightcast.codec import Geometry
from weightcast.manifest.store import Store
from weightcast.publisher.baseline import Baseline
from weightcast.publisher.job import Job
from weightcast.publisher.sources import Item
from weightcast.schemas.errors import UsageError
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.settings import PublisherSettings

from .adamw import AdamW
from .bare import Bare
from .cast import Cast
from .detector import Attempt, Detector, Named

log = logging.getLogger(__name__)

LONGEST_PAUSE: Final = 1024  # versions for which bits are kept after a detector failed for the tenth time


class Detection:
    """One publisher's detector, and how far it is trusted.

    Attributes:
        detector: what finds changes.
        fallbacks: versions that became whole ones since the detector could not tell.
        reason: why the last one did; or why the detector cannot be used.
    """

    def __init__(self, detector: Detector, settings: PublisherSettings, store: Store, pool: Executor) -> None:
        self.detector = detector
        self.fallbacks = 0
        self.reason = ""
        self._row_elements = settings.row_elements
        self._store = store
        self._pool = pool
        self._pause = 0

    @classmethod
    def of(cls, settings: PublisherSettings, store: Store, pool: Executor) -> Detection | None:
        """What the settings ask for; None for `snapshot`.

        Raises:
            UsageError: a copy is to be kept in a file, too.
        """
        if settings.detector == "snapshot":
            return None
        if settings.baseline is not None:
            raise UsageError(
                f"detector {settings.detector} keeps no copy of the last version, and so none in {settings.baseline}",
                hint="leave out one of the settings detector and baseline",
            )
        detector = AdamW() if settings.detector == "adamw" else Cast(pool)
        return cls(detector, settings, store, pool)

    def watch(self, optimizer: torch.optim.Optimizer | None, tensors: Named) -> None:
        """See `Detector.watch`."""
        self.detector.watch(optimizer, tensors)
        if self.detector.refused:
            self.reason = self.detector.refused
            log.warning("detector %s keeps a copy after all: %s", self.detector.kind, self.reason)

    def thinned(self, baseline: Baseline, rereadable: bool) -> Baseline:
        """The baseline without its bits, if the detector leads back to it; call while nothing is on its way.

        `rereadable`: whether the tensors can be read once more, should the detector be wrong.
        """
        if is_bare(baseline) or not rereadable or self._fault(baseline):
            return baseline
        if self._pause > 0:
            self._pause -= 1
            return baseline
        return Bare(baseline.state, self._store, self._pool)

    def olds(self, baseline: Baseline, rereadable: bool) -> tuple[Attempt | None, str]:
        """Where the old bits come from (None: from the baseline itself), or why they cannot be told."""
        if not is_bare(baseline):
            return None, ""
        fault = self._fault(baseline)
        if not fault and not rereadable:
            fault = "the tensors came as an iterable, which can be read only once"
        return (None, fault) if fault else (self.detector.begin(baseline.geometry), "")

    def _fault(self, baseline: Baseline) -> str:
        detector, digest = self.detector, baseline.position.digest
        fault = detector.refused or detector.tells(digest)
        if not fault and not detector.copies.take(digest, baseline.layout.stored):
            fault = "there are tensors that were not seen before"
        return fault

    def following(self, found: Iterable[Item]) -> Iterator[Item]:
        """Items on their way to a capture."""
        return self.detector.copies.following(found)

    def captured(self, job: Job, olds: Attempt | None) -> None:
        """Take the captured tensors for what the next changes are told from, once they are committed."""
        detector, capture = self.detector, job.capture
        if olds is None and not detector.refused:
            detector.look(capture.geometry or Geometry(capture.layout), self._row_elements, self._pool)
        detector.copies.settle(capture.after)
        detector.settle(capture.after)

        def committed(future: Future[VersionManifest]) -> None:
            if future.exception() is None:
                detector.committed(capture.after)

        job.futures[0].add_done_callback(committed)

    def fall_back(self, reason: str) -> None:
        """Note that a version becomes a whole one."""
        self.fallbacks += 1
        self.reason = reason
        self._pause = min(2**self.fallbacks, LONGEST_PAUSE)
        log.warning(
            "detector %s: the version is published whole: %s", self.detector.kind, reason,
            extra={"fallbacks": self.fallbacks},
        )  # fmt: skip

    def close(self) -> None:
        """Watch no more."""
        self.detector.close()


def is_bare(baseline: Baseline) -> bool:
    """Whether it has no bits now."""
    return isinstance(baseline, Bare) and not baseline.holds_bits
