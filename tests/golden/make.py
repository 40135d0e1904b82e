"""Writes the golden streams of format 1: `python -m tests.golden.make FOLDER`.

The files under `v1/` and `v1-class/` were written once and must stay readable for ever: they are not written again when the
code changes.
Contents, ids and times are fixed, so that another run differs only where libraries encode differently.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from weightcast.manifest.commit import Writer, hint_head
from weightcast.manifest.store import open_store
from weightcast.schemas.manifest import Floor, Reader
from weightcast.schemas.names import FLOOR_KEY

from ..manifest.author import Author, Tensors

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
    return Tensors.of(ties, **named)


def with_layout(
    tensors: Tensors, remove: tuple[str, ...], ties: dict[str, str], **new: tuple[str, Any]
) -> Tensors:
    """A copy with tensors removed, added or replaced."""
    added = Tensors.of(None, **new)
    bits = {n: a for n, a in tensors.bits.items() if n not in remove} | added.bits
    dtypes = {n: d for n, d in tensors.dtypes.items() if n not in remove} | added.dtypes
    return Tensors(bits, dtypes, ties)


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
    third = Tensors({n: a.copy() for n, a in second.bits.items()}, second.dtypes, second.ties)
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
    fifth = Tensors({n: a.copy() for n, a in fourth.bits.items()}, fourth.dtypes, fourth.ties)
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


def start_classes(random: np.random.Generator) -> Tensors:
    """Every dtype that has the coding `class`, with exponents as those of weights, and two tensors without it."""

    def weights(bits: int, mantissa: int, top: int, *shape: int) -> Any:
        exponents = np.maximum(top - random.geometric(0.4, shape), 0)
        signs = random.integers(0, 2, shape) << (bits - 1)
        return signs | exponents << mantissa | random.integers(0, 1 << mantissa, shape)

    return Tensors.of(
        {"lm_head.weight": "embed.weight"},
        **{
            "embed.weight": ("BF16", weights(16, 7, 124, 120, 100)),
            "conv.weight": ("BF16", weights(16, 7, 122, 30, 10, 3, 3)),
            "norm.weight": ("BF16", np.full(16, 0x3F80)),
            "half.weight": ("F16", weights(16, 10, 13, 40, 100)),
            "e4m3.weight": ("F8_E4M3", weights(8, 3, 9, 3000)),
            "e5m2.weight": ("F8_E5M2", weights(8, 2, 15, 50, 60)),
            "bias": ("F32", random.integers(0, 1 << 32, 2000)),
        },
    )


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
        at = random.random(old.shape) < np.minimum(0.5, 0.02 * 2.0 ** (exponents.max() - 3.0 - exponents))
        if name == "embed.weight":
            at &= random.random(len(old))[:, None] < rows
        steps = random.choice([1, -1], at.sum()) * random.geometric(0.8, at.sum())
        new[at] += steps.astype(old.dtype)
        to_any = at & (random.random(old.shape) < wild)
        new[to_any] = random.integers(0, 1 << 8 * old.itemsize, to_any.sum()).astype(old.dtype)
        bits[name] = new
    return Tensors(bits, tensors.dtypes, tensors.ties)


def write_classes(author: Author) -> None:
    """Versions 0 to 4 of a stream with rows in the coding `class`."""
    random = np.random.default_rng(2)
    tensors = start_classes(random)
    author.reset(tensors)
    # 1: rows of whole tensors, and slices that begin within a line. 2: steps of all sizes.
    # 3: a few rows of the embedding alone. 4: without the coding, so without the feature.
    for wild, rows, codec in (
        (0.0, 1.0, "class"),
        (0.2, 1.0, "auto"),
        (0.01, 0.1, "class"),
        (0.0, 1.0, "gap"),
    ):
        tensors = stepped(tensors, random, wild, rows)
        author.publish(tensors, codec=codec, row_elements=5050, small=1000, rows_a_shard=3)  # type: ignore[arg-type]


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
    make(Path(sys.argv[1]) / "v1")
    make(Path(sys.argv[1]) / "v1-class", write_classes)
