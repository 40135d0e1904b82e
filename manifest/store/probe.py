"""Finding out what a store really does, before anything is trusted to it."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from .types import Pacing, ProbeResult

if TYPE_CHECKING:
    from . import Store

SMALL_ROUNDS: Final = 5
RACE_ROUNDS: Final = 3
LARGE_BYTES: Final = 4 << 20


def probe_store(store: Store, create: Callable[[str, bytes], bool], pacing: Pacing) -> ProbeResult:
    """Try everything a stream needs under `probe/{token}/`, then remove it.

    Args:
        create: the store's create-only write, even where the settings state a single writer.

    Raises:
        StorageError: the store does not answer, or refuses one of the operations.
    """
    probe = _Probe(store, create, pacing)
    try:
        return probe.run()
    finally:
        probe.clean_up()


class _Probe:
    """One run and what it leaves behind."""

    def __init__(self, store: Store, create: Callable[[str, bytes], bool], pacing: Pacing) -> None:
        self._store = store
        self._create = create
        self._now = pacing.now
        self._folder = f"probe/{uuid.uuid4().hex}"
        self._keys: set[str] = set()

    def run(self) -> ProbeResult:
        """All checks, in the order of their importance."""
        create_only = self._creates_once() and all(self._one_wins(n) for n in range(RACE_ROUNDS))
        fresh, put_s, get_s = self._read_after_write()
        listed = self._list_after_write()
        intact, write_s, read_s = self._large()
        held = {
            "create-only writes are not exclusive: two writers could both commit": create_only,
            "a read after a write gives old bytes": fresh,
            "a listing after a write is stale": listed,
            "bytes come back changed (Content-Encoding, stored framing); try checksum when_required": intact,
        }
        problems = tuple(text for text, holds in held.items() if not holds)
        return ProbeResult(
            create_only,
            fresh,
            listed,
            intact,
            put_s,
            get_s,
            LARGE_BYTES / write_s,
            LARGE_BYTES / read_s,
            problems,
        )

    def clean_up(self) -> None:
        """Remove every object of this run."""
        for key in sorted(self._keys):
            self._store.delete(key)

    def _key(self, name: str) -> str:
        key = f"{self._folder}/{name}"
        self._keys.add(key)
        return key

    def _creates_once(self) -> bool:
        """The second create must lose, and must not replace the first."""
        key = self._key("create.json")
        first, second = self._create(key, b"first"), self._create(key, b"second")
        return first and not second and self._store.get(key, max_bytes=64) == b"first"

    def _one_wins(self, number: int) -> bool:
        """Of two creates at the same time one wins, and its bytes are there."""
        key = self._key(f"race-{number}.json")
        bodies = (b"left", b"right")
        with ThreadPoolExecutor(len(bodies)) as pool:
            won = list(pool.map(lambda body: self._create(key, body), bodies))
        return sum(won) == 1 and self._store.get(key, max_bytes=64) == bodies[won.index(True)]

    def _read_after_write(self) -> tuple[bool, float, float]:
        """Overwrite one object and read it back. Returns (fresh, put seconds, get seconds), medians."""
        key, fresh, puts, gets = self._key("small.json"), True, [], []
        for n in range(SMALL_ROUNDS):
            body = b"%d" % n
            start = self._now()
            self._store.put(key, body)
            written = self._now()
            fresh = self._store.get(key, max_bytes=64) == body and fresh
            puts.append(written - start)
            gets.append(self._now() - written)
        return fresh, statistics.median(puts), statistics.median(gets)

    def _list_after_write(self) -> bool:
        """A new object is listed with its size, a deleted one is not."""
        key = self._key("listed.bin")
        self._store.put(key, b"12345")
        sizes = {entry.key: entry.size for entry in self._store.list(f"{self._folder}/")}
        self._store.delete(key)
        return sizes.get(key) == 5 and all(entry.key != key for entry in self._store.list(f"{self._folder}/"))

    def _large(self) -> tuple[bool, float, float]:
        """One larger object there and back. Returns (intact, write seconds, read seconds)."""
        key = self._key("large.bin")
        body = (uuid.uuid4().bytes * (LARGE_BYTES // 16 + 1))[:LARGE_BYTES]
        start = self._now()
        self._store.put(key, body)
        written = self._now()
        back = self._store.get(key, max_bytes=2 * LARGE_BYTES)
        return back == body, max(written - start, 1e-9), max(self._now() - written, 1e-9)
