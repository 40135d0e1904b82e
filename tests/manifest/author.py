"""A publisher in a few lines, for tests: numpy states in, versions out. It keeps every state that it
published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightcast.codec import Box, FlatSpace, Geometry, Memory, digest_all, encode, encode_box, gather
from weightcast.manifest.chain import Position
from weightcast.manifest.commit import (
    Writer,
    commit,
    create_stream,
    new_token,
    now,
    put_files,
    put_layout,
    put_shard,
)
from weightcast.manifest.rebuild import State, carry_over
from weightcast.manifest.snapshot import write_snapshot
from weightcast.manifest.store import Store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.layout import MIX, Layout, TensorSpec
from weightcast.schemas.manifest import (
    FORMAT,
    ObjectRef,
    ShardRef,
    Totals,
    VersionManifest,
)
from weightcast.schemas.names import snapshot_folder
from weightcast.schemas.shard import Codec, Coding, Row, features_of

POOL = ThreadPoolExecutor(4)


@dataclass(frozen=True)
class Tensors:
    """A model: bits by name, and which names only repeat another one's. Arrays are unsigned, of the
    dtype's width.
    """

    bits: dict[str, npt.NDArray[Any]]
    dtypes: dict[str, str]
    ties: dict[str, str] = field(default_factory=dict)
    mix: int = MIX

    @classmethod
    def of(cls, ties: Mapping[str, str] | None = None, **named: tuple[str, Any]) -> Tensors:
        """`name=("BF16", nested lists or an array of unsigned bits)`."""
        bits = {n: np.ascontiguousarray(np.array(v, f"u{WIDTHS[d]}")) for n, (d, v) in named.items()}
        return cls(bits, {n: d for n, (d, _) in named.items()}, dict(ties or {}))

    @property
    def layout(self) -> Layout:
        own = [TensorSpec(n, self.dtypes[n], a.shape) for n, a in self.bits.items()]
        return Layout.of(
            [*own, *(TensorSpec(n, self.dtypes[t], self.bits[t].shape, t) for n, t in self.ties.items())],
            self.mix,
        )

    def changed(self, name: str, *edits: tuple[Any, int]) -> Tensors:
        """A copy in which `edits` (index, new bits) are made to a tensor."""
        bits = {n: a.copy() for n, a in self.bits.items()}
        for index, value in edits:
            bits[name][index] = value
        return replace(self, bits=bits)


class Author:
    """Writes one stream.

    Attributes:
        reader: of the stream.
        positions: of its versions.
        tensors: what each version holds.
    """

    def __init__(self, store: Store, *, name: str = "author") -> None:
        self.store = store
        self.reader: StreamReader = create_stream(store, single_writer=True)
        self.writer = Writer.fresh(name)
        self.positions: list[Position] = []
        self.tensors: list[Tensors] = []

    @property
    def head(self) -> int:
        return len(self.positions) - 1

    def state(self, version: int = -1) -> State:
        """The version's state, from memory."""
        geometry = Geometry(self.tensors[version].layout)
        return State(self.positions[version], geometry, Memory.over(geometry, self.tensors[version].bits))

    def reset(self, tensors: Tensors, files: Mapping[str, bytes] | None = None) -> Position:
        """A version that starts afresh."""
        version = len(self.positions)
        snapshot = self._snapshot(snapshot_folder(version, new_token()), version, tensors)
        return self.commit(tensors, reset=True, snapshot=snapshot, files=files)

    def publish(
        self, tensors: Tensors, *, coding: Coding | None = None, row_elements: int = 1 << 22, small: int = 1 << 16,
        rows_a_shard: int = 2, files: Mapping[str, bytes] | None = None, codec: Codec = "gap",
        boxes: Iterable[Box] | None = None,
    ) -> Position:  # fmt: skip
        """A version by delta; with `boxes`, which must cover what changed, by rows of these."""
        if boxes is None:
            rows = self.rows(tensors, coding=coding, row_elements=row_elements, small=small, codec=codec)
        else:
            rows = self.box_rows(tensors, boxes, coding=coding, codec=codec)
        groups = [rows[i : i + rows_a_shard] for i in range(0, len(rows), rows_a_shard)]
        version = len(self.positions)
        shards = [
            put_shard(self.store, version, self.writer.name, i, group) for i, group in enumerate(groups)
        ]
        features = set[str]().union(*map(features_of, groups))
        return self.commit(tensors, shards=shards, files=files, features=sorted(features))

    def rows(
        self,
        tensors: Tensors,
        *,
        coding: Coding | None = None,
        row_elements: int = 1 << 22,
        small: int = 1 << 16,
        codec: Codec = "gap",
    ) -> list[Row]:
        """What leads from the head to `tensors`."""
        geometry, old, new = self._sides(tensors)
        found = [
            encode(geometry[i.dtype], new, old, i, coding=coding, codec=codec).row
            for i in geometry.intervals(row_elements, small)
        ]
        return [row for row in found if row is not None]

    def box_rows(
        self,
        tensors: Tensors,
        boxes: Iterable[Box],
        *,
        coding: Coding | None = None,
        codec: Codec = "gap",
    ) -> list[Row]:
        """The same by boxes."""
        geometry, old, new = self._sides(tensors)
        found = []
        for box in boxes:
            space = geometry[box.dtype]
            before, after = (gather(space, memory, elements_of(box)) for memory in (old, new))
            encoded = encode_box(
                space, box, after.ctypes.data, before.ctypes.data, coding=coding, codec=codec
            )
            found.append(encoded.row)
        return [row for row in found if row is not None]

    def _sides(self, tensors: Tensors) -> tuple[Geometry, Memory, Memory]:
        """The layout of `tensors`, the head's bits in it, and theirs."""
        before, geometry = self.state(), Geometry(tensors.layout)
        old = before.memory
        if tensors.layout.sha256 != before.layout.sha256:
            old, _ = carry_over(before, geometry, POOL)
        return geometry, old, Memory.over(geometry, tensors.bits)

    def snapshot(self, version: int = -1) -> ObjectRef:
        """A snapshot beside the chain."""
        version = self.positions[version].version
        return self._snapshot(snapshot_folder(version), version, self.tensors[version])

    def manifest(self, tensors: Tensors, **fields: Any) -> VersionManifest:
        """The manifest that the next version would have; `fields` replace its own."""
        layout, parent = tensors.layout, self.positions[-1] if self.positions else None
        shards: list[ShardRef] = fields.get("shards", [])
        totals = Totals(
            elements=layout.elements,
            changed=sum(s.changed for s in shards),
            bytes=sum(s.size for s in shards),
            dense_bytes=layout.nbytes,
        )
        standard = {
            "format": FORMAT,
            "stream": self.reader.stream.stream,
            "version": len(self.positions),
            "parent": parent.as_parent if parent else None,
            "layout": put_layout(self.store, layout),
            "digest_before": parent.manifest.digest_after if parent else None,
            "digest_after": self._digest(tensors),
            "totals": totals,
            "writer": self.writer.name,
            "run": self.writer.run,
            "token": new_token(),
            "step": None,
            "time": now(),
        }
        features = {*layout.features, *fields.pop("features", ())}
        return VersionManifest(**{**standard, "features": sorted(features), **fields})

    def commit(
        self, tensors: Tensors, *, files: Mapping[str, bytes] | None = None, **fields: Any
    ) -> Position:
        """The next version, of a manifest with these `fields`."""
        last = self.positions[-1].manifest.files if self.positions else None
        fields["files"] = last if files is None else put_files(self.store, files, last)
        position = commit(self.store, self.manifest(tensors, **fields))
        self.positions.append(position)
        self.tensors.append(tensors)
        return position

    def _snapshot(self, folder: str, version: int, tensors: Tensors) -> ObjectRef:
        layout = tensors.layout

        def read(spec: TensorSpec, begin: int, end: int) -> bytes:
            return tensors.bits[spec.name].reshape(-1)[begin:end].tobytes()

        return write_snapshot(
            self.store,
            folder,
            stream=self.reader.stream.stream,
            version=version,
            layout=layout,
            layout_ref=put_layout(self.store, layout),
            digest=self._digest(tensors),
            read=read,
            files={"config.json": b"{}\n"},
            writer=self.writer,
            max_file_bytes=1 << 20,
        )

    def _digest(self, tensors: Tensors) -> str:
        geometry = Geometry(tensors.layout)
        return digest_all(geometry, Memory.over(geometry, tensors.bits)).hex


