"""TRL's asynchronous GRPO: a `weight_transfer` that publishes.

Written against `WeightTransferProtocol` of `trl.experimental.async_grpo`, TRL 1.16. TRL makes sharded weights whole one
by one and folds adapters into them; parameters that are frozen it does not send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from weightcast.manifest.staleness import Stamp
from weightcast.publisher.publisher import Publisher
from weightcast.schemas.settings import PublisherSettings

from .outlet import TIMEOUT_S, Outlet, drained


class WeightTransfer:
    """Sends TRL's weights to a stream, which engines follow by themselves.

    TRL takes a policy for live once `resume` returns, and marks rollouts so. Give `reached`, and it is.

    Args:
        stream: URL or path of the stream, or an open publisher, which stays the caller's.
        step: the trainer's step, asked for at each sync, such as `lambda: trainer.state.global_step`.
        reached: called with a version that is committed; returns once the engine holds it, such as
            `subscriber.wait_for` beside an engine in this process, or `publisher.wait_for`. Without it `resume`
            waits for the commit alone, and an engine may be behind what TRL takes it for.
        files: makes the companion files that go with the first version, such as `transformers.companions`. Without
            them the stream has weights alone, from which no engine can be started.
        timeout_s: for the commit.
        settings: how to publish; from the environment and defaults if not given.
    """

    def __init__(
        self,
        stream: str | Publisher,
        *,
        step: Callable[[], int] | None = None,
        reached: Callable[[int], object] | None = None,
        files: Callable[[], Mapping[str, bytes]] | None = None,
        timeout_s: float = TIMEOUT_S,
        settings: PublisherSettings | None = None,
    ) -> None:
        self._outlet = Outlet(stream, settings)
        self._step = step
        self._reached = reached
        self._files = files
        self._timeout_s = timeout_s

    def init_weight_transfer(self) -> None:
        """Open the stream."""
        self._outlet.open()

    def pause(self) -> None:
        """Nothing: an engine pauses when it installs, and only for that."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish all tensors. The iterator is walked to its end even on an error, since other ranks walk it too."""
        with drained(iterator) as pairs:
            step = self._step() if self._step is not None else None
            self._outlet.publish(pairs, step=step, files=self._files() if self._files is not None else None)
        self._files = None  # what a version does not name stays as it was

    def resume(self) -> None:
        """Wait until the version is committed, and `reached` has returned."""
        manifest = self._outlet.wait(self._timeout_s)
        if manifest is not None and self._reached is not None:
            self._reached(manifest.version)

    def destroy(self) -> None:
        """Wait for what is on its way, and close. A further `send_weights` opens the stream again."""
        self._outlet.close()

    def stamp(self, timeout_s: float | None = None) -> Stamp | None:
        """The stamp of the last version, once it is committed; None if there is none."""
        return self._outlet.stamp(timeout_s)
