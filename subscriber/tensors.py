"""Target: torch tensors of this process, on any device, changed in place."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightcast.codec import Changes, FlatSpace, Geometry, Memory, digest_all, put
from weightcast.manifest.chain import Position
from weightcast.manifest.tensorfile import mapped, read_header
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import Layout
from weightcast.schemas.wrappers import NameMap

from .target import Mark, mark_of, restrict
from .tensor_bits import SIGNED, bits_of, is_addressable, overlapping, place_of, spec_of, write_by_index

_Homes = dict[
    str, list[torch.Tensor]
]  # for each stored tensor those that hold it; several if tied names are apart here


class Tensors:
    """Keeps a state dict's tensors at a version. Holds references; the tensors stay the caller's.

    Host tensors that are contiguous are decoded against and written where they lie; others are copied to the host for
    decoding and written by index. Between `patch` calls the tensors must not be changed by anybody else.

    Args:
        state_dict: names to tensors, as of `model.state_dict()`; wrapper prefixes are removed as a publisher does.
        ignore: name patterns of tensors that the stream does not carry and that are left alone.
    """

    name = "tensors"
    replaceable = True

    def __init__(self, state_dict: Mapping[str, torch.Tensor], *, ignore: Collection[str] = ()) -> None:
        names = NameMap()
        self._tensors = {
            names(name): tensor.detach()
            for name, tensor in state_dict.items()
            if not any(fnmatchcase(name, pattern) for pattern in ignore)
        }
        self._mark: Mark | None = None
        self._found: tuple[str, _Homes] | None = None
        self._even = ""  # hash of the layout under which names that repeat a tensor were found equal
        self._lock = threading.RLock()
        self._still = threading.RLock()

    def exclusive(self) -> AbstractContextManager[Any]:
        """See Target. Tensors belong to one process, so a lock will do."""
        return self._lock

    @contextmanager
    def reading(self) -> Iterator[Mark | None]:
        """Generate inside this context, and the tensors stay at the version that it gives (None: at none yet).

        A subscriber in another thread fetches and decodes meanwhile; it only waits with writing.
        """
        with self._still:
            yield self._mark

    def recover(self) -> None:
        """See Target. What a process left half done is gone with it."""

    def check(self, layout: Layout) -> None:
        """See Target."""
        self._homes(layout)

    def mark(self) -> Mark | None:
        """See Target."""
        return self._mark

    def adopt(self, position: Position, layout: Layout) -> None:
        """See Target."""
        with self._still:
            self._mark = mark_of(position)

    def empty(self) -> bool:
        """See Target."""
        for name, tensor in self._tensors.items():
            spec_of(name, tensor)  # refuses what cannot be kept
        return False

    def workdir(self) -> Path | None:
        """See Target."""
        return None

    def companions(self, files: Mapping[str, bytes]) -> None:
        """See Target. Tensors have no files."""

    def digest(self, geometry: Geometry, pool: Executor) -> Digest:
        """See Target."""
        return digest_all(geometry, self.base(geometry), pool)

    def base(self, geometry: Geometry) -> Memory:
        """See Target. Tensors that lie elsewhere than in host memory are copied."""
        homes = self._homes(geometry.layout)
        if self._even != geometry.layout.sha256:
            uneven = [
                name
                for name, (first, *more) in homes.items()
                if any(not torch.equal(bits_of(first), bits_of(m)) for m in more)
            ]
            if uneven:
                raise UsageError(f"tensors that the stream ties to {uneven[0]!r} differ from it here")
            self._even = geometry.layout.sha256
        hosts = {n: t[0] if is_addressable(t[0]) else t[0].cpu().contiguous() for n, t in homes.items()}
        return Memory.at(geometry, {n: t.data_ptr() if t.numel() else 0 for n, t in hosts.items()}, hosts)

    def patch(self, geometry: Geometry, changes: Mapping[str, Changes], position: Position) -> None:
        """See Target."""
        homes = self._homes(geometry.layout)
        self._check_shared(geometry, homes, changes, position)
        with self._still:
            self._patch(geometry, homes, changes)
            self.adopt(position, geometry.layout)

    def _patch(self, geometry: Geometry, homes: _Homes, changes: Mapping[str, Changes]) -> None:
        for copy in range(max(map(len, homes.values()), default=0)):
            present = {name: found[copy] for name, found in homes.items() if copy < len(found)}
            for dtype, found in changes.items():
                self._write(geometry[dtype], geometry, present, found)

    def relay(
        self, before: Geometry, after: Geometry, changes: Mapping[str, Changes], position: Position
    ) -> None:
        """See Target. The tensors themselves must already have the new shapes."""
        kept, homes = set(before.layout.stored), self._homes(after.layout)
        self._check_shared(after, homes, changes, position)
        with self._still:
            for name, found in homes.items():
                if after.layout[name] not in kept:
                    for home in found:
                        bits_of(home).zero_()
            self._patch(after, homes, changes)
            self.adopt(position, after.layout)

    def load(self, layout: Layout, weights: Sequence[Path], position: Position) -> None:
        """See Target."""
        homes = self._homes(layout)
        sources = {}
        for path in weights:
            with mapped(path) as view:
                sources.update({e.spec.name: view[e.begin : e.end] for e in read_header(path)})
        for first, second in _shared(homes):
            if not np.array_equal(sources[first], sources[second]):
                raise _not_equal(first, second, position)
        with self._still:
            for name, found in homes.items():
                source = np.array(sources[name]).view(SIGNED[layout[name].width])
                for home in found:
                    bits_of(home).copy_(torch.from_numpy(source).reshape(home.shape))
            self.adopt(position, layout)

    def _check_shared(
        self, geometry: Geometry, homes: _Homes, changes: Mapping[str, Changes], position: Position
    ) -> None:
        """Check that tensors which are one here change alike in the stream.

        Raises:
            UsageError: they do not, so that no bits are right for both.
        """
        for first, second in _shared(homes):
            space = geometry[geometry.layout[first].dtype]
            found = changes.get(space.dtype, Changes.none(space))
            one, other = restrict(space, found, [first]), restrict(space, found, [second])
            apart = space.starts[space.index[second]] - space.starts[space.index[first]]
            if not (
                np.array_equal(one.positions + apart, other.positions)
                and np.array_equal(one.values, other.values)
            ):
                raise _not_equal(first, second, position)

    def _homes(self, layout: Layout) -> _Homes:
        """For each stored tensor of `layout` the tensors here that hold it: one, or several if tied names are apart.

        Raises:
            UsageError: a tensor is missing here, has another dtype or shape, is not in the layout, or overlaps another
                one in part.
        """
        if self._found is not None and self._found[0] == layout.sha256:
            return self._found[1]
        homes: _Homes = {spec.name: [] for spec in layout.stored}
        for spec in layout:
            tensor = self._tensors.get(spec.name)
            if tensor is None:
                continue
            found = spec_of(spec.name, tensor)
            if (found.dtype, found.shape) != (spec.dtype, spec.shape):
                raise UsageError(
                    f"tensor {spec.name!r} is {found.dtype}{list(found.shape)} here "
                    f"and {spec.dtype}{list(spec.shape)} in the stream",
                    hint="build the model with the stream's shapes",
                )
            same = homes[spec.tied_to or spec.name]
            if all(place_of(tensor) != place_of(other) for other in same):
                same.append(tensor)
        missing = [name for name, found in homes.items() if not found]
        places = {place_of(t) for found in homes.values() for t in found}
        unknown = [n for n, t in self._tensors.items() if n not in layout and place_of(t) not in places]
        if missing or unknown:
            raise UsageError(
                f"of {len(layout)} tensors in the stream {len(missing)} are missing here {missing[:5]}, "
                f"and {len(unknown)} here are not in the stream {unknown[:5]}",
                hint="pass the state dict of the same model, or name what to leave alone with ignore=",
            )
        pair = overlapping({name: tensor for name, tensor in self._tensors.items() if name in layout})
        if pair is not None:
            raise UsageError(
                f"tensors {pair[0]!r} and {pair[1]!r} overlap in memory here",
                hint=f"give {pair[1]!r} memory of its own (clone it)",
            )
        self._found = (layout.sha256, homes)
        return homes

    def _write(
        self, space: FlatSpace, geometry: Geometry, homes: Mapping[str, torch.Tensor], changes: Changes
    ) -> None:
        """Write what concerns `homes`: in one go where memory can be addressed, tensor by tensor elsewhere."""
        direct = {n: homes[n] for n in space.names if n in homes and is_addressable(homes[n])}
        addresses = {n: t.data_ptr() if t.numel() else 0 for n, t in direct.items()}
        memory = Memory.at(geometry, addresses, direct, writable=True)
        mine = changes if len(direct) == len(space.names) else restrict(space, changes, direct)
        if not put(space, memory, mine):
            raise Corrupt(
                f"tensors of dtype {space.dtype} do not hold what was written to them",
                hint="somebody else writes to them",
            )
        for name in space.names if len(direct) < len(space.names) else ():
            if name in homes and name not in direct:
                first = int(space.starts[space.index[name]])
                lo, hi = np.searchsorted(changes.positions, [first, first + homes[name].numel()])
                if lo < hi:
                    write_by_index(name, homes[name], changes.positions[lo:hi] - first, changes.values[lo:hi])


def _shared(homes: _Homes) -> list[tuple[str, str]]:
    """Pairs of tensors that are two in the stream and lie in one place here."""
    seen: dict[tuple[object, ...], str] = {}
    pairs = []
    for name, found in homes.items():
        for tensor in found:
            first = seen.setdefault(place_of(tensor), name)
            if first != name:
                pairs.append((first, name))
    return pairs


def _not_equal(first: str, second: str, position: Position) -> UsageError:
    return UsageError(
        f"tensors {first!r} and {second!r} share memory here, but are not equal in version {position.version}",
        hint="build the model without the tie",
    )
