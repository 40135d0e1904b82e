"""Target: the live weights of a vLLM server on this host, patched in place by the plugin inside it.

Without a mirror nothing of the model is kept here: old bits are read from the engine, and the mark is what its ranks
say. With one, a checkpoint folder is patched first and the engine after it; the folder is what deltas are decoded
against, and an engine that is elsewhere (it was restarted, it failed) is brought to the folder's version without the
store.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Final

from weightcast.codec import Changes, Geometry
from weightcast.manifest.chain import Position
from weightcast.schemas.digest import Digest
from weightcast.schemas.engine import Held, InstallReport, PauseMode, VerifyReport
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import Layout

from ..folder import CheckpointFolder
from ..target import Base, Mark, mark_of
from .client import EngineClient
from .session import Observer, Session
from .staging import Positions, Staging, make_private

log = logging.getLogger(__name__)

_CONFIG: Final = "config.json"


class VllmServer:
    """Keeps the weights of the server at `url` at a version.

    Args:
        url: `http://HOST:PORT`; on this host.
        token: the secret that both share; from `WEIGHTCAST_TOKEN` if not given.
        mirror: checkpoint folder to keep at the same version; see CheckpointFolder.
        pause: what happens to requests in flight: "keep": they freeze and go on under the new weights, "wait": they
            finish first, "abort": they end.
        verify_every: versions between two full proofs of the live bits; 0: never.
        stage: folder that the server sees, too; from `WEIGHTCAST_STAGE`, or a default, if not given.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        mirror: str | os.PathLike[str] | None = None,
        pause: PauseMode = "keep",
        verify_every: int = 100,
        stage: Path | None = None,
    ) -> None:
        client = EngineClient(url, token)
        self.name = f"vllm at {client.url}"
        self.engine = self.name
        self.replaceable = mirror is None
        self._mirror = None if mirror is None else CheckpointFolder(mirror)
        self._staging = Staging(client.url, stage)
        self._session = Session(
            client,
            self._staging,
            pause=pause,
            verify_every=verify_every,
            mirror=None if self._mirror is None else self._mirror.path,
        )
        self._session.observer = self._observe
        self._observer: Observer | None = None
        self._proved: tuple[Held, Layout] | None = None  # what the mirror was proved to hold
        self._last: InstallReport | None = None
        self._config: bytes | None = None
        self._swept = False
        self._downloads = Path(gettempdir()) / (
            f"weightcast-{os.getuid()}-{hashlib.sha256(client.url.encode()).hexdigest()[:16]}"
        )

    @property
    def paused_s(self) -> float | None:
        """Seconds that the engine was paused to come to the version it holds; None if it held that before."""
        return (
            self._last.paused_s if self._last is not None and self._last.held == self._session.held else None
        )

    def observe(self, observer: Observer) -> None:
        """Have `observer` told of each install, load and proof."""
        self._observer = observer

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """See Target: a lock on a file, for each URL; and the mirror's."""
        with ExitStack() as stack:
            stack.enter_context(self._staging.exclusive())
            if self._mirror is not None:
                stack.enter_context(self._mirror.exclusive())
            yield

    def recover(self) -> None:
        """See Target. An engine that is not at the version of a mirror that was proved is brought there."""
        if not self._swept:
            self._staging.sweep()
            self._swept = True
        if self._mirror is not None:
            self._mirror.recover()
        self._session.look()
        if self._mirror is not None and self._proved is not None:
            held, layout = self._proved
            if self._mirror.mark() == _mark(held):
                self._catch_up(self._mirror, held, layout)
            else:
                self._proved = None  # another subscriber moved it

    def check(self, layout: Layout) -> None:
        """See Target."""
        self._session.plan(layout)

    def mark(self) -> Mark | None:
        """See Target."""
        if self._mirror is not None:
            return self._mirror.mark()
        return None if self._session.held is None else _mark(self._session.held)

    def adopt(self, position: Position, layout: Layout) -> None:
        """See Target."""
        held, before = _held(position), self._session.held
        if self._mirror is None:
            self._session.plan(layout)
            self._session.adopt(held)
            return
        self._mirror.adopt(position, layout)
        self._proved = held, layout
        same = before is not None and before.digest == held.digest
        if same and not self._session.plan(layout).dense:
            self._session.adopt(held)  # another name for the same bits
        else:
            self._catch_up(self._mirror, held, layout)

    def empty(self) -> bool:
        """See Target."""
        return self._mirror is not None and self._mirror.empty()

    def base(self, geometry: Geometry) -> Base:
        """See Target."""
        if self._mirror is not None:
            return self._mirror.base(geometry)
        self._session.plan(geometry.layout)
        return _LiveBits(self._session, geometry.layout)

    def digest(self, geometry: Geometry, pool: Executor) -> Digest:
        """See Target."""
        if self._mirror is not None:
            return self._mirror.digest(geometry, pool)
        return self._session.digest(geometry.layout)

    def patch(self, geometry: Geometry, changes: Mapping[str, Changes], position: Position) -> None:
        """See Target."""
        held, before = _held(position), self._session.held
        if self._mirror is not None:
            together = self._proved is not None and self._proved[0] == before
            self._mirror.patch(geometry, changes, position)
            self._proved = held, geometry.layout
            if not together:
                self._catch_up(self._mirror, held, geometry.layout)
                return
        if before is None:
            raise Corrupt(f"{self.name} does not say which version it holds")
        self._session.install(geometry.layout, changes, before, held)

    def relay(
        self, before: Geometry, after: Geometry, changes: Mapping[str, Changes], position: Position
    ) -> None:
        """See Target.

        Raises:
            UsageError: there is no mirror.
        """
        if self._mirror is None:
            raise UsageError(
                f"{self.name} cannot go to another layout by a delta",
                hint="restart the engine on a checkpoint of the new layout, or use a mirror",
            )
        self._session.plan(after.layout)
        self._mirror.relay(before, after, changes, position)
        self._proved = _held(position), after.layout
        self._catch_up(self._mirror, _held(position), after.layout)

    def load(self, layout: Layout, weights: Sequence[Path], position: Position) -> None:
        """See Target."""
        held = _held(position)
        self._session.plan(layout)
        if self._mirror is not None:
            self._mirror.load(layout, weights, position)
            self._proved = held, layout
            self._catch_up(self._mirror, held, layout)
        else:
            self._session.load(layout, weights, held)
            shutil.rmtree(self._downloads, ignore_errors=True)

    def companions(self, files: Mapping[str, bytes]) -> None:
        """See Target. The engine has read its config when it started; the mirror takes the files."""
        config = files.get(_CONFIG)
        if config is not None:
            if self._config is not None and self._config != config:
                log.warning("%s of the stream changed; %s keeps the one it started with", _CONFIG, self.name)
            self._config = config
        if self._mirror is not None:
            self._mirror.companions(files)

    def workdir(self) -> Path | None:
        """See Target: below TMPDIR, and kept until a load succeeds, so that another try fetches nothing anew."""
        return make_private(self._downloads) if self._mirror is None else self._mirror.workdir()

    def _catch_up(self, mirror: CheckpointFolder, held: Held, layout: Layout) -> None:
        """Bring the engine to what the mirror was proved to hold, unless it is there."""
        if self._session.held == held:
            return
        report = self._session.plan(layout)
        log.warning("bringing %s to version %d from %s", self.name, held.version, mirror.path)
        if not report.dense and self._session.has(layout, held):
            self._session.adopt(held)
        else:
            self._session.load(layout, mirror.weights(), held)

    def _observe(self, report: InstallReport | VerifyReport) -> None:
        if isinstance(report, InstallReport):
            self._last = report
        if self._observer is not None:
            self._observer(report)


class _LiveBits:
    """See Reading: the engine's own bits."""

    def __init__(self, session: Session, layout: Layout) -> None:
        self._session = session
        self._layout = layout

    def read(self, positions: Positions) -> Mapping[str, Changes]:
        """See Reading."""
        return self._session.read(self._layout, positions)


def _held(position: Position) -> Held:
    mark = mark_of(position)
    return Held(
        stream=mark.stream,
        version=mark.version,
        sha256=mark.sha256,
        digest=position.manifest.digest_after,
    )


def _mark(held: Held) -> Mark:
    return Mark(held.stream, held.version, held.sha256)
