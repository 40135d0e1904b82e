"""How a shard is fetched: in one piece, or in parts over several connections. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

LEAST_PART_BYTES: Final = 1 << 17
"""Parts of a shard are no smaller: 128 KiB are on their way after three round trips of a connection that starts slowly,
and each part costs a request."""

FULL_PART_BYTES: Final = 1 << 20
"""What is aimed at once each connection has a part: 1 MiB takes 8 ms at 1 Gbit/s."""

MOST_PART_BYTES: Final = 8 << 20
"""What is aimed at in a large version, so that what is lost with a connection, and what waits to be hashed, stays
small; parts are less than twice as large."""

_PARTS_A_CONNECTION: Final = 4
"""Parts of a large version for each connection: more than one, so that early shards are whole before the last ones."""


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes from `start` to `stop` of an object."""

    start: int
    stop: int


def cut(size: int, total: int, connections: int) -> list[Part]:
    """One shard as parts of equal size.

    Over a long link each connection starts slowly, and stays at what it has once reached, so that a version of some
    MiB is spread over all of them.

    Args:
        size: bytes of the shard.
        total: bytes of all shards of its version.
        connections: requests that run at once.
    """
    share = total // connections
    wanted = max(min(share, FULL_PART_BYTES), share // _PARTS_A_CONNECTION, LEAST_PART_BYTES)
    count = max(1, size // min(wanted, MOST_PART_BYTES))
    bounds = [size * i // count for i in range(count + 1)]
    return [Part(a, b) for a, b in itertools.pairwise(bounds)]
