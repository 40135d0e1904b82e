"""A group of ranks that are threads, on one store in memory."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weightcast.codec import Geometry, Interval, Memory, decode, digest, scatter
from weightcast.codec.boxes import Box, encode_box
from weightcast.codec.update import update_box
from weightcast.manifest.rebuild import rebuild
from weightcast.manifest.store import Store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher.group import GroupPublisher, TorchMessenger
from weightcast.publisher.placement import Slice
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.settings import PublisherSettings
from weightcast.subscriber import Subscriber, SubscriberSettings, Tensors

T = TypeVar("T")

RANKS = 3

TIMEOUT_S = 60.0


class Crew:
    """Ranks of one group, each with a store of its own (which may fail by itself)."""

    def __init__(self, stores: list[Any], *, timeout_s: float = TIMEOUT_S, **options: Any) -> None:
        self.stores = stores
        self.size = len(stores)
        keys = dist.HashStore()
        settings = PublisherSettings(threads=1, **options.pop("settings", {}))
        self.messengers = [TorchMessenger.over(keys, rank, self.size, timeout_s) for rank in range(self.size)]
        opened = together(
            [
                lambda r=rank: GroupPublisher("", self.messengers[r], settings, store=stores[r], **options)
                for rank in range(self.size)
            ]
        )
        self.publishers: list[GroupPublisher] = [raised(p) for p in opened]

    def publish(
        self, tensors: Callable[[int], Any], **options: Any
    ) -> list[VersionManifest | WeightcastError | None]:
        """Publish what `tensors` gives each rank, and wait: by rank the manifest, or the error, or None."""

        def one(rank: int) -> VersionManifest | None:
            pending = self.publishers[rank].publish(tensors(rank), **options)
            return pending.wait(TIMEOUT_S) if pending is not None else None

        return together([lambda r=rank: one(r) for rank in range(self.size)])

    def close(self) -> None:
        """All ranks; errors that nobody was told of are let go."""
        together([publisher.close for publisher in self.publishers])


def together(calls: list[Callable[[], T]]) -> list[Any]:
    """Outcomes of calls made at the same time: values, or the errors raised."""
    outcomes: list[Any] = [None] * len(calls)

    def one(at: int) -> None:
        try:
            outcomes[at] = calls[at]()
        except WeightcastError as error:
            outcomes[at] = error

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def raised(outcome: Any) -> Any:
    """The value of an outcome that is none of an error."""
    if isinstance(outcome, WeightcastError):
        raise outcome
    return outcome


def agreed(outcomes: list[Any]) -> Any:
    """The outcome of all ranks, which must be the same: a manifest, None, or an error of one class and message."""
    first = outcomes[0]
    for other in outcomes[1:]:
        if isinstance(first, WeightcastError):
            assert (type(other), str(other)) == (type(first), str(first))
        else:
            assert other == first
    return first


def published(outcomes: list[Any]) -> VersionManifest:
    """The version that all ranks say was committed."""
    manifest = agreed(outcomes)
    assert isinstance(manifest, VersionManifest), manifest
    return manifest


def rows(whole: Mapping[str, torch.Tensor], rank: int, size: int) -> list[Slice]:
    """A rank's rows of every tensor, as FSDP divides them; the last rank may have none."""
    found = []
    for name, tensor in whole.items():
        each = -(-tensor.shape[0] // size)
        begin = min(rank * each, tensor.shape[0])
        start = (begin, *(0 for _ in tensor.shape[1:]))
        found.append(Slice(name, tuple(tensor.shape), start, tensor[begin : begin + each]))
    return found


def columns(whole: Mapping[str, torch.Tensor], rank: int, size: int) -> list[Slice]:
    """A rank's columns of every matrix, as tensor parallelism divides them; of other tensors all."""
    found = []
    for name, tensor in whole.items():
        begin, end = 0, tensor.shape[-1]
        if tensor.dim() == 2:
            begin, end = (tensor.shape[1] * (rank + i) // size for i in (0, 1))
        start = (*(0 for _ in tensor.shape[:-1]), begin)
        found.append(Slice(name, tuple(tensor.shape), start, tensor[..., begin:end]))
    return found


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes and shapes, some too short for every rank."""
    torch.manual_seed(seed)
    return {
        "embed.weight": torch.randn(300, 64).bfloat16(),
        "layer.up.weight": torch.randn(129, 257).bfloat16(),
        "layer.down.weight": torch.randn(64, 128),
        "layer.norm.weight": torch.randn(65).bfloat16(),
        "experts": torch.randn(3, 20, 30).half(),
        "counts": torch.arange(2),
    }


def stir(whole: Mapping[str, torch.Tensor], seed: int, share: float = 0.01) -> None:
    """Change a share of the elements of every tensor, at least one, in place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in whole.values():
        flat = tensor.view(-1)
        count = max(1, int(share * len(flat)))
        flat[torch.randperm(len(flat), generator=generator)[:count]] += 1


def held_by_a_subscriber(store: Store, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a fresh subscriber has at the head."""
    engine = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with Subscriber("", Tensors(engine), SubscriberSettings(threads=1), store=store) as subscriber:
        subscriber.once()
    return engine


def rebuilt(store: Store) -> dict[str, torch.Tensor]:
    """The head as its deltas lead there, whatever its layout: unsigned bits by name."""
    reader = StreamReader.open(store)
    with ThreadPoolExecutor(1) as pool:
        state = rebuild(reader, head(store) or 0, pool)
    return {s.name: torch.from_numpy(state.memory.tensor(s.name).copy()) for s in state.layout.stored}


def head(store: Store) -> int | None:
    """The newest version."""
    return StreamReader.open(store).head()


def warm() -> None:
    """Load, or compile, the loops over elements, in this thread alone: for a process that forks ranks after that."""
    for dtype, kind in (
        ("BF16", torch.bfloat16),
        ("F32", torch.float),
        ("F16", torch.half),
        ("I64", torch.int64),
    ):
        geometry = Geometry(Layout.of([TensorSpec("w", dtype, (64, 8))]))
        space = geometry[dtype]
        for box in (Box(dtype, 0, 256, 4, 8), Box(dtype, 0, 512)):
            for changed in (1, 200):
                old, new = (torch.zeros(box.length, dtype=kind) for _ in range(2))
                new[:changed] = 1
                encode_box(space, box, new.data_ptr(), None)
                row = encode_box(space, box, new.data_ptr(), old.data_ptr()).row
                whole = Memory.allocate(geometry)
                if row is not None:
                    scatter(space, whole, decode(space, row, whole)[0])
                    update_box(space, row, old.data_ptr())
        digest(space, whole, Interval(dtype, 0, 512))


def keep_stores(count: int) -> list[int]:
    """Ports of so many TCPStores, served by a process that ends with this one: for a process that forks ranks.

    A store is a thread with sockets. A process forked beside it takes the sockets along, and ranks that connect can
    then wait for ever.
    """
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=_keep, args=(there, count), daemon=True).start()
    return [int(port) for port in here.recv()]


def _keep(pipe: Connection, count: int) -> None:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(count)]
    pipe.send([store.port for store in stores])
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
