"""Writes the golden streams of format 1: `python -m tests.golden.make FOLDER`.

The folders beside this file were written once and must stay readable for ever: they are not written again. Contents, ids
and times are fixed, so that another run differs only where libraries encode differently.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from weightcast.codec import Box, Geometry, split_box
from weightcast.manifest.commit import Writer, hint_head
from weightcast.manifest.store import open_store
from weightcast.schemas.manifest import Floor, Reader
from weightcast.schemas.names import FLOOR_KEY

from ..manifest.author import Author, Tensors, columns

TIME = "2026-01-01T00:00:00.000Z"


def start() -> Tensors:
    """Every width, a scalar, an empty tensor, a tie."""
    random = np.random.default_rng(1)
    named: dict[str, tuple[str, Any]] = {
        "embed.weight": ("BF16", random.integers(0, 1 << 16, (40, 50))),
        "mlp.weight": ("F8_E4M3", random.integers(0, 256, 12_000)),
        "norm.weight": ("BF16", np.full(16, 0x3F80)),
        "bias": ("F32", [0x80000000, 0x7FC00001, 3]),
        "scale": ("F64", 1 << 62),
        "mask": ("BOOL", [0, 1, 0, 1, 1]),
        "ids": ("I64", [0, (1 << 64) - 1, 7, 1 << 40]),
        "phase": ("C64", [1, 2, 3]),
        "empty": ("F16", np.zeros((0, 4))),
        "größe.重み": ("I16", [[1, 2], [3, 4]]),
    }
    ties = {"lm_head.weight": "embed.weight"}
    return replace(Tensors.of(ties, **named), mix=1)


def with_layout(
    tensors: Tensors, remove: tuple[str, ...], ties: dict[str, str], **new: tuple[str, Any]
) -> Tensors:
    """A copy with tensors removed, added or replaced."""
    added = Tensors.of(None, **new)
    bits = {n: a for n, a in tensors.bits.items() if n not in remove} | added.bits
    dtypes = {n: d for n, d in tensors.dtypes.items() if n not in remove} | added.dtypes
    return Tensors(bits, dtypes, ties, tensors.mix)


def write(author: Author) -> None:
    """Versions 0 to 8."""
    first = start()
    author.reset(first, files={"config.json": b'{"model_type":"golden"}\n'})
    # 1: sparse, with low bits split off, steps up and down, wrap-around, and escapes.
    second = first.changed("mlp.weight", *((i, (i * 7) % 256) for i in (0, 2000, 4999, 5000, 11_999)))
    old = int(second.bits["embed.weight"][3, 3])
    second = second.changed("embed.weight", ((3, 3), (old + 1) % 65_536), ((3, 4), 0), ((39, 49), 65_535))
    second = (
        second.changed("bias", (0, 0), (1, 0x7FC00002))
        .changed("scale", ((), (1 << 62) - 5))
        .changed("ids", (1, 0))
    )
    author.publish(second, coding="gap", row_elements=5000, small=1000, rows_a_shard=3)
    # 2: every element of some tensors.
    third = replace(second, bits={n: a.copy() for n, a in second.bits.items()})
    third.bits["embed.weight"][:] = third.bits["embed.weight"] + np.uint16(3)
    third.bits["embed.weight"][7] ^= np.uint16(0x5555)
    third.bits["norm.weight"][:8] -= np.uint16(1)
    third.bits["mask"][:] = [1, 1, 1, 1, 1]
    author.publish(third, coding="dense", row_elements=5000, small=1000, rows_a_shard=8)
    # 3: nothing.
    author.publish(third)
    # 4: another layout: removed, added, reshaped, retyped, another tie.
    fourth = with_layout(
        third,
        ("ids", "bias", "mask"),
        {"lm_head.weight": "embed.weight", "phase.copy": "phase"},
        **{
            "bias": ("F32", [[5, 0, 0x7FC00002]]),
            "mask": ("U8", [1, 1, 1, 1, 0]),
            "router": ("BF16", np.arange(100).reshape(10, 10)),
        },
    )
    author.publish(fourth, coding="whole", row_elements=5000, small=1000, rows_a_shard=8)
    # 5: after it, with planes that are worth compressing, and a snapshot beside the chain.
    fifth = replace(fourth, bits={n: a.copy() for n, a in fourth.bits.items()})
    fifth.bits["embed.weight"].reshape(-1)[::10] += np.uint16(1)
    fifth = (
        fifth.changed("router", ((9, 9), 5)).changed("phase", (1, 1 << 63)).changed("mlp.weight", (6000, 1))
    )
    author.publish(fifth, row_elements=5000, small=1000)
    author.snapshot()
    # 6: starts afresh.
    sixth = with_layout(fifth.changed("mlp.weight", (0, 255)), ("empty",), {"lm_head.weight": "embed.weight"})
    author.reset(sixth, files={"config.json": b'{"model_type":"golden","reset":true}\n'})
    # 7: rows that reach over small tensors, as the writer chooses them.
    seventh = sixth.changed("norm.weight", (0, 1), (15, 2)).changed("router", ((0, 0), 9))
    seventh.bits["mlp.weight"][[*range(0, 200, 2), 11_999]] ^= np.uint8(1)  # gaps that need more than a byte
    author.publish(seventh)
    # 8: the tie is cut.
    eighth = with_layout(seventh, (), {}, **{"lm_head.weight": ("BF16", seventh.bits["embed.weight"] ^ 1)})
    author.publish(eighth)


def weights(random: np.random.Generator, bits: int, mantissa: int, top: int, *shape: int) -> Any:
    """Bits of floats with exponents as those of weights."""
    exponents = np.maximum(top - random.geometric(0.4, shape), 0)
    signs = random.integers(0, 2, shape) << (bits - 1)
    return signs | exponents << mantissa | random.integers(0, 1 << mantissa, shape)


def start_classes(random: np.random.Generator) -> Tensors:
    """Every dtype that has the coding `class`, with exponents as those of weights, and two tensors without it."""
    found = Tensors.of(
        {"lm_head.weight": "embed.weight"},
        **{
            "embed.weight": ("BF16", weights(random, 16, 7, 124, 120, 100)),
            "conv.weight": ("BF16", weights(random, 16, 7, 122, 30, 10, 3, 3)),
            "norm.weight": ("BF16", np.full(16, 0x3F80)),
            "half.weight": ("F16", weights(random, 16, 10, 13, 40, 100)),
            "e4m3.weight": ("F8_E4M3", weights(random, 8, 3, 9, 3000)),
            "e5m2.weight": ("F8_E5M2", weights(random, 8, 2, 15, 50, 60)),
            "bias": ("F32", random.integers(0, 1 << 32, 2000)),
        },
    )
    return replace(found, mix=1)


def stepped(tensors: Tensors, random: np.random.Generator, wild: float, rows: float = 1.0) -> Tensors:
    """A copy in which small elements changed more often than large ones, by one unit mostly.

    Args:
        wild: share of the changes to any bits at all.
        rows: share of the rows of `embed.weight` that change.
    """
    bits = {}
    for name, old in tensors.bits.items():
        shift = {"BF16": 7, "F16": 10, "F8_E4M3": 3, "F8_E5M2": 2}.get(tensors.dtypes[name], 23)
        exponents = (old >> old.dtype.type(shift)) % (1 << (8 * old.itemsize - 1 - shift))
        new = old.copy()
        above = np.minimum(exponents.max() - 3.0 - exponents, 99)
        at = random.random(old.shape) < np.minimum(0.5, 0.02 * 2.0**above)
        if name == "embed.weight":
            at &= random.random(len(old))[:, None] < rows
        steps = random.choice([1, -1], at.sum()) * random.geometric(0.8, at.sum())
        new[at] += steps.astype(old.dtype)
        to_any = at & (random.random(old.shape) < wild)
        new[to_any] = random.integers(0, 1 << min(8 * old.itemsize, 62), to_any.sum()).astype(old.dtype)
        bits[name] = new
    return replace(tensors, bits=bits)


def write_classes(author: Author) -> None:
    """Versions 0 to 4 of a stream with rows in the coding `class`."""
    random = np.random.default_rng(2)
    tensors = start_classes(random)
    author.reset(tensors)
    # 1: rows of whole tensors, and slices that begin within a line. 2: steps of all sizes.
    # 3: a few rows of the embedding alone. 4: without the coding, so without the feature.
    steps = [(0.0, 1.0, "class"), (0.2, 1.0, "auto"), (0.01, 0.1, "class"), (0.0, 1.0, "gap")]
    for wild, rows, codec in steps:
        tensors = stepped(tensors, random, wild, rows)
        author.publish(tensors, codec=codec, row_elements=5050, small=1000, rows_a_shard=3)  # type: ignore[arg-type]


def start_boxes(random: np.random.Generator) -> Tensors:
    """Every width; matrices to be cut across, and experts to be cut within each."""
    found = Tensors.of(
        {"lm_head.weight": "embed.weight"},
        **{
            "embed.weight": ("BF16", weights(random, 16, 7, 124, 48, 130)),
            "experts.down": ("BF16", weights(random, 16, 7, 123, 6, 20, 32)),
            "experts.up": ("BF16", weights(random, 16, 7, 122, 12, 3, 128)),
            "norm.weight": ("BF16", np.full(16, 0x3F80)),
            "half.weight": ("F16", weights(random, 16, 10, 13, 30, 7)),
            "e4m3.weight": ("F8_E4M3", weights(random, 8, 3, 9, 40, 37)),
            "e5m2.weight": ("F8_E5M2", weights(random, 8, 2, 15, 60)),
            "bias": ("F32", random.integers(0, 1 << 32, (9, 7))),
            "ids": ("I64", random.integers(0, 1 << 62, (5, 4))),
        },
    )
    return replace(found, mix=1)


def slices(tensors: Tensors) -> list[Box]:
    """What four ranks might have, one after the other: parts that lie across each other, and intervals."""
    geometry = Geometry(tensors.layout)
    bf16, ranks = geometry["BF16"], list[list[Box]]()
    at = {name: int(bf16.starts[i]) for name, i in bf16.index.items()}
    for rank in range(4):
        ranks.append(
            [
                Box("BF16", at["experts.down"] + rank * 5 * 32, 6 * 5 * 32, 5 * 32, 20 * 32),
                columns(geometry["F8_E4M3"], "e4m3.weight", 1, 17, 18, 1)[rank],
            ]
        )
    ranks[0] += columns(bf16, "embed.weight", 65)
    ranks[1] += [Box("BF16", at["embed.weight"] + 65, 48 * 65, 65, 130), Box("BF16", at["norm.weight"], 16)]
    ranks[2] += [Box("BF16", at["experts.up"], 12 * 2 * 128, 2 * 128, 3 * 128)]
    ranks[3] += [Box("BF16", at["experts.up"] + 2 * 128, 12 * 128, 128, 3 * 128)]
    ranks[2] += columns(geometry["F32"], "bias", 3) + columns(geometry["I64"], "ids", 1)
    ranks[3] += [Box("F32", 3, 9 * 4, 4, 7), Box("I64", 1, 5 * 3, 3, 4), Box("F8_E5M2", 0, 60)]
    # Runs of one element: of the first column, of every second of the others.
    ranks[0] += [*columns(geometry["F16"], "half.weight", 1), Box("F16", 1, 30 * 3, 3, 7)]
    ranks[1] += [Box("F16", 4 + 7 * i, 2, 1, 2) for i in range(30)] + [
        Box("F16", 5 + 7 * i, 1) for i in range(30)
    ]
    return [box for rank in ranks for box in rank]


def write_boxes(author: Author) -> None:
    """Versions 0 to 6 of a stream with box rows."""
    random = np.random.default_rng(3)
    tensors = start_boxes(random)
    author.reset(tensors)
    # 1: the smallest codings, a shard of a few rows each, some of them without a box.
    tensors = stepped(tensors, random, 0.2)
    author.publish(tensors, boxes=slices(tensors), rows_a_shard=3)
    # 2: every element's step, in short rows, which cut runs and leave single ones. 3: all bits.
    tensors = stepped(tensors, random, 0.01)
    author.publish(tensors, boxes=cut(slices(tensors), 150), rows_a_shard=12, coding="dense")
    tensors = stepped(tensors, random, 0.5)
    author.publish(tensors, boxes=cut(slices(tensors), 700), rows_a_shard=9, coding="whole")
    # 4: by class, with few lines of one tensor changed; its rows in no order.
    tensors = stepped(tensors, random, 0.05, 0.1)
    author.publish(tensors, boxes=slices(tensors)[::-1], rows_a_shard=99, codec="class")
    # 5: intervals alone, so without the feature.
    tensors = stepped(tensors, random, 0.0)
    author.publish(tensors)
    # 6: another layout: the box of a new tensor is told from zeros.
    new = with_layout(
        tensors, ("e5m2.weight",), {}, **{"lm_head.weight": ("BF16", np.arange(24).reshape(4, 6))}
    )
    author.publish(new, boxes=columns(Geometry(new.layout)["BF16"], "lm_head.weight", 2, 4))


def write_packed(author: Author) -> None:
    """Versions 0 to 4 of a stream with packed shards."""
    random = np.random.default_rng(4)
    tensors = start_classes(random)
    author.reset(tensors)
    # 1: of a row each, of which some are not by class. 2: of all rows. 3: all in `gap`, so without frames. 4: boxes.
    for rows_a_shard, codec in ((1, "class"), (99, "class"), (99, "gap")):
        tensors = stepped(tensors, random, 0.01, 0.1)
        coding = None if codec == "class" else "gap"
        author.publish(
            tensors,
            codec=codec,
            coding=coding,
            row_elements=5050,
            small=1000,
            rows_a_shard=rows_a_shard,  # type: ignore[arg-type]
        )
    bits = tensors.bits | {"half.weight": stepped(tensors, random, 0.01).bits["half.weight"]}
    boxes = columns(Geometry(tensors.layout)["F16"], "half.weight", 30, 70)
    author.publish(replace(tensors, bits=bits), codec="class", boxes=boxes, rows_a_shard=99)


def write_pairs(author: Author) -> None:
    """Versions 0 to 4 of a stream with steps in half a byte."""
    random = np.random.default_rng(5)
    tensors = start_boxes(random)
    author.reset(tensors)
    # 1: with many escapes. 2: where few steps are far. 3: boxes. 4: without, so without the feature.
    tensors = stepped(tensors, random, 0.2)
    author.publish(tensors, coding="pairs", row_elements=5050, small=1000, rows_a_shard=3)
    tensors = stepped(tensors, random, 0.02)
    author.publish(tensors, rows_a_shard=9)
    tensors = stepped(tensors, random, 0.05)
    author.publish(tensors, boxes=slices(tensors), rows_a_shard=99, coding="pairs")
    author.publish(stepped(tensors, random, 0.05), coding="gap", rows_a_shard=99)


def write_mix(author: Author) -> None:
    """Versions 0 to 5 of a stream that goes over to another digest with its first reset."""
    random = np.random.default_rng(6)
    tensors = start()
    author.reset(tensors)
    # 1: the older digest. 2: the newer one, from a reset on. 3: boxes. 4: another layout. 5: the older one again.
    author.publish(tensors.changed("mlp.weight", (3, 7), (4999, 200)))
    tensors = replace(stepped(start_boxes(random), random, 0.1), mix=2)
    author.reset(tensors)
    tensors = stepped(tensors, random, 0.1)
    author.publish(tensors, boxes=slices(tensors), rows_a_shard=99)
    tensors = with_layout(tensors, ("bias",), {}, extra=("F32", random.integers(0, 1 << 32, 77)))
    author.publish(tensors, codec="class", rows_a_shard=99)
    author.reset(replace(tensors, mix=1))


def cut(boxes: list[Box], row_elements: int) -> Iterator[Box]:
    """The rows of boxes."""
    return itertools.chain.from_iterable(split_box(box, row_elements) for box in boxes)


def expected(author: Author) -> dict[str, Any]:
    """What a reader must find: for each version its digest, table, and the SHA-256 of each tensor's bytes."""
    versions = []
    for position, tensors in zip(author.positions, author.tensors, strict=True):
        table = [[s.name, s.dtype, list(s.shape), s.tied_to] for s in tensors.layout]
        hashes = {n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in tensors.bits.items()}
        versions.append({"digest": position.manifest.digest_after, "layout": table, "tensors": hashes})
    return {"versions": versions}


