"""What the tests of subscribers share: models with every dtype, and loaders that follow the rules of Hugging Face."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from ..versions import Bits, bits_of

Model = dict[str, torch.Tensor]


def loaded(folder: Path) -> dict[str, Bits] | None:
    """What a loader finds: the single file, else what the index names; None if there is neither."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return file_bits(single)
    if not index.exists():
        return None
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = {name: file_bits(folder / name) for name in set(places.values())}
    return {tensor: files[name][tensor] for tensor, name in places.items()}


def file_bits(path: Path) -> dict[str, Bits]:
    """The tensors of a safetensors file, read without any code of ours."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    body = 8 + length
    return {
        name: Bits(
            e["dtype"], tuple(e["shape"]), raw[body + e["data_offsets"][0] : body + e["data_offsets"][1]]
        )
        for name, e in header.items()
    }


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, Bits]:
    """A copy of the bits of tensors."""
    return {name: bits_of(tensor) for name, tensor in tensors.items()}


def random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random bits, NaN payloads and denormals among them, under the dtype and shape of `tensor`."""
    count = tensor.numel() * tensor.element_size()
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if tensor.dtype is torch.bool:
        raw &= 1
    return raw.view(tensor.dtype).reshape(tensor.shape) if count else tensor.clone()


def every_dtype(seed: int = 0) -> Model:
    """A model with every kind of tensor there is: random bits."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "bf16.big": (torch.bfloat16, (300, 400)),
        "bf16.small": (torch.bfloat16, (7,)),
        "bf16.scalar": (torch.bfloat16, ()),
        "bf16.empty": (torch.bfloat16, (0, 4)),
        "f16": (torch.float16, (33, 5)),
        "f32": (torch.float32, (129, 3)),
        "f32.scalar": (torch.float32, ()),
        "f64": (torch.float64, (17,)),
        "c64": (torch.complex64, (9, 2)),
        "e4m3": (torch.float8_e4m3fn, (64, 65)),
        "e5m2": (torch.float8_e5m2, (31,)),
        "i8": (torch.int8, (101,)),
        "int4.packed": (torch.uint8, (40, 8)),
        "i32": (torch.int32, (8, 2)),
        "i64.scalar": (torch.int64, ()),
        "bool": (torch.bool, (50,)),
    }
    generator = torch.Generator().manual_seed(seed)
    return {
        name: random_like(torch.empty(shape, dtype=dtype), generator)
        for name, (dtype, shape) in shapes.items()
    }


def stir(model: Model, seed: int, share: float = 0.02) -> Model:
    """A copy in which about `share` of the elements of each tensor have other random bits; at least one has."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in model.items():
        fresh = random_like(tensor, generator)
        mask = torch.rand(tensor.shape, generator=generator) < share
        if tensor.numel():
            mask.view(-1)[seed % tensor.numel()] = True
        wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        changed[name] = torch.where(mask, fresh.view(wide), tensor.view(wide)).view(tensor.dtype)
    return changed


def blank(model: Model) -> Model:
    """Zeros of the same dtypes and shapes."""
    return {name: torch.zeros_like(tensor) for name, tensor in model.items()}
