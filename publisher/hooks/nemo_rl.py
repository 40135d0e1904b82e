"""NeMo-RL's checkpoint engines: a `refit_transport` of the form `module:Class`.

    policy.generation.refit_transport: "weightcast.publisher.hooks.nemo_rl:WeightcastEngine"
    policy.generation.refit_cfg:
      "weightcast.publisher.hooks.nemo_rl:WeightcastEngine":
        root: s3://bucket/runs/policy-a
        release_after_refit: true

Written against NeMo-RL at commit 7ea279a (`nemo_rl.utils.checkpoint_engines.base`). vLLM's workers each keep a copy of
the model in host memory, fetch what changed, and hand whole tensors to NeMo-RL's own loader.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from weightcast.schemas.errors import UsageError

from .exchange import Exchange
from .outlet import TIMEOUT_S

BATCH_BYTES: Final = 256 << 20
"""Tensors handed over together, unless NeMo-RL's own bucket is smaller; vLLM loads batch by batch."""


class WeightcastEngine(CheckpointEngine):  # type: ignore[misc]  # the library is not seen by type checks
    """NeMo-RL's interface over a stream. Policy rank 0 publishes; the others only take part in making tensors whole.

    Args:
        bucket_size: bytes of tensors that NeMo-RL holds at once.
        release_after_refit: must be set. NeMo-RL then prepares before every refit, by which a failed one is told from
            the next; without it a worker that missed one could load the wrong version.
        root, timeout_s, device, settings: as of `Exchange`.

    Raises:
        UsageError: `release_after_refit` is not set.
    """

    def __init__(
        self,
        bucket_size: int,
        *,
        root: str,
        release_after_refit: bool = False,
        timeout_s: float = TIMEOUT_S,
        device: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not release_after_refit:
            raise UsageError("release_after_refit is not set", hint="set it to true in refit_cfg")
        self._batch_bytes = min(bucket_size, BATCH_BYTES)
        self._publishes = False
        self._exchange = Exchange(root, timeout_s=timeout_s, device=device, settings=settings)

    def prepare(self) -> dict[str, str]:
        """What all workers are told, of each worker, the policy's first."""
        return self._exchange.offer()

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Take part in the next refit as the policy's worker `worker_rank`."""
        self._publishes = worker_rank == 0
        self._exchange.join(metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Take part in the next refit as a worker of the rollout."""
        self._exchange.join(metadata)

    def finalize(self) -> None:
        """Nothing: publisher and replica serve the next refit too."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `Exchange.send`."""
        await self._exchange.send(weights, publishes=self._publishes)

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        """See `Exchange.receive`; in batches of about `bucket_size` bytes."""
        batch: list[tuple[str, torch.Tensor]] = []
        held = 0
        async for name, tensor in self._exchange.receive():
            if batch and held + tensor.nbytes > self._batch_bytes:
                yield batch
                batch, held = [], 0
            batch.append((name, tensor))
            held += tensor.nbytes
        if batch:
            yield batch
