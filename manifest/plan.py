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
        current: version held; one beyond `head` is of no use.
        head: version wanted.
        delta_bytes: bytes of each delta that can be used; a version that is missing, reset or pruned is left
        out.
        snapshots: those that can be used.

    Raises:
        Gap: no route; names the first version that cannot be had.
    """
    starts = {s.version: s for s in sorted(snapshots, key=lambda s: -s.bytes) if s.version <= head}
    best: tuple[int, int, SnapshotChoice | None] | None = (
        None  # bytes, first version before the deltas, snapshot
    )
    suffix, at = 0, head  # `suffix`: bytes of the deltas from `at`, exclusive, to the head
    while True:
        here: list[SnapshotChoice | None] = [None] if at == current else []
        for start in here + ([starts[at]] if at in starts else []):
            cost = suffix + (start.bytes if start else 0)
            if best is None or cost < best[0]:
                best = (cost, at, start)
        if at not in delta_bytes:
            break
        suffix, at = suffix + delta_bytes[at], at - 1
    if best is None:
        raise _gap(
            max([v for v in (current, *starts) if v is not None and v <= head], default=None),
            head,
            delta_bytes,
        )
    return Route(best[2], tuple(range(best[1] + 1, head + 1)), best[0])


def _gap(start: int | None, head: int, delta_bytes: Mapping[int, int]) -> Gap:
    hint = "wait for the next snapshot, or have the publisher write one (weightcast snapshot)"
    if start is None:
        return Gap(f"there is no snapshot that leads to version {head}", hint=hint)
    lost = next(v for v in range(start + 1, head + 1) if v not in delta_bytes)
    return Gap(
        f"version {lost} is not available as a delta and no snapshot leads past it to version {head}",
        hint=hint,
    )
