"""Finding out which version a target holds, by proof; and bringing one in by a snapshot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from weightcast.codec import Geometry, Memory, digest_all
from weightcast.manifest.chain import Position
from weightcast.manifest.rebuild import read_chain, snapshot_choices
from weightcast.manifest.snapshot import fetch_weights
from weightcast.manifest.stream import Snapshot, StreamReader
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, Gap, NotFound, Untrusted, UsageError, WeightcastError
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
            f"{target.name} is at version {mark.version} of stream {mark.stream}; "
            f"{reader.store.url} is stream {reader.stream.stream}",
            hint="use another folder, or remove this one",
        )
    data = reader.manifest_bytes(mark.version)
    if data is None:
        raise Untrusted(
            f"{target.name} is at version {mark.version}, but {version_key(mark.version)} does not exist",
            hint="the stream was rewritten or is incomplete",
        )
    position = reader.chain().anchor(data, mark.version, sha256=mark.sha256)
    layout = reader.layout(position.manifest.layout)
    try:
        found: Digest | None = target.digest(Geometry(layout), pool)
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
    target.adopt(position, layout)
    return position


def _recognise(reader: StreamReader, target: Target, pool: Executor) -> Position | None:
    """A version with exactly the bits of a target that does not say what it holds."""
    if target.empty():
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
    try:
        return target.digest(Geometry(layout), pool)
    except (UsageError, Corrupt) as error:
        log.info("%s cannot be read under layout %s: %s", target.name, layout.sha256, error)
        return None


def snapshot_pays(
    reader: StreamReader, at: Position, usable: Mapping[int, int], head: int, *, avoid: Collection[str]
) -> bool:
    """Whether a snapshot has fewer bytes than the deltas to its version, as far as they are known.

    A snapshot is about as large as the model: where the deltas are smaller none is looked for.

    Args:
        reader: the stream.
        at: what the target holds.
        usable: bytes of each delta after it that may be read, by version.
        head: newest version of interest.
        avoid: manifest keys of snapshots that are known to be of no use.
    """
    if sum(usable.values()) < at.manifest.totals.dense_bytes:
        return False
    choices = [c for c in snapshot_choices(reader, head, limit=1, avoid=avoid) if c.version > at.version]
    return any(c.bytes < sum(n for v, n in usable.items() if v <= c.version) for c in choices)


def fetch_snapshot(
    reader: StreamReader,
    target: Target,
    pool: Executor,
    requests: Executor,
    head: int,
    *,
    newer_than: int | None,
    damaged: dict[str, WeightcastError],
    companions: Callable[[Position], None],
    touching: Callable[[], AbstractContextManager[None]],
) -> Position:
    """Fetch the newest snapshot up to `head`, prove it, and hand it to `target`; one that is damaged is passed over.

    From the newest one `head` needs the fewest deltas. What a try before this one left in the target's folder is used.

    Args:
        reader, target: from where, to what.
        pool, requests: what proves and what downloads.
        head: newest version of interest.
        newer_than: what the target holds, if it does.
        damaged: snapshots that are not tried, by key of their manifest; those that turn out to be damaged are added.
        companions: called before the target is changed, once it is sure to which version.
        touching: entered while the target is changed.

    Raises:
        Gap: there is none newer than `newer_than`.
        Corrupt, NotFound: all there are damaged; the target was not touched.
        UsageError: the target cannot take it; it was not touched.
    """
    with _workdir(target) as folder:
        position, layout, paths = _download_newest(
            reader, target, pool, requests, head, newer_than, folder, damaged
        )
        companions(position)
        with touching():
            target.load(layout, paths, position)
    return position


def _download_newest(
    reader: StreamReader,
    target: Target,
    pool: Executor,
    requests: Executor,
    head: int,
    newer_than: int | None,
    folder: Path,
    damaged: dict[str, WeightcastError],
) -> tuple[Position, Layout, list[Path]]:
    while choices := snapshot_choices(reader, head, limit=1, avoid=damaged):
        choice = choices[0]
        if newer_than is not None and choice.version <= newer_than:
            break
        try:
            position = reader.position(choice.version)
            snapshot = reader.snapshot(choice.key, position)
            layout = reader.layout(position.manifest.layout)
            target.check(layout)
            _make_room(folder, snapshot)
            paths = fetch_weights(reader, snapshot, folder, requests)
            _prove(Geometry(layout), paths, position, pool)
            return position, layout, paths
        except (Corrupt, NotFound) as error:
            log.warning("snapshot %s cannot be used: %s", choice.key, error)
            damaged[choice.key] = error
    if damaged:
        raise next(iter(damaged.values()))
    wanted = 0 if newer_than is None else newer_than + 1
    raise Gap(
        f"version {wanted} is no longer available as a delta, and there is no snapshot after it",
        hint="have the publisher write one (weightcast snapshot)",
    )


@contextmanager
def _workdir(target: Target) -> Iterator[Path]:
    """Where to download to: the target's own folder, or a temporary one (TMPDIR says where)."""
    folder = target.workdir()
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory(prefix="weightcast-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _make_room(folder: Path, snapshot: Snapshot) -> None:
    """Remove what earlier downloads left and this one cannot use, and check that the rest fits on the disk."""
    sizes = {ref.name: ref.size for ref in snapshot.manifest.weights}
    there = 0
    for path in folder.iterdir():
        size = path.stat().st_size
        if sizes.get(path.name) == size:
            there += size
        else:
            path.unlink()
    check_room(folder, snapshot.manifest.bytes - there)


def _prove(geometry: Geometry, paths: list[Path], position: Position, pool: Executor) -> None:
    files = [map_file(p, writable=False) for p in paths]
    unknown = [e.spec.name for f in files for e in f.entries if e.spec.name not in geometry.layout]
    if unknown:
        raise Corrupt(
            f"the snapshot of version {position.version} has tensors that the version has not: {unknown[:5]}"
        )
    try:
        memory: Memory = place_all(geometry, files, writable=False)
    except UsageError as error:
        raise Corrupt(f"the snapshot of version {position.version} lacks tensors: {error}") from error
    found = digest_all(geometry, memory, pool)
    if found != position.digest:
        raise Corrupt(
            f"the snapshot of version {position.version} has state {found}, its manifest says {position.digest}"
        )
