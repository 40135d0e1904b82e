"""accelerate, with one process, DDP or FSDP2: the main process publishes.

What FSDP2 sharded is made whole tensor by tensor, on all ranks: weights pass between the ranks, and no rank ever holds
more than one whole tensor beside its shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex

import torch
from torch.distributed.tensor import DTensor

from weightcast.publisher.job import PendingVersion
from weightcast.publisher.publisher import Publisher
from weightcast.schemas.settings import PublisherSettings

from .outlet import Outlet, drained, walk
from .whole import check_whole


class AcceleratePublisher:
    """Publishes a model that an `Accelerator` prepared. Close it.

    Args:
        accelerator: the `accelerate.Accelerator`.
        stream: URL or path of the stream, or an open publisher, which stays the caller's.
        settings: how to publish; from the environment and defaults if not given.
    """

    def __init__(
        self, accelerator: Any, stream: str | Publisher, settings: PublisherSettings | None = None
    ) -> None:
        self._accelerator = accelerator
        self._outlet = Outlet(stream, settings)

    def publish(
        self,
        model: torch.nn.Module,
        *,
        step: SupportsIndex | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> PendingVersion | None:
        """Publish `model`. To be called by all ranks; None in those that do not publish.

        Raises:
            UsageError: the model is sharded otherwise than by FSDP2 (ZeRO-3, FSDP1, tensor parallel without DTensors).
            WeightcastError: as `Publisher.publish` says; in the main process, after all ranks are through.
        """
        whole: torch.nn.Module = self._accelerator.unwrap_model(model)
        main = bool(self._accelerator.is_main_process)
        if not any(isinstance(p, DTensor) for p in whole.parameters()):
            check_whole(whole)
            return self._outlet.publish(whole.state_dict(), step=step, metadata=metadata) if main else None
        pairs = gathered(whole)
        if not main:
            walk(pairs)
            return None
        with drained(pairs) as source:
            return self._outlet.publish(source, step=step, metadata=metadata)

    def close(self) -> None:
        """Wait for what is on its way, and close. To be called by any rank or all."""
        self._outlet.close()


def gathered(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The state dict of `model` with its DTensors made whole, one at a time: a collective each.

    All ranks must go through all of it. Of a tensor that has several names only the first is given.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        whole = tensor.detach()
        yield name, whole.full_tensor() if isinstance(whole, DTensor) else whole
