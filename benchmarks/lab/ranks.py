"""One rank of a sharded model that is published by all ranks, and then by one of them that gathers it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from weightcast.publisher import Publisher, PublisherSettings
from weightcast.publisher.group import GroupPublisher
from weightcast.schemas.manifest import VersionManifest
from weightcast.subscriber import Subscriber, SubscriberSettings, Tensors

from .memory import give_back, peak
from .models import ModelSpec, check_same
from .traffic import CountedMessenger, Traffic, traffic

WAYS: Final = ("own", "gather")
"""Every rank publishes its own; or rank 0 all of it, gathered tensor by tensor."""

PATIENCE_S: Final = 60.0
"""Seconds that ranks wait for each other."""

_COLUMNS: Final = 256  # of each tensor, so that it has rows to be sharded
_WARM: Final = 2  # versions that are not timed: a whole one, and one in which bytes and memory are counted


class RanksJob(BaseModel):
    """What the ranks are to do.

    Attributes:
        model: what they have together, in tensors of as many rows as all ranks divide.
        ranks: how many there are.
        threads: of each rank.
        versions: that are timed.
        port: where rank 0 is found, on 127.0.0.1.
        folder: for the streams.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSpec
    ranks: int
    threads: int
    versions: int
    port: int
    folder: Path


def rank(job: RanksJob, number: int) -> dict[str, dict[str, Any]]:
    """Be rank `number`: figures by way."""
    torch.set_num_threads(job.threads)
    patience = timedelta(seconds=PATIENCE_S)
    address = f"tcp://127.0.0.1:{job.port}"
    dist.init_process_group("gloo", address, patience, world_size=job.ranks, rank=number)
    mesh = init_device_mesh("cpu", (job.ranks,))
    found = {way: _measure(job, way, mesh) for way in WAYS}
    dist.barrier()  # rank 0 keeps the store by which they find each other
    dist.destroy_process_group()
    return found


class Way(ABC):
    """How versions are published; all ranks call alike.

    Attributes:
        text_bytes: of the texts that this rank said and heard.
    """

    @abstractmethod
    def publish(self, tensors: dict[str, DTensor], version: int) -> None:
        """Returns when the tensors may be changed."""

    @abstractmethod
    def wait(self) -> VersionManifest | None:
        """Returns when the version is committed; None on a rank that does not know."""

    @abstractmethod
    def close(self) -> None:
        """Publish no more."""

    text_bytes = 0


class Own(Way):
    """`GroupPublisher`: every rank its own."""

    def __init__(self, root: str, settings: PublisherSettings) -> None:
        self._messenger = CountedMessenger(PATIENCE_S)
        self._publisher = GroupPublisher(root, self._messenger, settings)

    def publish(self, tensors: dict[str, DTensor], version: int) -> None:
        """See `Way`."""
        self._pending = self._publisher.publish(tensors, step=version)

    def wait(self) -> VersionManifest | None:
        """See `Way`."""
        manifest = self._pending.wait() if self._pending is not None else None
        self.text_bytes = self._messenger.nbytes
        return manifest

    def close(self) -> None:
        """See `Way`."""
        self._publisher.close()


class Gather(Way):
    """A `Publisher` on rank 0, for which all ranks gather one tensor after the other."""

    def __init__(self, root: str, settings: PublisherSettings) -> None:
        self._publisher = Publisher(root, settings) if dist.get_rank() == 0 else None

    def publish(self, tensors: dict[str, DTensor], version: int) -> None:
        """See `Way`."""
        whole: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            gathered = tensor.full_tensor()
            if self._publisher is not None:
                whole[name] = gathered
        self._pending = self._publisher.publish(whole, step=version) if self._publisher is not None else None

    def wait(self) -> VersionManifest | None:
        """See `Way`."""
        return self._pending.wait() if self._pending is not None else None

    def close(self) -> None:
        """See `Way`."""
        if self._publisher is not None:
            self._publisher.close()


@dataclass
class _Figures:
    """Of one rank: seconds and bytes by version; and of one version memory, and what passed between ranks."""

    returned_s: list[float] = field(default_factory=list)
    committed_s: list[float] = field(default_factory=list)
    uploaded_bytes: list[int] = field(default_factory=list)
    extra_bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0
    text_bytes: int = 0


def _measure(job: RanksJob, kind: str, mesh: DeviceMesh) -> dict[str, Any]:
    source, root = job.model.make(), str(job.folder / kind)
    whole = {name: tensor.view(-1, _COLUMNS) for name, tensor in source.tensors().items()}
    shards = {name: _shard(tensor, mesh) for name, tensor in whole.items()}
    settings = PublisherSettings(threads=job.threads, snapshot_every=0)
    figures = _Figures()
    with closing(Own(root, settings) if kind == "own" else Gather(root, settings)) as way:
        for version in range(_WARM + job.versions):
            dist.barrier()  # nobody works while another one's time is taken
            if version:
                source.move({name: tensor.view(-1) for name, tensor in whole.items()})
            _one(way, shards, version, figures)
        dist.barrier()
    if dist.get_rank() == 0:
        _check(root, whole)
    return vars(figures)


def _shard(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of a tensor that every rank has, as a DTensor: its memory is theirs."""
    rows = whole.chunk(mesh.size())[mesh.get_rank()]
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _one(way: Way, shards: dict[str, DTensor], version: int, figures: _Figures) -> None:
    """Publish a version; of the first delta bytes and memory are counted, of those after it the times."""
    texts = way.text_bytes
    counting = version == _WARM - 1
    if counting:
        give_back()
    dist.barrier()
    with peak() as memory, traffic() if counting else nullcontext(Traffic()) as counted:
        begin = time.perf_counter()
        way.publish(shards, version)
        returned = time.perf_counter() - begin
        manifest = way.wait()
        committed = time.perf_counter() - begin
    if counting:
        figures.collectives, figures.collective_bytes = counted.calls, counted.nbytes
        figures.text_bytes = way.text_bytes - texts
        figures.extra_bytes = memory.extra
    if version >= _WARM:
        figures.returned_s.append(returned)
        figures.committed_s.append(committed)
        figures.uploaded_bytes.append(_uploaded(manifest, isinstance(way, Own)))


def _uploaded(manifest: VersionManifest | None, own: bool) -> int:
    """Bytes of this rank's shards: their names have its number."""
    if manifest is None:
        return 0
    mine = f".{dist.get_rank()}-" if own else ""
    return sum(shard.size for shard in manifest.shards if mine in shard.key)


def _check(root: str, whole: dict[str, Tensor]) -> None:
    """Stop if a reader does not get the very bits."""
    replica = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    with Subscriber(root, Tensors(replica), SubscriberSettings(lease=False)) as subscriber:
        subscriber.once()
    check_same(whole, replica)
