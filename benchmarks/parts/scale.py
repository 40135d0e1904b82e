"""How costs grow: with elements, with tensors, with subscribers. With versions behind: see `catchup`."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, Final, cast

import torch
from torch import Tensor

from weightcast.manifest.store import Store, open_store
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.subscriber import CheckpointFolder, Subscriber, SubscriberSettings, Tensors

from ..lab.models import Flipping, check_same
from ..lab.seaweed import seaweed, weed_program
from ..lab.witness import Witness
from ..part import Options
from ..report import milliseconds, number
from ..result import Line, Plot, Ratio, Result, Table

_POWERS: Final = (20, 22, 24, 26, 28)
_TENSORS: Final = (100, 1_000, 10_000, 100_000)
_TENSOR_ELEMENTS: Final = 6_400_000  # of all tensors together
_SUBSCRIBERS: Final = (1, 2, 4, 8, 16, 32)
_DENSITY: Final = 0.01
_OVERHEAD_BAR_S: Final = 2.0
_MANIFEST_BAR_KIB: Final = 64.0
_VERSIONS: Final = 8


def run(options: Options) -> Result:
    """Each by itself."""
    rounds = options.pick(3, 1)
    elements = [_elements(1 << p, rounds) for p in ((19, 20) if options.quick else _POWERS)]
    tensors = [_tensors(n, rounds) for n in ((10, 100) if options.quick else _TENSORS)]
    with _root(options) as root:
        crowd = [_crowd(f"{root}/{n}", n, options) for n in ((1, 2) if options.quick else _SUBSCRIBERS)]
    return Result(
        part="scale",
        tables=[_elements_table(elements), _tensors_table(tensors), _crowd_table(crowd)],
        plots=_plots(elements, crowd),
        ratios=_ratios(tensors, crowd),
        figures={"elements": elements, "tensors": tensors, "subscribers": crowd},
    )


def _elements(count: int, rounds: int) -> dict[str, float]:
    """Best seconds of publish to commit, and of apply, for a model of `count` bf16 elements."""
    layer = min(count // 4, 1 << 22)
    source = Flipping(max(1, count >> 19), _DENSITY, layer)
    model, replica = source.tensors(), source.tensors()
    best = {"publish_s": float("inf"), "apply_s": float("inf")}
    with (
        tempfile.TemporaryDirectory(prefix="weightcast-bench-") as root,
        Publisher(root, PublisherSettings(snapshot_every=0)) as publisher,
        Subscriber(root, Tensors(replica), SubscriberSettings(lease=False)) as subscriber,
    ):
        publisher.publish(model, step=0).wait()
        subscriber.once()
        for turn in range(rounds + 1):
            source.move(model)
            times = [time.perf_counter()]
            publisher.publish(model, step=turn + 1).wait()
            times.append(time.perf_counter())
            subscriber.once()
            times.append(time.perf_counter())
            if turn:  # the first compiles the kernels
                best["publish_s"] = min(best["publish_s"], times[1] - times[0])
                best["apply_s"] = min(best["apply_s"], times[2] - times[1])
        check_same(model, replica)
    return {"elements": sum(t.numel() for t in model.values()), **best}


def _tensors(count: int, rounds: int) -> dict[str, float]:
    """Best seconds of publish (to the commit) and of apply, for the same elements in `count` tensors."""
    torch.manual_seed(0)
    flat = (torch.randn(_TENSOR_ELEMENTS) * 0.02).bfloat16()
    names = [f"model.layers.{i // 100}.block.{i % 100}.weight" for i in range(count)]
    model = dict(zip(names, (t.clone() for t in torch.chunk(flat, count)), strict=True))
    replica = {name: tensor.clone() for name, tensor in model.items()}
    best: dict[str, float] = {}
    manifest_bytes = wire_bytes = 0
    settings = SubscriberSettings(lease=False)
    with (
        tempfile.TemporaryDirectory(prefix="weightcast-bench-") as root,
        tempfile.TemporaryDirectory(prefix="weightcast-bench-") as folder,
        Publisher(root, PublisherSettings(snapshot_every=0)) as publisher,
        Subscriber(root, Tensors(replica), settings) as tensors,
        Subscriber(root, CheckpointFolder(folder), settings) as kept,
    ):
        publisher.publish(model, step=0).wait()
        tensors.once()
        kept.once()
        for turn in range(rounds + 1):
            _nudge(list(model.values()))
            times = [time.perf_counter()]
            manifest = publisher.publish(model, step=turn + 1).wait()
            times.append(time.perf_counter())
            tensors.once()
            times.append(time.perf_counter())
            kept.once()
            times.append(time.perf_counter())
            if turn == 0:
                continue  # compiles the kernels
            for name, begin, end in zip(("publish", "tensors", "folder"), times, times[1:], strict=False):
                best[f"{name}_s"] = min(best.get(f"{name}_s", end - begin), end - begin)
            manifest_bytes, wire_bytes = len(manifest.encode()), manifest.totals.bytes
    check_same(model, replica)
    return {"tensors": count, "manifest_bytes": manifest_bytes, "wire_bytes": wire_bytes, **best}


def _nudge(tensors: Sequence[Tensor]) -> None:
    """Change `_DENSITY` of all elements by one bf16 step, in place."""
    bits = torch.cat(tuple(tensors)).view(torch.int16)
    bits[torch.rand(len(bits)) < _DENSITY] += 1
    for tensor, part in zip(tensors, torch.chunk(bits, len(tensors)), strict=True):
        tensor.view(torch.int16).copy_(part)


@contextmanager
def _root(options: Options) -> Iterator[str]:
    """Where subscribers meet: S3 on the loopback interface, or a folder."""
    if options.quick or weed_program() is None:
        with tempfile.TemporaryDirectory(prefix="weightcast-bench-") as folder:
            yield folder
    else:
        with seaweed() as server:
            yield server.root


def _crowd(root: str, count: int, options: Options) -> dict[str, Any]:
    """Seconds to the first and to the last of `count` subscribers, which are threads of this process.

    They count from when the store is asked for the commit: the answer may be here after the first has applied it.
    """
    source = Flipping(1, _DENSITY, 1 << 17)
    model = source.tensors()
    arrived: list[dict[int, float]] = [{} for _ in range(count)]
    with ExitStack() as stack:
        store = Witness(open_store(root))
        settings = PublisherSettings(snapshot_every=0)
        publisher = stack.enter_context(Publisher(root, settings, store=cast(Store, store)))
        publisher.publish(model, step=0).wait()
        follows = SubscriberSettings(lease=False, threads=1)
        subscribers = [Subscriber(root, Tensors(source.tensors()), follows) for _ in range(count)]
        threads = [
            threading.Thread(target=_follow, args=pair) for pair in zip(subscribers, arrived, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            stack.callback(thread.join)
        for subscriber in subscribers:
            stack.callback(subscriber.close)
        _until(lambda: all(0 in seen for seen in arrived))
        first, last = [], []
        for turn in range(options.pick(_VERSIONS, 2) + 1):
            source.move(model)
            version = publisher.publish(model, step=turn + 1).wait().version
            _until(lambda version=version: all(version in seen for seen in arrived))
            if turn:
                first.append(min(seen[version] for seen in arrived) - store.asked_at)
                last.append(max(seen[version] for seen in arrived) - store.asked_at)
            time.sleep(0.3)
    return {"subscribers": count, "first_s": median(first), "last_s": median(last)}


def _follow(subscriber: Subscriber, arrived: dict[int, float]) -> None:
    for position in subscriber.follow():
        arrived[position.version] = time.monotonic()


def _until(done: Any) -> None:
    deadline = time.monotonic() + 60
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit("a subscriber did not arrive in 60 s")
        time.sleep(0.002)


def _elements_table(found: Sequence[dict[str, float]]) -> Table:
    return Table(
        title="Elements: publish to commit and apply, local store, 1 % changed",
        head=["elements", "publish, ms", "apply, ms", "publish, ns an element", "apply, ns a change"],
        rows=[
            [
                f"{f['elements']:,.0f}",
                milliseconds(f["publish_s"]),
                milliseconds(f["apply_s"]),
                number(1e9 * f["publish_s"] / f["elements"]),
                number(1e9 * f["apply_s"] / (_DENSITY * f["elements"])),
            ]
            for f in found
        ],
    )


def _tensors_table(found: Sequence[dict[str, float]]) -> Table:
    few = found[0]
    head = [
        "tensors",
        "publish, ms",
        "apply to tensors, ms",
        "apply to a folder, ms",
        "publish + apply beyond the first row, s",
        "manifest, bytes",
        "shards, bytes",
    ]
    return Table(
        title=f"Tensors: {_TENSOR_ELEMENTS / 1e6:.1f} million bf16 elements, 1 % changed",
        head=head,
        rows=[
            [
                f"{f['tensors']:,.0f}",
                *(milliseconds(f[f"{phase}_s"]) for phase in ("publish", "tensors", "folder")),
                f"{f['publish_s'] + f['tensors_s'] - few['publish_s'] - few['tensors_s']:.2f}",
                f"{f['manifest_bytes']:,.0f}",
                f"{f['wire_bytes']:,.0f}",
            ]
            for f in found
        ],
    )


def _crowd_table(found: Sequence[dict[str, Any]]) -> Table:
    return Table(
        title="Subscribers: commit to applied, half a million elements, S3 on loopback",
        head=["subscribers", "the first, ms", "the last, ms"],
        rows=[[str(f["subscribers"]), milliseconds(f["first_s"]), milliseconds(f["last_s"])] for f in found],
        note="All are threads of one process, and share two cores with the server. Times count from when the server is "
        "asked to create the manifest.",
    )


def _plots(elements: Sequence[dict[str, float]], crowd: Sequence[dict[str, Any]]) -> list[Plot]:
    def line(label: str, found: Sequence[dict[str, Any]], x: str, y: str, scale: float = 1.0) -> Line:
        return Line(label=label, x=[float(f[x]) for f in found], y=[scale * f[y] for f in found])

    return [
        Plot(
            name="scale-elements",
            title="Publish and apply over elements",
            x="elements",
            y="seconds",
            lines=[
                line("publish to commit", elements, "elements", "publish_s"),
                line("apply", elements, "elements", "apply_s"),
            ],
            log_x=True,
            log_y=True,
        ),
        Plot(
            name="scale-subscribers",
            title="Commit to applied over subscribers",
            x="subscribers",
            y="ms",
            lines=[
                line("the first", crowd, "subscribers", "first_s", 1e3),
                line("the last", crowd, "subscribers", "last_s", 1e3),
            ],
        ),
    ]


def _ratios(tensors: Sequence[dict[str, float]], crowd: Sequence[dict[str, Any]]) -> list[Ratio]:
    few, many = tensors[0], tensors[-1]
    overhead = many["publish_s"] + many["tensors_s"] - few["publish_s"] - few["tensors_s"]
    return [
        Ratio(
            name=f"{many['tensors']:,} tensors: publish and apply beyond {few['tensors']:,}",
            value=overhead,
            bar=_OVERHEAD_BAR_S,
            at_most=True,
            unit="s",
        ),
        Ratio(
            name=f"{many['tensors']:,} tensors: manifest",
            value=many["manifest_bytes"] / 1024,
            bar=_MANIFEST_BAR_KIB,
            at_most=True,
            unit="KiB",
        ),
        Ratio(
            name=f"the last of {crowd[-1]['subscribers']} subscribers against a single one",
            value=crowd[-1]["last_s"] / crowd[0]["last_s"],
        ),
    ]
