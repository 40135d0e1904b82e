"""Where the bits of a layout lie in this process: one raw address a tensor, and whatever keeps it alive."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightcast.schemas.errors import UsageError

from .space import FlatSpace, Geometry

Unsigned = npt.NDArray[np.unsignedinteger[Any]]
Buffer = npt.NDArray[Any] | tuple[int, int, object]
"""A C-contiguous array, or (address, nbytes, owner), where `owner` keeps the address valid and writable."""

UNSIGNED: Final[dict[int, np.dtype[Any]]] = {w: np.dtype(f"u{w}") for w in (1, 2, 4, 8)}
"""The unsigned numpy dtype of each width in bytes."""

PAGE: Final = 4096  # bytes; each dtype of a mapped file begins on a page, so that its elements are aligned


class Memory:
    """The bits of all stored tensors of a geometry. Kernels read and write them through `addresses`.

    Nothing is copied. The arrays or owners given are kept alive; their bits may change at any time, and two
    memories may overlap. Addresses need not be aligned.

    Attributes:
        geometry: what the memory holds.
        writable: whether `codec.scatter` may change it.
    """

    def __init__(
        self,
        geometry: Geometry,
        addresses: Mapping[str, npt.NDArray[np.uint64]],
        owners: list[object],
        *,
        writable: bool,
    ) -> None:
        self.geometry = geometry
        self.writable = writable
        self._addresses = dict(addresses)
        self._owners = owners

    @classmethod
    def allocate(cls, geometry: Geometry, path: Path | None = None, *, keep: bool = False) -> Memory:
        """Memory that is contiguous within each dtype; zeroed.

        Args:
            geometry: what to hold.
            path: file to create or empty, and map, instead of taking anonymous memory.
            keep: leave what the file holds, as far as it reaches.
        """
        offsets, size = {}, 0
        for space in geometry:
            offsets[space.dtype] = size
            size += -(-space.elements * space.width // PAGE) * PAGE
        if path is None:
            whole = np.zeros(size, np.uint8)
        else:
            with path.open("r+b" if keep and path.exists() else "w+b") as file:
                file.truncate(max(size, PAGE))
                whole = np.frombuffer(mmap.mmap(file.fileno(), max(size, PAGE)), np.uint8)
        base = whole.ctypes.data
        addresses = {
            s.dtype: (base + offsets[s.dtype] + s.starts[:-1] * s.width).astype(np.uint64) for s in geometry
        }
        return cls(geometry, addresses, [whole], writable=True)

    @classmethod
    def blank(cls, geometry: Geometry, *, writable: bool = False) -> Memory:
        """Memory with no tensor in place yet; see `place`. Only tensors in place may be touched."""
        return cls(
            geometry, {s.dtype: np.zeros(len(s.names), np.uint64) for s in geometry}, [], writable=writable
        )

    def place(self, name: str, address: int, owner: object) -> None:
        """Say where a stored tensor lies: its bytes in C order at `address`, kept valid by `owner`."""
        space = self.geometry[self.geometry.layout[name].dtype]
        self._addresses[space.dtype][space.index[name]] = address
        self._owners.append(owner)

    @classmethod
    def at(
        cls, geometry: Geometry, addresses: Mapping[str, int], owner: object, *, writable: bool = False
    ) -> Memory:
        """Memory of tensors that lie at these byte addresses, in C order, kept valid by `owner`.

        Others have no place yet, as in `blank`. For many tensors this is several times faster than to place each.
        """
        found = {
            s.dtype: np.fromiter((addresses.get(n, 0) for n in s.names), np.uint64, len(s.names))
            for s in geometry
        }
        return cls(geometry, found, [owner], writable=writable)

    @classmethod
    def over(cls, geometry: Geometry, buffers: Mapping[str, Buffer]) -> Memory:
        """Memory over existing buffers, by tensor name. Names that the layout does not store are ignored.

        Raises:
            UsageError: a stored tensor has no buffer, or one that is not C-contiguous or not of its size.
        """
        addresses, owners, writable = {}, list[object](), True
        for space in geometry:
            found = [_address(space, i, buffers) for i in range(len(space.names))]
            addresses[space.dtype] = np.array([address for address, _, _ in found], np.uint64)
            owners.append([owner for _, owner, _ in found])
            writable = writable and all(can_write for _, _, can_write in found)
        return cls(geometry, addresses, owners, writable=writable)

    def addresses(self, space: FlatSpace) -> npt.NDArray[np.uint64]:
        """uint64 [n]: byte address of each tensor of `space`.

        Raises:
            UsageError: this memory holds another layout.
        """
        mine = self.geometry.get(space.dtype)
        if mine is not space and (mine is None or not np.array_equal(mine.seeds, space.seeds)):
            raise UsageError(
                f"this memory does not hold the {space.dtype} tensors of the layout that was asked for"
            )
        return self._addresses[space.dtype]

    def address(self, space: FlatSpace, element: int) -> int:
        """Byte address of a flat element.

        Raises:
            UsageError: this memory holds another layout.
        """
        tensor = space.tensor_at(element)
        return int(self.addresses(space)[tensor]) + (element - int(space.starts[tensor])) * space.width

    def flat(self, dtype: str) -> Unsigned:
        """Unsigned view [elements] of a dtype in flat order. The view keeps the memory alive.

        Raises:
            UsageError: the tensors of the dtype do not lie end to end.
        """
        space, addresses = self.geometry[dtype], self._addresses[dtype]
        if np.any(
            addresses[1:] - addresses[:-1] != (np.diff(space.starts[:-1]) * space.width).astype(np.uint64)
        ):
            raise UsageError(f"the {dtype} tensors do not lie end to end")
        return self._view(int(addresses[0]), space.width, (space.elements,))

    def tensor(self, name: str) -> Unsigned:
        """Unsigned view of a stored tensor in its own shape. The view keeps the memory alive."""
        spec = self.geometry.layout[name]
        space = self.geometry[spec.dtype]
        return self._view(int(self._addresses[spec.dtype][space.index[name]]), space.width, spec.shape)

    def _view(self, address: int, width: int, shape: tuple[int, ...]) -> Unsigned:
        if 0 in shape:
            return np.zeros(shape, UNSIGNED[width])
        return np.asarray(_Window(address, width, shape, self, self.writable))


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Raw memory as uint8 [nbytes], writable. Whoever asks keeps it alive."""
    return np.asarray(_Window(address, 1, (nbytes,), None, True)) if nbytes else np.empty(0, np.uint8)


class _Window:
    """Exposes raw memory to numpy and keeps its owner alive."""

    def __init__(
        self, address: int, width: int, shape: tuple[int, ...], owner: object, writable: bool
    ) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not writable),
            "typestr": UNSIGNED[width].str,
            "shape": shape,
        }


def _address(space: FlatSpace, position: int, buffers: Mapping[str, Buffer]) -> tuple[int, object, bool]:
    """(address, owner, writable) of one tensor."""
    name, nbytes = space.names[position], space.specs[position].nbytes
    buffer = buffers.get(name)
    if buffer is None:
        raise UsageError(f"tensor {name!r} of the layout has no buffer")
    if isinstance(buffer, tuple):
        address, found, owner = buffer
        contiguous = can_write = True
    else:
        address, found, owner = buffer.ctypes.data, buffer.nbytes, buffer
        contiguous, can_write = buffer.flags.c_contiguous, buffer.flags.writeable or not nbytes
    if found != nbytes or not contiguous:
        raise UsageError(
            f"tensor {name!r} needs {nbytes} bytes in C order, found {found}"
            f"{'' if contiguous else ', not contiguous'}"
        )
    return (address if nbytes else 0), owner, can_write
