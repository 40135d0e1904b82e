"""accelerate, with one process, DDP or FSDP2: each rank publishes its own slices; no weights pass between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist

from weightcast.publisher.group import GroupPublisher
from weightcast.publisher.job import PendingVersion
from weightcast.publisher.publisher import Publisher
from weightcast.schemas.settings import PublisherSettings

from .outlet import GroupOutlet, Outlet, outlet_of
from .whole import check_sharding


class AcceleratePublisher:
    """Publishes a model that an `Accelerator` prepared. All ranks make it, use it and close it alike.

    Args:
        accelerator: the `accelerate.Accelerator`.
        stream: URL or path of the stream; or an open publisher, which stays the caller's: a `Publisher` where there is
            one process, a `GroupPublisher` where there are several.
        settings: how to publish; from the environment and defaults if not given. Not for an open publisher.
    """

    def __init__(
        self,
        accelerator: Any,
        stream: str | Publisher | GroupPublisher,
        settings: PublisherSettings | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._settings = settings
        self._stream = stream
        self._outlet: Outlet | GroupOutlet | None = None

    def publish(
        self,
        model: torch.nn.Module,
        *,
        step: SupportsIndex | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> PendingVersion:
        """Publish `model`. To be called by all ranks; the version ends in the same way on all of them.

        Raises:
            UsageError: the model is sharded otherwise than by FSDP2 (ZeRO-3, FSDP1, tensor parallel without DTensors).
            WeightcastError: as `GroupPublisher.publish`, or with one process `Publisher.publish`, says.
        """
        whole: torch.nn.Module = self._accelerator.unwrap_model(model)
        sharded = check_sharding(whole)
        if self._outlet is None:
            several = dist.is_initialized() and dist.get_world_size() > 1
            group = sharded or several or isinstance(self._stream, GroupPublisher)
            self._outlet = outlet_of(self._stream, self._settings, group=group)
        return self._outlet.publish(whole.state_dict(), step=step, metadata=metadata)

    def close(self) -> None:
        """Wait for what is on its way, and close. Before `accelerator.end_training()`."""
        if self._outlet is not None:
            self._outlet.close()
