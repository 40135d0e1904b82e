"""Whole tensors from safetensors files, for ranks that load them; and which changes are patched in place."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from weightcast.codec import Changes, Geometry, Memory, digest_all
from weightcast.manifest.tensorfile import INDEX_NAME, SINGLE_NAME, mapped, read_header
from weightcast.schemas.digest import Digest
from weightcast.schemas.dtypes import TORCH_NAMES
from weightcast.schemas.errors import Corrupt, NotFound, UsageError
from weightcast.schemas.layout import Layout, TensorSpec

log = logging.getLogger("vllm.weightcast")

Bytes = npt.NDArray[np.uint8]

_TORCH: Final = {ours: theirs for theirs, ours in TORCH_NAMES.items()}

_CHUNK_BYTES: Final = 16 << 20  # of one read while files are brought into the page cache


def open_tensors(paths: Iterable[Path], layout: Layout) -> dict[str, Bytes]:
    """The bytes of each stored tensor of `layout`, mapped from the file that has it; no page is read.

    Raises:
        UsageError: no file has a tensor, or it has another dtype or shape there.
        NotFound, Corrupt, StorageError: a file is not a whole safetensors file, or cannot be read.
    """
    found: dict[str, Bytes] = {}
    for path in paths:
        entries = read_header(path)
        with mapped(path) as whole:
            for entry in entries:
                wanted = layout.stored_by_name.get(entry.spec.name)
                if wanted is None:
                    continue
                if (wanted.dtype, wanted.shape) != (entry.spec.dtype, entry.spec.shape):
                    raise UsageError(
                        f"{path}: tensor {wanted.name!r} is {entry.spec.dtype}{list(entry.spec.shape)}, "
                        f"the layout has {wanted.dtype}{list(wanted.shape)}"
                    )
                found[wanted.name] = whole[entry.begin : entry.end]
    missing = next((spec.name for spec in layout.stored if spec.name not in found), None)
    if missing is not None:
        raise UsageError(f"none of the files has tensor {missing!r} of the layout")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, as its index or the usual name says; none if it is no such folder.

    Raises:
        Corrupt: the index cannot be read.
    """
    index = folder / INDEX_NAME
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
    except FileNotFoundError:
        single = folder / SINGLE_NAME
        return [single] if single.is_file() else []
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise Corrupt(f"{index} is not an index of a checkpoint: {error}") from error
    return [folder / str(name) for name in sorted(set(names))]


def checkpoint(folder: str | None, layout: Layout) -> dict[str, Bytes] | None:
    """The tensors of a checkpoint folder; None if there is none, or not one of this layout."""
    try:
        files = weight_files(Path(folder)) if folder else []
        return open_tensors(files, layout) if files else None
    except (UsageError, NotFound, Corrupt) as error:
        log.warning("weightcast: %s is not used: %s", folder, error)
        return None


def as_tensor(spec: TensorSpec, bits: Bytes) -> torch.Tensor:
    """A tensor over mapped bytes. It must not be written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        flat = torch.from_numpy(bits)
    return flat.view(getattr(torch, _TORCH[spec.dtype])).reshape(spec.shape)


def digest_of(paths: Iterable[Path], names: Collection[str], mix: int) -> Digest:
    """Digest of some tensors in safetensors files: all other tensors of a layout add nothing to it.

    mix: of that layout.

    Raises:
        As `open_tensors`.
    """
    files = list(paths)
    specs = [entry.spec for path in files for entry in read_header(path) if entry.spec.name in names]
    layout = Layout.of(specs, mix)
    geometry = Geometry(layout)
    return digest_all(geometry, Memory.over(geometry, open_tensors(files, layout)))


def read_ahead(paths: Iterable[Path]) -> None:
    """Read files through once, so that what is read from them next comes from memory."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(_CHUNK_BYTES):
                pass


def without(geometry: Geometry, changes: Mapping[str, Changes], names: Collection[str]) -> dict[str, Changes]:
    """`changes` but for those of the tensors `names`."""
    kept = {}
    for dtype, part in changes.items():
        space = geometry[dtype]
        inside = np.zeros(len(part), np.bool_)
        for i in (space.index[name] for name in names if name in space.index):
            lo, hi = np.searchsorted(part.positions, space.starts[i : i + 2])
            inside[lo:hi] = True
        keep: npt.NDArray[Any] = ~inside
        kept[dtype] = Changes(dtype, part.positions[keep], part.values[keep]) if inside.any() else part
    return kept
