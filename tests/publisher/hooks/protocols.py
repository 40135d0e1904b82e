"""The interfaces of frameworks that do not install here, re-created as published, and what calls them.

verl 0.9.1: `verl/checkpoint_engine/base.py`. NeMo-RL at commit 7ea279a: `nemo_rl/utils/checkpoint_engines/base.py`,
`nemo_rl/weight_sync/checkpoint_engine_weight_synchronizer.py`. Only what an engine and its callers say to each other.
"""

from __future__ import annotations

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch


class VerlEngine(ABC):
    """verl's `CheckpointEngine`."""

    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class VerlRegistry:
    """verl's `CheckpointEngineRegistry`."""

    engines: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def register(backend: str) -> Callable[[type], type]:
        def wrapper(cls: type) -> type:
            VerlRegistry.engines[backend] = cls
            return cls

        return wrapper

    @classmethod
    def new(cls, backend: str, **kwargs: Any) -> Any:
        return cls.engines[backend](**kwargs)


class VerlManager:
    """`CheckpointEngineManager.update_weights` over workers of this process; rollouts load into dicts."""

    def __init__(self, backend: str, actors: int, rollouts: int, kwargs: Mapping[str, Any]) -> None:
        self.cls = VerlRegistry.engines[backend]
        self.actors = [
            VerlRegistry.new(backend, is_master=rank == 0, bucket_size=1 << 20, **kwargs)
            for rank in range(actors)
        ]
        self.rollouts = [VerlRegistry.new(backend, bucket_size=1 << 20, **kwargs) for _ in range(rollouts)]
        self.loaded: list[dict[str, torch.Tensor]] = [{} for _ in self.rollouts]

    async def update_weights(
        self, weights: Callable[[int], Iterator[tuple[str, torch.Tensor]]], global_steps: int | None = None
    ) -> dict[str, Any]:
        workers = [*self.actors, *self.rollouts]
        metadata = [w.prepare() for w in workers]
        sides = self.cls.build_topology(len(self.actors), len(self.rollouts), metadata)
        for group, kwargs in zip((self.actors, self.rollouts), sides, strict=True):
            assert all(len(values) == len(group) for values in kwargs.values())
            for rank, worker in enumerate(group):
                worker.init_process_group(**{name: values[rank] for name, values in kwargs.items()})
        results = await asyncio.gather(
            *(self._receive(rank, global_steps) for rank in range(len(self.rollouts))),
            *(a.send_weights(weights(rank), global_steps=global_steps) for rank, a in enumerate(self.actors)),
        )
        for worker in workers:
            worker.finalize()
        metrics: dict[str, Any] = {}
        for result in results[len(self.rollouts) :]:
            metrics.update(result or {})
        return metrics

    async def _receive(self, rank: int, global_steps: int | None) -> None:
        async for name, tensor in self.rollouts[rank].receive_weights(global_steps=global_steps):
            self.loaded[rank][name] = tensor.detach().clone()  # as verl's sender copies into its bucket


class NemoEngine(ABC):
    """NeMo-RL's `CheckpointEngine`."""

    shard_expert_weights = False

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    @abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    def finalize(self) -> None:  # noqa: B027 - so published
        ...

    @abstractmethod
    async def send_weights(self, weights: Any) -> None: ...

    @abstractmethod
    def receive_weight_batches(self) -> Any: ...


def nemo_engine(backend: str, *, bucket_size_bytes: int, engine_kwargs: Mapping[str, Any]) -> Any:
    """NeMo-RL's `create_checkpoint_engine`."""
    module, name = backend.split(":", 1)
    return getattr(importlib.import_module(module), name)(bucket_size=bucket_size_bytes, **engine_kwargs)


class NemoSynchronizer:
    """`CheckpointEngineWeightSynchronizer.sync_weights` over workers of this process; rollouts load into dicts."""

    def __init__(self, backend: str, policy: int, rollouts: int, kwargs: Mapping[str, Any]) -> None:
        def make() -> Any:
            return nemo_engine(backend, bucket_size_bytes=1 << 10, engine_kwargs=kwargs)

        self.policy = [make() for _ in range(policy)]
        self.rollouts = [make() for _ in range(rollouts)]
        self.loaded: list[dict[str, torch.Tensor]] = [{} for _ in self.rollouts]
        self.batches: list[int] = []
        self._kwargs = kwargs
        self._ready = False

    async def sync_weights(self, weights: Callable[[int], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._ensure_ready()
        try:
            await asyncio.gather(
                *(self._receive(rank) for rank in range(len(self.rollouts))),
                *(p.send_weights(weights(rank)) for rank, p in enumerate(self.policy)),
            )
        finally:
            if self._kwargs["release_after_refit"]:
                for worker in (*self.policy, *self.rollouts):
                    worker.finalize()
                self._ready = False

    def _ensure_ready(self) -> None:
        if self._ready:
            return
        metadata = [
            {**w.prepare(), "rank": rank}
            for group in (self.policy, self.rollouts)
            for rank, w in enumerate(group)
        ]
        sizes = {
            "train_world_size": len(self.policy),
            "rollout_world_size": len(self.rollouts),
            "metadata": metadata,
        }
        for rank, worker in enumerate(self.policy):
            worker.init_policy_process_group(worker_rank=rank, **sizes)
        for rank, worker in enumerate(self.rollouts):
            worker.init_rollout_process_group(rollout_rank=rank, **sizes)
        self._ready = True

    async def _receive(self, rank: int) -> None:
        async for batch in self.rollouts[rank].receive_weight_batches():
            self.batches.append(len(batch))
            self.loaded[rank].update({name: tensor.detach().clone() for name, tensor in batch})
