"""Finding out which version a target holds, by proof; and bringing one in by a snapshot."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

from weightcast.codec import Geometry, Memory, digest_all
from weightcast.manifest.chain import Position
from weightcast.manifest.plan import plan
from weightcast.manifest.rebuild import read_chain, snapshot_choices, usable_deltas
from weightcast.manifest.snapshot import fetch_weights
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, Gap, Untrusted, UsageError
from weightcast.schemas.layout import Layout
from weightcast.schemas.names import version_key

from .folder_files import check_room, map_file, place_all
from .target import Target

log = logging.getLogger(__name__)

_SEARCHED: Final = 1000  # newest versions among which a target's bits are looked for


def attach(reader: StreamReader, target: Target, pool: Executor) -> Position | None:
    """The version that `target` holds, proved by its digest in full; None if it has to be fetched.

    Raises:
        Untrusted: the target belongs to another stream, or to a history that was rewritten.
        UsageError: it holds tensors of which no version is known; they are not overwritten unasked.
    """
    mark = target.mark()
    if mark is None:
        return _recognise(reader, target, pool)
    if mark.stream != reader.stream.stream:
        raise Untrusted(
            f"{target.name} is at version {mark.version} of stream {mark.stream}; {reader.store.url} is stream {reader.stream.stream}",
            hint="use another folder, or remove this one",
        )
    data = reader.manifest_bytes(mark.version)
    if data is None:
        raise Untrusted(
            f"{target.name} is at version {mark.version}, but {version_key(mark.version)} does not exist",
            hint="the stream was rewritten or is incomplete",
        )
    position = reader.chain().anchor(data, mark.version, sha256=mark.sha256)
    geometry = Geometry(reader.layout(position.manifest.layout))
    try:
        found: Digest | None = digest_all(geometry, target.memory(geometry), pool)
    except (UsageError, Corrupt) as error:
        log.warning("%s cannot be read as version %d: %s", target.name, mark.version, error)
        found = None
    if found != position.digest:
        log.warning(
            "%s is not whole (state %s, version %d has %s); fetching a snapshot",
            target.name,
            found,
            mark.version,
            position.digest,
        )
        return None
    return position


def _recognise(reader: StreamReader, target: Target, pool: Executor) -> Position | None:
    """A version with exactly the bits of a target that does not say what it holds."""
    if target.tensors() is None:
        return None
    head = reader.head()
    digests: dict[str, Digest | None] = {}
    positions = (
        read_chain(reader, max(0, (head or 0) - _SEARCHED + 1), head or 0, pool) if head is not None else []
    )
    for position in reversed(positions):
        ref = position.manifest.layout
        if ref.sha256 not in digests:
            digests[ref.sha256] = _digest_under(reader.layout(ref), target, pool)
        if digests[ref.sha256] == position.digest:
            target.adopt(position, reader.layout(ref))
            log.info("%s holds version %d already", target.name, position.version)
            return position
    if target.replaceable:
        return None
    raise UsageError(
        f"{target.name} holds weights that are no version of {reader.store.url} (of the last {_SEARCHED})",
        hint="use an empty folder, or move these weights away",
    )


def _digest_under(layout: Layout, target: Target, pool: Executor) -> Digest | None:
    geometry = Geometry(layout)
    try:
        return digest_all(geometry, target.memory(geometry), pool)
    except UsageError:
        return None


def fetch_snapshot(
    reader: StreamReader,
    target: Target,
    pool: Executor,
    head: int,
    *,
    newer_than: int | None,
    companions: Callable[[Position], None],
) -> Position:
    """Fetch the best snapshot, prove it, and hand it to `target`.

    Best is the one from which `head` costs least; where none reaches it, the newest.

    Raises:
        Gap: there is none newer than `newer_than`.
        Corrupt: it is damaged; the target was not touched.
    """
    choices = [c for c in snapshot_choices(reader, head) if newer_than is None or c.version > newer_than]
    if not choices:
        wanted = 0 if newer_than is None else newer_than + 1
        raise Gap(
            f"version {wanted} is no longer available as a delta, and there is no snapshot after it",
            hint="have the publisher write one (weightcast snapshot)",
        )
    positions = read_chain(reader, min(c.version for c in choices), head, pool)
    try:
        choice = plan(None, head, usable_deltas(positions, reader.floor()), choices).snapshot or choices[0]
    except Gap:
        choice = max(choices, key=lambda c: c.version)
    position = reader.position(choice.version)
    snapshot = reader.snapshot(choice.key, position)
    folder, temporary = target.workdir(), None
    if folder is None:
        folder = temporary = Path(mkdtemp(prefix="weightcast-"))
    try:
        check_room(folder, snapshot.manifest.bytes)
        paths = fetch_weights(reader, snapshot, folder, pool)
        layout = reader.layout(position.manifest.layout)
        _prove(Geometry(layout), paths, position, pool)
        companions(position)
        target.load(layout, paths, position)
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return position


def _prove(geometry: Geometry, paths: list[Path], position: Position, pool: Executor) -> None:
    try:
        memory: Memory = place_all(geometry, [map_file(p, writable=False) for p in paths], writable=False)
    except UsageError as error:
        raise Corrupt(f"the snapshot of version {position.version} lacks tensors: {error}") from error
    found = digest_all(geometry, memory, pool)
    if found != position.digest:
        raise Corrupt(
            f"the snapshot of version {position.version} has state {found}, its manifest says {position.digest}"
        )