def make(folder: Path, fill: Callable[[Author], None] = write) -> None:
    """Write a stream into `folder`/store, and what is expected beside it."""
    numbers = itertools.count(1)
    names = ["weightcast.manifest.commit", "tests.manifest.author"]
    token = [patch(f"{n}.new_token", lambda: f"{next(numbers):032x}") for n in names]
    times = [patch(f"{n}.now", lambda: TIME) for n in [*names, "weightcast.manifest.snapshot"]]
    for p in token + times:
        p.start()
    author = Author(open_store(str(folder / "store")))
    author.writer = Writer("golden", "f" * 32)
    fill(author)
    hint_head(author.store, author.head)
    author.store.put(FLOOR_KEY, Floor(version=0, time=TIME).encode())
    author.store.put(f"readers/{'a' * 32}.json", Reader(reader="a" * 32, version=3, time=TIME).encode())
    (folder / "expected.json").write_text(
        json.dumps(expected(author), ensure_ascii=False, indent=1) + "\n", "utf-8"
    )
    for p in token + times:
        p.stop()


if __name__ == "__main__":
    streams = {
        "v1": write,
        "v1-class": write_classes,
        "v1-boxes": write_boxes,
        "v1-packed": write_packed,
        "v1-pairs": write_pairs,
        "v1-mix2": write_mix,
    }
    for name, fill in streams.items():
        make(Path(sys.argv[1]) / name, fill)
