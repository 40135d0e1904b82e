"""Tensor-parallel ranks in a trainer's own layout publish a checkpoint: no rank has it, and nothing is gathered."""

from __future__ import annotations

import uuid

import torch

from tests.publisher.group.kit import Crew, agreed, rebuilt
from weightcast.manifest.store import open_store
from weightcast.mapping.converter import record_map
from weightcast.mapping.slices import Slice
from weightcast.schemas.manifest import VersionManifest

from .layouts import Megatron


def test_ranks_in_megatrons_layout_publish_the_checkpoint() -> None:
    shape = Megatron(ranks=2)
    whole = shape.whole(torch.bfloat16)
    url = f"memory://{uuid.uuid4().hex}"
    crew = Crew([open_store(url) for _ in range(2)])
    held = [shape.held(whole, rank) for rank in range(2)]
    maps = [
        record_map(lambda tensors, rank=rank: shape.convert(tensors, rank), held[rank], shape.parts(rank))
        for rank in range(2)
    ]

    def slices(rank: int) -> list[Slice]:
        return list(maps[rank].slices(held[rank]))

    try:
        for version in range(3):
            manifest = agreed(crew.publish(slices, step=version))
            assert isinstance(manifest, VersionManifest), manifest
            assert manifest.version == version
            found = rebuilt(open_store(url))
            assert set(found) == set(whole)
            for name, tensor in whole.items():
                assert torch.equal(
                    found[name].view(torch.int16).reshape(tensor.shape), tensor.view(torch.int16)
                ), name
            if version:
                assert manifest.totals.changed == 3
            # A step: three elements, of which rank 1 trains two; its own copy of the norm changes in both.
            whole["k.weight"].view(torch.int16)[-1, 3] ^= 5
            whole["down.weight"].view(torch.int16)[2, -1] ^= 7
            whole["norm.weight"].view(torch.int16)[4] ^= 9
            for rank in range(2):
                for name, tensor in shape.held(whole, rank).items():
                    held[rank][name].copy_(tensor)
    finally:
        crew.close()
