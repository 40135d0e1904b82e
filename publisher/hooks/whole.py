"""Whether a model is whole in this process: where one process publishes, it must have everything."""

from __future__ import annotations

from itertools import chain

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightcast.publisher.placement import partitioned
from weightcast.schemas.errors import UsageError


def check_sharding(model: torch.nn.Module) -> bool:
    """Check that `model` lies on several ranks as DTensors, or else is whole here; whether it is the former.

    Raises:
        UsageError: as `check_whole`.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return True
    check_whole(model)
    return False


def check_whole(model: torch.nn.Module) -> None:
    """Check that no parameter or buffer of `model` is a shard. Looks at marks alone; no collective.

    Raises:
        UsageError: one is (DTensor, FSDP, ZeRO-3, tensor parallel), or its bits lie in other tensors.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        kind = _kind(tensor)
        if kind:
            raise UsageError(
                f"parameter {name!r} is {kind}, and this hook publishes models that are whole in one process",
                hint="for DTensors use weightcast.publisher.group.GroupPublisher, on all ranks; "
                "otherwise publish checkpoints (weightcast publish --watch)",
            )
    ranks = getattr(model, "tp_size", None)
    if isinstance(ranks, int) and ranks > 1:
        raise UsageError(
            f"the model is tensor-parallel over {ranks} ranks, and this hook publishes models that are whole in one "
            f"process",
            hint="publish the checkpoints that the trainer saves (weightcast publish --watch)",
        )


def _kind(tensor: torch.Tensor) -> str:
    """What keeps a tensor from being whole, or "" if nothing does."""
    how = partitioned(tensor)
    if how:
        return how
    if bool(is_traceable_wrapper_subclass(tensor)):  # bool: nothing is known of its type then
        return f"a {type(tensor).__name__}"
    return f"on {tensor.device}" if tensor.is_meta else ""
