"""verl's checkpoint-engine registry: the backend `weightcast`.

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightcast
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightcast.publisher.hooks.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weightcast.root=s3://bucket/runs/policy-a

Written against verl 0.9.1 (`verl.checkpoint_engine.base`). The rollout's workers each keep a copy of the model in host
memory, fetch what changed, and hand whole tensors to verl's own loader.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from .exchange import Exchange
from .outlet import TIMEOUT_S


@CheckpointEngineRegistry.register("weightcast")
class WeightcastEngine(CheckpointEngine):  # type: ignore[misc]  # the library is not seen by type checks
    """verl's interface over a stream. Actor rank 0 publishes; the other actors only take part in making tensors whole.

    Args:
        bucket_size: of verl's own transports; of no use here.
        is_master: whether this is actor rank 0.
        root, timeout_s, device, settings: as of `Exchange`.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        root: str,
        timeout_s: float = TIMEOUT_S,
        device: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.is_master = is_master
        self._exchange = Exchange(root, timeout_s=timeout_s, device=device, settings=settings)

    def prepare(self) -> dict[str, str]:
        """What `build_topology` is given, of each worker; verl asks before every sync."""
        return self._exchange.offer()

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell all workers the offer of actor rank 0."""
        first = metadata[:1]
        return {"metadata": [first] * actor_wg_world_size}, {"metadata": [first] * rollout_world_size}

    def init_process_group(self, metadata: list[Any]) -> None:
        """Take part in the next sync."""
        self._exchange.join(metadata)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """See `Exchange.send`."""
        return await self._exchange.send(weights, publishes=self.is_master, step=global_steps)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """See `Exchange.receive`."""
        async for pair in self._exchange.receive():
            yield pair

    def finalize(self) -> None:
        """Nothing: publisher and replica serve the next sync too."""
