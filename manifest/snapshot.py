"""Snapshots: writing one as a plain Hugging Face checkpoint, and fetching one into a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.manifest import FORMAT, FileRef, LayoutRef, ObjectRef, SnapshotManifest
from weightcast.schemas.names import snapshot_manifest_key

from .commit import Writer, now
from .store import Store
from .stream import Snapshot, StreamReader
from .tensorfile import INDEX_NAME, encode_header, encode_index, file_names, split_into_files

PIECE_BYTES: Final = 16 << 20
"""Bytes read from the model at a time while a snapshot is written; a multiple of every element width."""

ReadPiece = Callable[[TensorSpec, int, int], bytes]
"""(tensor, first element, end element) -> its bytes, little-endian."""


def write_snapshot(
    store: Store,
    folder: str,
    *,
    stream: str,
    version: int,
    layout: Layout,
    layout_ref: LayoutRef,
    digest: str,
    read: ReadPiece,
    files: Mapping[str, bytes],
    writer: Writer,
    max_file_bytes: int,
) -> ObjectRef:
    """Write all tensors and `files` into `folder`; the manifest, which makes the snapshot exist, comes last.

    Repeating it for the same version writes the same tensors to the same keys; only the manifest's writer and
    time
    differ. Holds about one piece in memory.
    """
    groups = split_into_files(layout.stored, max_file_bytes)
    named = list(zip(file_names(len(groups)), groups, strict=True))
    taken = {INDEX_NAME, "manifest.json", *(name for name, _ in named)} & files.keys()
    if taken:
        raise UsageError(
            f"a companion file may not be called {min(taken)!r}: the snapshot has one of its own"
        )
    weights = []
    for name, specs in named:
        size, sha256 = store.put_stream(f"{folder}/{name}", _file_pieces(specs, read))
        weights.append(FileRef(name=name, size=size, sha256=sha256))
    companions = {**files, INDEX_NAME: encode_index(named)}
    refs = []
    for name, data in sorted(companions.items()):
        refs.append(FileRef(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest()))
        store.put(f"{folder}/{name}", data)
    manifest = SnapshotManifest(
        format=FORMAT,
        features=layout.features,
        stream=stream,
        version=version,
        layout=layout_ref,
        digest=digest,
        weights=weights,
        files=refs,
        writer=writer.name,
        run=writer.run,
        time=now(),
    )
    data = manifest.encode()
    key = snapshot_manifest_key(folder)
    store.put(key, data)
    return ObjectRef(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _file_pieces(specs: Sequence[TensorSpec], read: ReadPiece) -> Iterator[bytes]:
    yield encode_header(specs)
    for spec in specs:
        step = PIECE_BYTES // spec.width
        for begin in range(0, spec.elements, step):
            yield read(spec, begin, min(begin + step, spec.elements))


def fetch_weights(reader: StreamReader, snapshot: Snapshot, into: Path, pool: Executor) -> list[Path]:
    """Download the weight files of `snapshot` into the folder `into`, each checked by size and SHA-256.

    Files that are already there whole are kept, so a second try after a failure is cheap.
    """
    into.mkdir(parents=True, exist_ok=True)

    def one(ref: FileRef) -> Path:
        path = into / ref.name
        if not (path.is_file() and path.stat().st_size == ref.size and _sha256_of(path) == ref.sha256):
            reader.store.download(f"{snapshot.folder}/{ref.name}", path, size=ref.size, sha256=ref.sha256)
        return path

    return list(pool.map(one, snapshot.manifest.weights))


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
