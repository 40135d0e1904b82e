"""From all writers' parts to a manifest, once they are proved to be one version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weightcast.manifest.chain import Position
from weightcast.publisher.label import Label
from weightcast.publisher.upload import Uploader
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Conflict, Corrupt, UsageError
from weightcast.schemas.layout import Layout
from weightcast.schemas.manifest import LayoutRef, Totals, VersionManifest
from weightcast.schemas.part import Part

from .assembly import Assembly, layout_of


@dataclass(frozen=True)
class Relaid:
    """A layout that differs from the parent's, and the digest of what the parent has and it has not."""

    layout: Layout
    lost: Digest = field(default_factory=Digest)


def prepare(
    uploader: Uploader,
    parts: Iterable[Part],
    parent: Position | None,
    label: Label,
    relaid: Relaid | None = None,
) -> VersionManifest:
    """The manifest that would commit these parts on top of `parent`. Of whole parts a snapshot is written first.

    Args:
        uploader: of the one who commits.
        parts: one of each writer.
        parent: the head; None: there is none yet.
        label: of the version.
        relaid: the layout, if it is not the parent's; of whole parts, if it is not just what they carry.

    Raises:
        UsageError: parts are missing, twice there, of different versions, or do not cover the tensors once.
        Conflict: they are told from another version than `parent`.
        Corrupt: their digests do not add up.
    """
    parts = in_order(parts)
    _check_base(parts, parent)
    if parts[0].base is None:
        layout = relaid.layout if relaid is not None else layout_of(parts)
        return _prepare_whole(uploader, parts, parent, label, layout)
    if parent is None:
        raise Conflict("the parts are told from a version that does not exist")
    lost = relaid.lost if relaid is not None else Digest()
    before, moved, after = (
        sum((getattr(p, n) for p in parts), Digest()) for n in ("before", "moved", "after")
    )
    if parent.digest - lost != before or before + moved != after:
        raise Corrupt(
            f"not committed, since the parts start from state {before} and version {parent.version} ended in "
            f"{parent.digest - lost}: some elements are in no part, or in two",
            hint="every element must be in exactly one part",
        )
    layout_ref, totals = _figures(uploader, parent, relaid, sum(p.elements for p in parts))
    return uploader.manifest(
        label,
        version=parent.version + 1,
        parent=parent,
        layout=layout_ref,
        elements=totals.elements,
        dense_bytes=totals.dense_bytes,
        digest_after=after.hex,
        shards=[shard for part in parts for shard in part.shards],
        features=sorted({feature for part in parts for feature in part.features}),
    )


def in_order(parts: Iterable[Part]) -> list[Part]:
    """Parts by rank.

    Raises:
        UsageError: one is there twice, or missing; names the rank.
    """
    found: dict[int, Part] = {}
    for part in parts:
        if part.rank in found:
            raise UsageError(
                f"there are two parts of rank {part.rank}", hint="commit one part of each writer"
            )
        found[part.rank] = part
    sizes = sorted({part.size for part in found.values()})
    if len(sizes) != 1:
        raise UsageError(f"the parts say that there are {sizes} writers", hint="commit parts of one version")
    missing = [rank for rank in range(sizes[0]) if rank not in found]
    if missing:
        raise UsageError(
            f"not committed, since the parts of ranks {', '.join(map(str, missing[:10]))} of {sizes[0]} are missing",
            hint="commit one part of each writer",
        )
    return [found[rank] for rank in range(sizes[0])]


def _check_base(parts: Sequence[Part], parent: Position | None) -> None:
    version = parent.version + 1 if parent else 0
    for part in parts:
        if part.mix != parts[0].mix:
            raise UsageError(
                f"the part of rank {part.rank} has digests of mix {part.mix}, that of rank {parts[0].rank} of mix "
                f"{parts[0].mix}",
                hint="run the same release in all writers",
            )
        if (part.version, part.base) != (parts[0].version, parts[0].base):
            raise UsageError(
                f"the part of rank {part.rank} is of version {part.version} told from {part.base}, that of rank "
                f"{parts[0].rank} of {parts[0].version} told from {parts[0].base}",
                hint="commit parts of one version",
            )
    head = parent.sha256 if parent else None
    if parts[0].version != version or parts[0].base not in (None, head):
        raise Conflict(
            f"the parts are for version {parts[0].version} told from {parts[0].base}, but the next version is "
            f"{version} after {head}",
            hint="another publisher has committed meanwhile; stop this one, or start it again from the new head",
        )


def _figures(
    uploader: Uploader, parent: Position, relaid: Relaid | None, elements: int
) -> tuple[LayoutRef, Totals]:
    """Layout and totals of the new version; only `elements` and `dense_bytes` of these count."""
    totals = parent.manifest.totals
    ref = parent.manifest.layout
    if relaid is not None:
        ref = uploader.layout_ref(relaid.layout)
        totals = Totals(elements=relaid.layout.elements, changed=0, bytes=0, dense_bytes=relaid.layout.nbytes)
    if elements != totals.elements:
        raise UsageError(
            f"not committed, since the parts have {elements} elements together, and the tensors have {totals.elements}",
            hint="every element must be in exactly one part; if the set of tensors has changed, have all writers "
            "stage(reset=True)",
        )
    return ref, totals


def _prepare_whole(
    uploader: Uploader, parts: Sequence[Part], parent: Position | None, label: Label, layout: Layout
) -> VersionManifest:
    elements = sum(p.elements for p in parts)
    if elements != layout.elements:
        raise UsageError(
            f"not committed, since the parts have {elements} elements together, and the tensors have {layout.elements}",
            hint="every element must be in exactly one part",
        )
    after = sum((p.after for p in parts), Digest())
    assembly = Assembly(uploader.reader.store, layout, parts)
    manifest = uploader.prepare_whole(label, parent, layout, after, assembly.read)
    if assembly.digest != after:
        raise Corrupt(
            f"not committed, since the snapshot of version {manifest.version} has state {assembly.digest}, and the "
            f"parts {after}"
        )
    return manifest
