"""accelerate, with one process, DDP or FSDP2: each rank publishes its own slices; no weights pass between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weightcast.publisher.group import GroupPublisher
from weightcast.publisher.job import PendingVersion
from weightcast.publisher.publisher import Publisher
from weightcast.schemas.errors import UsageError
from weightcast.schemas.settings import PublisherSettings

from .outlet import Outlet
from .whole import check_whole


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
        self._group = stream if isinstance(stream, GroupPublisher) else None
        self._outlet = None if isinstance(stream, GroupPublisher) else Outlet(stream, settings)
        self._last: PendingVersion | None = None

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
        if not any(isinstance(p, DTensor) for p in whole.parameters()):
            check_whole(whole)
        tensors = whole.state_dict()
        if self._outlet is not None and not (dist.is_initialized() and dist.get_world_size() > 1):
            return self._outlet.publish(tensors, step=step, metadata=metadata)
        pending = self._opened().publish(tensors, step=step, metadata=metadata)
        if pending is None:
            raise UsageError("the version was skipped, although it was to wait for the one before")
        self._last = pending
        return pending

    def _opened(self) -> GroupPublisher:
        if self._group is None:
            if not isinstance(self._stream, str):
                raise UsageError(
                    "an open Publisher is of one process, and there are several",
                    hint="pass the stream's URL, or an open GroupPublisher, on all ranks",
                )
            self._group = GroupPublisher(self._stream, settings=self._settings)
        return self._group

    def close(self) -> None:
        """Wait for what is on its way, and close. Before `accelerator.end_training()`."""
        if self._outlet is not None:
            self._outlet.close()
        if self._group is not None and not isinstance(self._stream, GroupPublisher):
            self._group.close()
        elif self._last is not None:
            self._last.wait()
