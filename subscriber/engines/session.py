"""One subscriber's dealings with one engine: what it holds, the plan, reads, proofs; changes by `Installs`."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from weightcast.codec import Changes
from weightcast.schemas.digest import Digest
from weightcast.schemas.engine import (
    AdoptRequest,
    AttachReport,
    AttachRequest,
    Held,
    InstallReport,
    InstallRequest,
    LoadRequest,
    PauseMode,
    Pulse,
    RankRow,
    ReadRequest,
    ServerState,
    VerifyReport,
    VerifyRequest,
)
from weightcast.schemas.errors import (
    Corrupt,
    StorageError,
    UsageError,
)
from weightcast.schemas.layout import Layout

from ..journal import Journal
from ..target import Mark
from .client import EngineClient, taken_over
from .installs import Installs
from .staging import Positions, Staging, map_values

log = logging.getLogger(__name__)

LOOK_S: Final = 10.0
"""Seconds between two questions to all ranks while nothing happens: another subscriber may have taken them over."""
_SHOWN: Final = 5  # tensors that an error names

Observer = Callable[[InstallReport | VerifyReport], None]


@dataclass
class _Plan:
    """What the ranks recorded for this session."""

    layout: str  # SHA-256
    processes: frozenset[str]
    report: AttachReport
    fresh: bool = True  # the report's digest has not been used: it is of the bits as they are


class Session:
    """Drives the engine that `client` speaks to, from its first `plan` on. One thread, under `staging.exclusive()`.

    Args:
        client: the engine's server.
        staging: files that the server sees.
        pause: what happens to requests in flight during an install.
        verify_every: versions between two full proofs of the live bits; 0: never.
        mirror: checkpoint folder for modules that are reloaded whole; None: tensors of such are refused.
    """

    def __init__(
        self,
        client: EngineClient,
        staging: Staging,
        *,
        pause: PauseMode,
        verify_every: int,
        mirror: Path | None,
    ) -> None:
        self._client = client
        self._staging = staging
        self._pause: PauseMode = pause
        self._verify_every = verify_every
        self._mirror_path = None if mirror is None else str(mirror)
        self._installs = Installs(client, staging)
        self._id = uuid.uuid4().hex
        self._plan: _Plan | None = None
        self._state: ServerState | None = None
        self._slept = False
        self._suspect = False  # the live bits may not be what the ranks say
        self._known: set[str] = set()  # API server processes that answered since the plan was made
        self._looked = -LOOK_S  # when all ranks were last asked
        self._verified: int | None = None  # version up to which the live bits were proved in full
        self.observer: Observer | None = None

    @property
    def held(self) -> Held | None:
        """The version that all ranks said they hold when they were last asked; None if that is in doubt."""
        return None if self._state is None or self._suspect else self._state.held

    def look(self) -> None:
        """Ask the engine what it holds, and finish an install whose outcome is not known.

        While nothing can have happened, only its pulse is taken: workers that are asked are kept busy by it.

        Raises:
            StorageError: it cannot be reached, or sleeps.
            Conflict: another subscriber has taken it over.
            Corrupt: an install could not be finished; the engine stays paused.
        """
        pulse = self._client.pulse()
        if self._is_calm(pulse):
            return
        state = self._client.state()
        self._check_ours(state)
        self._state = state
        if state.sleeping:
            self._slept = True
            raise StorageError(
                f"the engine at {self._client.url} sleeps",
                hint="wake it up; its weights are then proved again",
            )
        if (report := self._installs.finish(state)) is not None:
            self._installed(report)
        if self._slept and self._plan is not None:
            self._suspect = not self.verify().good
        self._slept = False
        self._known.add(pulse.process)
        self._looked = time.monotonic()

    def _is_calm(self, pulse: Pulse) -> bool:
        """Whether the engine serves what it did when it was last asked, as far as that can change unseen."""
        return (
            pulse.process in self._known
            and not pulse.resting
            and not self._slept
            and self._plan is not None
            and self.held is not None
            and not self._installs.pending
            and time.monotonic() - self._looked < LOOK_S
        )

    def _check_ours(self, state: ServerState) -> None:
        """Notice a restart, and another subscriber."""
        if self._plan is None:
            return
        if _processes(state.ranks) != self._plan.processes or any(row.session is None for row in state.ranks):
            log.warning("the engine at %s was restarted, or lost its weights", self._client.url)
            self._plan, self._suspect = None, False
            self._known.clear()
        elif any(row.session != self._id for row in state.ranks):
            raise taken_over(self._client.url)

    def plan(self, layout: Layout) -> AttachReport:
        """Have the ranks record where the tensors of `layout` lie, unless they have.

        Raises:
            UsageError: they cannot hold it; names the first tensors and why. Nothing was written.
        """
        if self._plan is None or self._plan.layout != layout.sha256:
            request = AttachRequest(
                session=self._id,
                layout=str(self._staging.put_layout(layout)),
                layout_sha256=layout.sha256,
                dense=self._mirror_path is not None,
                mirror=self._mirror_path,
            )
            report = self._client.attach(request)
            self._plan = _Plan(layout.sha256, _processes(report.ranks), report)
            self._know(report.ranks)
        report = self._plan.report
        if report.refused:
            shown = ", ".join(f"{name!r} ({why})" for name, why in list(report.refused.items())[:_SHOWN])
            raise UsageError(
                f"the engine at {self._client.url} cannot hold {len(report.refused)} of {report.tensors} tensors: "
                f"{shown}",
                hint="nothing was written; docs/vllm.md says what an engine can hold, and when a mirror helps",
            )
        return report

    def digest(self, layout: Layout) -> Digest:
        """The digest of the live bits of all tensors that can be read, which are read for it.

        Raises:
            Corrupt: holders of the same bits disagree.
            UsageError: as `plan`.
        """
        report = self.plan(layout)
        plan = self._plan
        if plan is not None and plan.fresh:
            plan.fresh = False
            return Digest.from_hex(report.digest)
        found = self.verify()
        if found.held is not None and not found.good:
            raise Corrupt(
                f"the engine at {self._client.url} is not whole: {'; '.join(found.faults[:_SHOWN])}"
            )
        return Digest.from_hex(found.digest)

    def has(self, layout: Layout, held: Held) -> bool:
        """Whether the live bits are those of `held`, as far as they can be read."""
        try:
            return self.digest(layout).hex == held.digest
        except Corrupt:
            return False

    def verify(self) -> VerifyReport:
        """Have all live bits read and digested."""
        report = self._client.verify(VerifyRequest(session=self._id))
        if not report.good:
            log.error(
                "the engine at %s is not whole: %s", self._client.url, "; ".join(report.faults[:_SHOWN])
            )
        self._tell(report)
        return report

    def adopt(self, held: Held) -> None:
        """The live bits were proved to be `held`."""
        if self.held != held:
            self._state = self._client.adopt(AdoptRequest(session=self._id, held=held))
        self._suspect, self._verified = False, held.version
        self._installs.succeeded()

    def read(self, layout: Layout, positions: Positions) -> dict[str, Changes]:
        """The live bits at flat positions of `layout`, by dtype.

        Raises:
            Corrupt, StorageError: as `Reading`.
        """
        if not any(map(len, positions.values())):
            return {}
        self.plan(layout)
        counts = {dtype: len(found) for dtype, found in positions.items()}
        with self._staging.reading(positions) as (at, values):
            request = ReadRequest(
                session=self._id,
                layout_sha256=layout.sha256,
                counts=counts,
                positions=str(at),
                values=str(values),
            )
            self._client.read(request)
            found = map_values(values, counts, writable=False)
            return {dtype: Changes(dtype, positions[dtype], np.array(bits)) for dtype, bits in found.items()}

    def install(self, layout: Layout, changes: Mapping[str, Changes], base: Held, target: Held) -> None:
        """Bring the engine from `base` to `target` by absolute values; see `Installs`."""
        self.plan(layout)
        staged = self._staging.stage(Journal(Mark(target.stream, target.version, target.sha256), changes))
        request = InstallRequest(
            session=self._id,
            layout_sha256=layout.sha256,
            staged=str(staged),
            base=base,
            target=target,
            pause=self._pause,
            mirror=self._mirror_path,
        )
        with self._changing():
            self._installed(self._installs.install(request))
        self._verify_if_due(target)

    def load(self, layout: Layout, files: Sequence[Path], target: Held) -> None:
        """Bring the engine to `target` by whole tensors from safetensors files; see `Installs`."""
        self.plan(layout)
        request = LoadRequest(
            session=self._id,
            layout_sha256=layout.sha256,
            files=[str(path) for path in files],
            target=target,
            pause=self._pause,
        )
        with self._changing():
            self._installed(self._installs.load(request, self.held))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """While the engine is changed. If that fails, the plan may be what is not right any more."""
        try:
            yield
        except Corrupt:
            self._plan = None
            raise

    def _installed(self, report: InstallReport) -> None:
        self._know(report.ranks)
        self._suspect = False
        self._looked = -LOOK_S  # what the report says is seen for once
        self._tell(report)

    def _verify_if_due(self, held: Held) -> None:
        """Prove the live bits in full, if it is time to.

        Raises:
            Corrupt: they are not what they must be.
        """
        self._verified = held.version - 1 if self._verified is None else self._verified
        if not self._verify_every or held.version - self._verified < self._verify_every:
            return
        report = self.verify()
        if not report.good:
            self._suspect = True
            raise Corrupt(f"the engine is not at version {held.version}: {'; '.join(report.faults[:_SHOWN])}")
        self._verified = held.version

    def _know(self, ranks: Sequence[RankRow]) -> None:
        """Take over what an answer says about the ranks."""
        state = self._state or self._client.state()
        self._state = state.model_copy(update={"ranks": list(ranks), "paused": False})

    def _tell(self, report: InstallReport | VerifyReport) -> None:
        if self.observer is not None:
            self.observer(report)


def _processes(ranks: Sequence[RankRow]) -> frozenset[str]:
    return frozenset(row.process for row in ranks)
