"""Any torch optimizer: publishes a model after its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from weightcast.manifest.staleness import Stamp
from weightcast.publisher.closing import Closing
from weightcast.publisher.job import PendingVersion
from weightcast.publisher.publisher import Publisher
from weightcast.schemas.errors import UsageError
from weightcast.schemas.settings import PublisherSettings

from .outlet import Outlet, is_main
from .whole import check_whole


class OptimizerHook(Closing):
    """Publishes `model.state_dict()` after every so many steps of `optimizer`, from within `optimizer.step()`.

    Of several processes rank 0 publishes; the others only count. A step that a gradient scaler skips is none. Where a
    model has several optimizers, hook the one that steps last. Close it, or use it as a context manager.

    Args:
        optimizer: whose steps count.
        model: what to publish; whole in this process.
        stream: URL or path of the stream, or an open publisher, which stays the caller's.
        every: steps between two versions.
        step: steps done before, such as those of the run that this one resumes.
        metadata: makes the metadata of a version when it is published.
        settings: how to publish; from the environment and defaults if not given.

    Raises:
        UsageError: the model is not whole in this process; also from `optimizer.step()`, if that changes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        stream: str | Publisher,
        *,
        every: int = 1,
        step: int = 0,
        metadata: Callable[[], Mapping[str, Any]] = dict,
        settings: PublisherSettings | None = None,
    ) -> None:
        if every < 1:
            raise UsageError(f"every is {every}, expected at least 1 step")
        check_whole(model)
        self.step = step
        self._model = model
        self._every = every
        self._metadata = metadata
        self._outlet = Outlet(stream, settings)
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.step += 1
        if self.step % self._every == 0:
            self.publish()

    def publish(self) -> PendingVersion | None:
        """Publish the model as it is now, such as before the first step; None in a process that does not publish."""
        check_whole(self._model)
        if not is_main():
            return None
        return self._outlet.publish(self._model.state_dict(), step=self.step, metadata=self._metadata())

    def stamp(self, timeout_s: float | None = None) -> Stamp | None:
        """The stamp of the last version, once it is committed; None if there is none."""
        return self._outlet.stamp(timeout_s)

    def close(self) -> None:
        """Stop following the optimizer, and wait for what is on its way. Publishes nothing more."""
        self._handle.remove()
        self._outlet.close()
