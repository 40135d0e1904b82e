"""What the ranks tell each other in the meetings of a publish, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from weightcast.schemas.part import Part

from .meeting import Word
from .plan import Corner, Entry, Piece, Plan

Box = tuple[list[int], list[int]]
"""Start and extent."""

Shared = tuple[int, int, list[Box]]
"""Position of a slice in its rank's table; number of the group of ranks that hold it (of a second name of a tensor:
-1); what the rank owns of it."""


class _Words(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def text(self) -> str:
        """As JSON."""
        return self.model_dump_json()


class Status(_Words):
    """How a rank stands when a publish begins.

    `plan`: the plan that its slices still fit, if any; `base`: SHA-256 of the manifest of the version that its copy
    holds; `open`: number of the publish whose outcome it does not know; `busy`: the last version is on its way.
    """

    plan: str = ""
    base: str = ""
    open: int = 0
    busy: bool = False


class Decision(_Words):
    """What is done: `go`, `plan` (anew, then go), `wait` (for the last version, then ask again) or `skip`.

    `fresh`: the version starts afresh; `version`: its number; `base`: SHA-256 of the head's manifest, or "";
    `last`, `committed`: number of the last publish, and its manifest if that is the head.
    """

    do: str
    fresh: bool = False
    version: int = 0
    base: str = ""
    last: int = 0
    committed: str = ""


class Division(_Words):
    """A plan: by rank those slices that are not its own alone, each with what it owns of them; all others it owns.

    `head`: manifest of the version that the changes will be told from; "": of none. `mix`: as of the plan's layout.
    """

    plan: str
    head: str = ""
    mix: int
    shared: list[list[Shared]]


class Ready(_Words):
    """What a rank holds of the head: its digest; and the digests of slices that other ranks have too, by position."""

    digest: str
    replicas: dict[int, str] = {}


class Contribution(_Words):
    """What a rank made: its part, and for each group of ranks the digest of what all of them hold."""

    part: Part
    replicas: dict[int, str] = {}


class Outcome(_Words):
    """How a publish ended: the manifest that was committed; or an error after which that is not known."""

    manifest: str = ""
    unknown: Word | None = None


def division(plan: Plan, tables: Sequence[Sequence[Entry]], identity: str, head: str) -> Division:
    """A plan as it is told."""
    groups = {holder: replica.group for replica in plan.replicas for holder in replica.holders}
    stored = plan.layout.stored_by_name
    shared: list[list[Shared]] = []
    for rank, pieces in enumerate(plan.pieces):
        owned: dict[int, list[Box]] = {
            at: [] for at, e in enumerate(tables[rank]) if (rank, at) in groups or e.name not in stored
        }
        for piece in pieces:
            if piece.entry in owned:
                owned[piece.entry].append((list(piece.corner.start), list(piece.corner.extent)))
        shared.append([(at, groups.get((rank, at), -1), boxes) for at, boxes in sorted(owned.items())])
    return Division(plan=identity, head=head, mix=plan.layout.mix, shared=shared)


def pieces_of(shared: Iterable[Shared], table: Sequence[Entry]) -> list[Piece]:
    """What a rank owns, from what it was told and its table."""
    told = {at: boxes for at, _, boxes in shared}
    pieces = []
    for at, entry in enumerate(table):
        if at not in told:
            pieces.append(Piece(at, entry.corner))
        else:
            pieces += [Piece(at, Corner(tuple(start), tuple(extent))) for start, extent in told[at]]
    return pieces
