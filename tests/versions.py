"""What a version must be, bit for bit: copies of what was published, and a reader that starts from nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.rebuild import State, advance, load_snapshot, rebuild
from weightcast.manifest.store import Store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.shard import Row

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Bits:
    """One tensor: dtype by its safetensors name, shape, little-endian bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def bf16(*bits: int) -> torch.Tensor:
    """bf16 elements by their bits."""
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def f32(*bits: int) -> torch.Tensor:
    """fp32 elements by their bits."""
    return torch.from_numpy(np.array(bits, np.uint32).view(np.float32))


def bits_of(tensor: Any) -> Bits:
    """A copy of a torch tensor's bits, element by element where views are odd."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return Bits(_NAMES[tensor.dtype], tuple(tensor.shape), data)


def copy_of(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Bits]:
    """A copy of all bits that are about to be published."""
    return {name: bits_of(t) for name, t in (tensors.items() if isinstance(tensors, Mapping) else tensors)}


def state_at(store: Store, version: int) -> State:
    """A version, rebuilt by a reader that holds nothing."""
    with ThreadPoolExecutor(2) as pool:
        return rebuild(StreamReader.open(store), version, pool)


def read(store: Store, version: int) -> dict[str, Bits]:
    """The bits of a version as a reader that holds nothing gets them."""
    return bits_in(state_at(store, version))


def bits_in(state: State) -> dict[str, Bits]:
    """The bits of a state."""
    return {
        s.name: Bits(s.dtype, s.shape, state.memory.tensor(s.tied_to or s.name).tobytes())
        for s in state.layout
    }


def walk(store: Store) -> Iterator[tuple[VersionManifest, dict[str, Bits]]]:
    """Every version with its bits, as a reader gets them that follows from the first on."""
    reader = StreamReader.open(store)
    chain, version, state = reader.chain(), 0, None
    with ThreadPoolExecutor(2) as pool:
        fetcher = DeltaFetcher(store, pool, 1 << 30)
        while (data := reader.manifest_bytes(version)) is not None:
            position = chain.extend(data) if chain.at else chain.anchor(data, 0)
            if position.manifest.snapshot is not None:
                snapshot = reader.snapshot(position.manifest.snapshot.key, position)
                state = load_snapshot(reader, snapshot, position, pool)
            elif state is not None:
                state = advance(reader, state, position, fetcher, pool)
            assert state is not None
            yield position.manifest, bits_in(state)
            version += 1
    assert reader.listed_versions() == list(range(version))


def assert_version(store: Store, version: int, expected: Mapping[str, Bits]) -> None:
    """The store holds exactly `expected` as `version`."""
    found = read(store, version)
    assert sorted(found) == sorted(expected)
    for name, wanted in expected.items():
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape), name
        assert found[name].data == wanted.data, f"{name} of version {version}"


def chain_of(store: Store) -> list[VersionManifest]:
    """All versions, checked from the first on: contiguous, each bound to the one before, each shard whole."""
    reader = StreamReader.open(store)
    chain = reader.chain()
    found: list[VersionManifest] = []
    while (data := reader.manifest_bytes(len(found))) is not None:
        position = chain.extend(data) if chain.at else chain.anchor(data, 0)
        for shard in position.manifest.shards:
            store.fetch(shard.key, size=shard.size, sha256=shard.sha256)
        found.append(position.manifest)
    assert reader.listed_versions() == list(range(len(found)))
    return found


def rows_of(store: Store, manifest: VersionManifest) -> list[Row]:
    """The rows of a version's delta."""
    with ThreadPoolExecutor(2) as pool:
        return list(DeltaFetcher(store, pool, 1 << 30).rows(manifest))


def changed_places(store: Store, version: int) -> dict[str, list[int]]:
    """For each tensor that `version` changes, the elements that differ from the version before."""
    before, after = read(store, version - 1), read(store, version)
    widths = {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "I32": 4,
        "F32": 4,
        "I64": 8,
        "F64": 8,
        "C64": 8,
    }
    found = {}
    for name, bits in after.items():
        width = widths.get(bits.dtype, 2)
        old = np.frombuffer(before[name].data, f"<u{width}")
        new = np.frombuffer(bits.data, f"<u{width}")
        places = np.flatnonzero(old != new).tolist()
        if places:
            found[name] = places
    return found


def objects_in(store: Store) -> dict[str, int]:
    """Every object, with its size."""
    return {e.key: e.size for e in store.list("")}