def elements_of(box: Box) -> npt.NDArray[np.int64]:
    """Flat elements of a box, in its order."""
    number, inside = np.divmod(np.arange(box.length), box.run or box.length)
    found: npt.NDArray[np.int64] = box.start + number * box.stride + inside
    return found


def columns(space: FlatSpace, name: str, *widths: int) -> list[Box]:
    """A tensor's last dimension cut into slices of these widths, one box each."""
    position = space.index[name]
    spec, at, boxes = space.specs[position], int(space.starts[position]), list[Box]()
    lines = spec.elements // spec.shape[-1]
    for width in widths:
        boxes.append(Box(spec.dtype, at, lines * width, width, spec.shape[-1]))
        at += width
    return boxes


def check_state(state: State, tensors: Tensors) -> None:
    """Assert that a state has exactly the layout and bits of a model."""
    assert [(s.name, s.dtype, s.shape, s.tied_to) for s in state.layout] == [
        (s.name, s.dtype, s.shape, s.tied_to) for s in tensors.layout
    ]
    for name, bits in tensors.bits.items():
        assert state.memory.tensor(name).tobytes() == bits.tobytes(), name


@dataclass
class CountingStore:
    """A store that notes every call as (method, key), and fails or pauses where a test says so."""

    inner: Store
    calls: list[tuple[str, str]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value) or name in ("clock", "probe"):
            return value

        def call(key: str, *args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, key))
            return value(key, *args, **kwargs)

        return call

    def keys(self, prefix: str) -> list[str]:
        """Keys below `prefix` that were asked for, in order."""
        return [key for _, key in self.calls if key.startswith(prefix)]


@contextmanager
def replaced(path: Path, data: bytes | None) -> Iterator[None]:
    """A file with other bytes, or gone (None), for a while."""
    before = path.read_bytes()
    try:
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        yield
    finally:
        path.write_bytes(before)
