"""Target: an SGLang server, kept at a version through a checkpoint folder on its host.

The folder is patched in place by `CheckpointFolder`; then the server reads all of it by its own
`POST /update_weights_from_disk`. Nothing of this package runs inside the server.

    DIR/                                        the checkpoint
    DIR/.weightcast/versions/VERSION-NONCE/     links to its files: the path that the server is given
    DIR/.weightcast/engine.json                 the last load that the server confirmed; absent while one is under way

One install: record removed → links made → `sglang_update`: pause, load, flush, confirm, continue → record written.
Whatever fails in between leaves the record absent; `recover` does all of it again, from the folder, without the store.

Why links: a path that was loaded before may be answered from what a loader remembers of it, so every load gets a path
of its own. Hard links and links to files are one file each with the checkpoint's, and copies would cost the disk a
model a version. A link needs no more than this: SGLang maps the files while it loads, copies them into parameters that
exist already, and lets go of them; the target holds `exclusive()` meanwhile, so nobody patches them. Only files that
the index names are linked, so a loader that ignores the index finds no others.

"The folder is good" and "the engine is good" are two things. The folder's mark says the first; the record, the
server's `weight_version` and its `model_path` must agree with it to say the second. A server that restarted names
another path.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from weightcast.schemas.engine import TOKEN_VARIABLE
from weightcast.schemas.errors import Conflict, Corrupt, StorageError

from ..folder import CheckpointFolder
from ..folder_files import write_durably
from ..folder_locks import OWN_NAME
from ..target import Mark, mark_of
from .sglang_http import PauseMode, Served, SglangApi
from .sglang_update import Update
from .staging import Staging, make_private

if TYPE_CHECKING:
    from weightcast.codec import Changes, Geometry, Memory
    from weightcast.manifest.chain import Position
    from weightcast.schemas.digest import Digest
    from weightcast.schemas.layout import Layout

log = logging.getLogger(__name__)

_VERSIONS: Final = "versions"
_KEPT: Final = (
    4  # paths that remain while installs fail: the one that the server has last had, and the newest tries
)


class SglangServer:
    """Keeps the SGLang server at `url` at a version, through the checkpoint folder `folder`.

    Both must be on one host, and the server must see the folder under the same path.

    Args:
        url: the server's own.
        folder: made if missing; see CheckpointFolder. It may be the one that the server was started with.
        key: the server's --admin-api-key, or its --api-key if it has no other; by default from WEIGHTCAST_TOKEN.
        pause: what happens to requests in flight during an update. "retract": they go on under the new weights, with
            a cache computed anew, so their tokens are of two versions. "abort": they end, and every answer is of one.
        load_format: handed to the server; None: as it was started.
        flush_s: seconds to go on asking for an empty cache before an update counts as failed.
        load_s: seconds that a load may take.
        verify_every: at the first and then every so many updates, see by the server's checksums that its weights
            changed; 0: never.
    """

    def __init__(
        self,
        url: str,
        folder: str | Path,
        *,
        key: str | None = None,
        pause: PauseMode = "retract",
        load_format: str | None = None,
        flush_s: float = 60.0,
        load_s: float = 1800.0,
        verify_every: int = 100,
    ) -> None:
        self._api = SglangApi(url, key or os.environ.get(TOKEN_VARIABLE), load_s=load_s)
        self._folder = CheckpointFolder(folder)
        self._own = self._folder.path / OWN_NAME
        self._update = Update(
            self._api, pause=pause, load_format=load_format, flush_s=flush_s, verify_every=verify_every
        )
        self._record = self._own / "engine.json"
        self._proved: Mark | None = None  # what the folder was proved to hold in this process
        self._probed = False
        self._driven = False  # it was at a version that this process gave it
        self._driving: IO[str] | None = None
        self.name = f"SGLang at {self._api.url}"
        self.replaceable = False
        self.paused_s: float | None = None
        """Seconds that the last update kept the server paused."""

    @property
    def folder(self) -> Path:
        """The checkpoint folder."""
        return self._folder.path

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """See Target: the folder's lock for a while, and the server's for as long as this process lives.

        Raises:
            Conflict: another subscriber on this host drives the server.
        """
        self._drive()
        with self._folder.exclusive():
            yield

    def recover(self) -> None:
        """See Target. Loads the server again if it is not at the folder's version (it restarted; a load failed).

        A folder that was not proved yet in this process is not handed to the server: `adopt` does, after the proof.

        Raises:
            StorageError: the server does not answer.
            Corrupt: it refuses the folder; it stays paused.
        """
        self._folder.recover()
        if not self._probed:
            self._api.probe()
            self._probed = True
        served, mark = self._api.served(), self._folder.mark()
        if mark is None or mark != self._proved or self._holds(served, mark):
            return
        if self._driven and self._is_of_another(served):
            raise Conflict(
                f"{self.name} was given {served.path}, which is another subscriber's",
                hint="one subscriber drives a server: stop the other",
            )
        log.warning(
            "%s serves %r from %s; loading version %d", self.name, served.label, served.path, mark.version
        )
        self._install(mark, changed=False)

    def check(self, layout: Layout) -> None:
        """See Target. What the server cannot load it refuses, and says so in its own words."""
        self._folder.check(layout)

    def mark(self) -> Mark | None:
        """See Target. The folder's; `recover` saw that the server is there as well, if the folder was proved."""
        return self._folder.mark()

    def adopt(self, position: Position, layout: Layout) -> None:
        """See Target."""
        self._folder.adopt(position, layout)
        self._follow(position, changed=False)

    def empty(self) -> bool:
        """See Target."""
        return self._folder.empty()

    def base(self, geometry: Geometry) -> Memory:
        """See Target: the folder's bits, in the shapes of its files, whatever the server makes of them."""
        return self._folder.base(geometry)

    def digest(self, geometry: Geometry, pool: Executor) -> Digest:
        """See Target: of the folder."""
        return self._folder.digest(geometry, pool)

    def patch(self, geometry: Geometry, changes: Mapping[str, Changes], position: Position) -> None:
        """See Target."""
        self._folder.patch(geometry, changes, position)
        self._follow(position, changed=True)

    def relay(
        self, before: Geometry, after: Geometry, changes: Mapping[str, Changes], position: Position
    ) -> None:
        """See Target. A server takes other tensors only as far as its model has places for them."""
        self._folder.relay(before, after, changes, position)
        self._follow(position, changed=False)

    def load(self, layout: Layout, weights: Sequence[Path], position: Position) -> None:
        """See Target."""
        self._folder.load(layout, weights, position)
        self._follow(position, changed=False)

    def companions(self, files: Mapping[str, bytes]) -> None:
        """See Target: for the folder. The server goes on with the config and tokenizer that it was started with."""
        self._folder.companions(files)

    def workdir(self) -> Path | None:
        """See Target."""
        return self._folder.workdir()

    def close(self) -> None:
        """Let another subscriber of this host drive the server."""
        if self._driving is not None:
            self._driving.close()
            self._driving = None

    def _follow(self, position: Position, *, changed: bool) -> None:
        """The folder was proved to hold `position`: bring the server there.

        Raises:
            Corrupt: that failed. The folder has moved already, so this is never an error after which all is as before.
        """
        mark = self._proved = mark_of(position)
        try:
            if not self._holds(self._api.served(), mark):
                self._install(mark, changed=changed)
        except StorageError as error:
            raise Corrupt(
                f"the folder is at version {mark.version}, the server is not: {error.message}",
                hint="the server is loaded from the folder as soon as it answers",
            ) from error

    def _install(self, mark: Mark, *, changed: bool) -> None:
        """Have the server read the folder. `changed`: its weights differ from those of the last install."""
        self._record.unlink(missing_ok=True)
        path = self._link(mark.version)
        try:
            self.paused_s = self._update.run(str(path), str(mark.version), changed=changed)
        except Corrupt as error:
            log.error("%s is not at version %d and stays paused: %s", self.name, mark.version, error.message)
            raise
        self._driven = True
        self._remember(mark, path)
        log.info("%s serves version %d; paused %.3f s", self.name, mark.version, self.paused_s)

    def _holds(self, served: Served, mark: Mark) -> bool:
        """Whether the server confirmed `mark`, to this process or one before it, and has not restarted since."""
        try:
            record = json.loads(self._record.read_text())
            return Mark(**record["mark"]) == mark and served == Served(str(mark.version), record["path"])
        except (OSError, ValueError, TypeError, KeyError):
            return False  # absent or not whole: then it is loaded again

    def _remember(self, mark: Mark, path: Path) -> None:
        write_durably(
            self._own / "engine.json", json.dumps({"mark": asdict(mark), "path": str(path)}).encode()
        )
        for other in path.parent.iterdir():
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    def _link(self, version: int) -> Path:
        """A path that no server was given before, with the folder's files under it."""
        versions = self._own / _VERSIONS
        versions.mkdir(exist_ok=True)
        for old in sorted(versions.iterdir(), key=lambda p: p.stat().st_mtime_ns)[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)  # of installs that failed
        path = versions / f"{version}-{secrets.token_hex(4)}"
        path.mkdir()
        weights = {p.name for p in self._folder.weights()}
        for file in self.folder.iterdir():
            if (
                file.is_file()
                and not file.name.startswith(".")
                and (file.suffix != ".safetensors" or file.name in weights)
            ):
                (path / file.name).symlink_to(Path("../../..") / file.name)  # as any mount of DIR has it
        return path

    def _is_of_another(self, served: Served) -> bool:
        path = Path(served.path)
        return path.parts[-3:-1] == (OWN_NAME, _VERSIONS) and path.parent != self._own / _VERSIONS

    def _drive(self) -> None:
        """Be the only one that drives the server: two with a folder each would undo each other's loads for ever."""
        if self._driving is not None:
            return
        lock = (make_private(Staging(self._api.url).folder) / "driver.lock").open("a")
        try:
            flock(lock, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise Conflict(
                f"{self.name} has a subscriber on this host already", hint="stop the other first"
            ) from None
        self._driving = lock
