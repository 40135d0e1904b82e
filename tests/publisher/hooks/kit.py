"""What tests of hooks share: a follower, bits compared, a tiny language model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from weightcast.manifest.inspect import log
from weightcast.manifest.inspect.values import LogEntry
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.subscriber import Subscriber, Tensors

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reader_at(root: str) -> StreamReader:
    """A reader of the stream."""
    return StreamReader.open(open_store(root))


def versions(root: str) -> list[LogEntry]:
    """All versions of the stream, oldest first."""
    return log(reader_at(root), limit=1000)[::-1]


def copied(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """A trainer's tensors as they are now."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: tensor.detach().clone() for name, tensor in pairs}


def followed(root: str, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a subscriber that starts from other bits has at the head: names, dtypes and shapes as in `like`."""
    engine = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with Subscriber(root, Tensors(engine)) as subscriber:
        subscriber.once()
    return engine


def assert_same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        width = _BITS[tensor.element_size()]
        assert torch.equal(found[name].contiguous().view(width), tensor.contiguous().view(width)), name


def tiny_qwen3(**changes: Any) -> Any:
    """A Qwen3 of two layers with a tied head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(sizes | changes)))


def sharded(model: Any) -> Any:
    """`model` under FSDP2 on two ranks, each layer by itself, some parameters in uneven parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
