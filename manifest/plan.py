"""How to get from what a reader holds to the head, at the least bytes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightcast.schemas.errors import Gap


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """A snapshot that could be used: of which version, where its manifest lies, and its bytes."""

    version: int
    key: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Route:
    """Load `snapshot` if there is one, then apply the deltas of `versions` in this order. `bytes`: in all."""

    snapshot: SnapshotChoice | None
    versions: tuple[int, ...]
    bytes: int


def plan(
    current: int | None, head: int, delta_bytes: Mapping[int, int], snapshots: Sequence[SnapshotChoice]
) -> Route:
    """The cheapest route from `current` (None: holds nothing) to `head`.

    Args:
        current: version held.
        head: version wanted.
        delta_bytes: bytes of each delta that can be used; a version that is missing, reset or pruned is left out.
        snapshots: those that can be used.

    Raises:
        Gap: no route; names the first version that cannot be had.
    """
    routes = []
    starts: list[SnapshotChoice | None] = [s for s in snapshots if s.version <= head]
    if current is not None:
        starts.insert(0, None)
    for start in starts:
        first = (start.version if start else current) or 0
        versions = tuple(range(first + 1, head + 1))
        if all(v in delta_bytes for v in versions):
            routes.append(Route(start, versions, (start.bytes if start else 0) + sum(delta_bytes[v] for v in versions)))
    if not routes:
        first_wanted = 0 if current is None else current + 1
        lost = next((v for v in range(first_wanted, head + 1) if v not in delta_bytes), first_wanted)
        raise Gap(
            f"version {lost} is not available as a delta and no snapshot leads past it to version {head}",
            hint="wait for the next snapshot, or have the publisher write one (weightcast snapshot)",
        )
    return min(routes, key=lambda r: (r.bytes, len(r.versions)))
