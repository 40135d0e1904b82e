"""What the stores take and give: throughput of shard-sized objects, latency of small ones, creates."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any, Final

import numpy as np

from weightcast.manifest.store import Store, open_store

from ..lab.memory import MIB
from ..lab.seaweed import seaweed, weed_program
from ..part import Options
from ..report import milliseconds, number
from ..result import Result, Table

_OBJECT: Final = 16 * MIB  # a shard's size
_STREAMS: Final = (1, 8)
_SMALL: Final = 4 << 10  # a manifest's size
_REQUESTS: Final = 50


def run(options: Options) -> Result:
    """Measure a local folder, memory, and S3 on the loopback interface if there is a server."""
    found = []
    for kind in ("local folder", "memory", "S3 on loopback"):
        if kind.startswith("S3") and weed_program() is None:
            continue
        with _store(kind) as store:
            found.append({"store": kind} | _measure(store, options))
    missing = "" if weed_program() else " S3 was left out: the program weed is not installed."
    return Result(part="stores", tables=[_table(found, missing)], figures={"stores": found})


@contextmanager
def _store(kind: str) -> Iterator[Store]:
    if kind == "memory":
        yield open_store("memory://weightcast-bench")
    elif kind == "local folder":
        with tempfile.TemporaryDirectory(prefix="weightcast-bench-") as root:
            yield open_store(root)
    else:
        with seaweed() as server:
            yield open_store(server.root)


def _measure(store: Store, options: Options) -> dict[str, Any]:
    size, requests = options.pick(_OBJECT, 1 << 16), options.pick(_REQUESTS, 3)
    big, small = (np.random.default_rng(0).bytes(n) for n in (size, _SMALL))
    digest = hashlib.sha256(big).hexdigest()
    figures: dict[str, Any] = {}
    for streams in _STREAMS:
        keys = [f"big/{streams}/{i}" for i in range(options.pick(max(_STREAMS), 2))]
        figures[f"write_{streams}"] = len(keys) * size / _seconds(streams, lambda k: store.put(k, big), keys)
        read = _seconds(streams, lambda k: store.fetch(k, size=size, sha256=digest), keys)
        figures[f"read_{streams}"] = len(keys) * size / read
    names = [f"small/{i}" for i in range(requests)]
    figures["create_s"] = median(_each(lambda k: store.create(k, small), names))
    figures["get_s"] = median(_each(lambda k: store.get(k, max_bytes=_SMALL), names))
    figures["absent_s"] = median(_each(lambda k: _absent(store, k), [f"absent/{i}" for i in range(requests)]))
    return figures


def _absent(store: Store, key: str) -> None:
    """A poll without news."""
    from weightcast.schemas.errors import NotFound

    try:
        store.get(key, max_bytes=_SMALL)
    except NotFound:
        return
    raise SystemExit(f"{key} is there")


def _seconds(streams: int, call: Callable[[str], Any], keys: list[str]) -> float:
    with ThreadPoolExecutor(streams) as pool:
        begin = time.perf_counter()
        list(pool.map(call, keys))
        return time.perf_counter() - begin


def _each(call: Callable[[str], Any], keys: list[str]) -> list[float]:
    seconds = []
    for key in keys:
        begin = time.perf_counter()
        call(key)
        seconds.append(time.perf_counter() - begin)
    return seconds


def _table(found: list[dict[str, Any]], missing: str) -> Table:
    streams = [f"{what}_{n}" for what in ("write", "read") for n in _STREAMS]
    head = [f"{s.split('_')[0]}, {s.split('_')[1]} streams, MB/s" for s in streams]
    return Table(
        title=f"Objects of {_OBJECT >> 20} MiB, and of {_SMALL >> 10} KiB",
        head=["store", *head, "create, ms", "get, ms", "get of nothing, ms"],
        rows=[
            [f["store"]]
            + [number(f[s] / 1e6) for s in streams]
            + [milliseconds(f[k]) for k in ("create_s", "get_s", "absent_s")]
            for f in found
        ],
        note=f"Reads are checked by SHA-256. Server and client share the cores. Latencies are medians.{missing}",
    )
