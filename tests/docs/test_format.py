"""The tables of docs/format.md against the models: every field of every document, and every bound."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from weightcast.codec import crossings
from weightcast.manifest.retention import GRACE_S, LEASE_AGE_S, ORPHAN_AGE_S
from weightcast.schemas import frames, layout, manifest, names, shard
from weightcast.schemas.dtypes import WIDTHS

TEXT: Final = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")
DOCUMENTS: Final = ("Stream", "VersionManifest", "SnapshotManifest", "FileList", "Head", "Floor", "Reader")
PARTS: Final = ("ObjectRef", "ShardRef", "LayoutRef", "ParentRef", "Totals", "FileRef")


def rows(section: str) -> list[list[str]]:
    """Cells of the table rows in a part of the document, heads left out."""
    lines = re.findall(r"^\| *(.*?) *\|$", section, re.MULTILINE)
    cells = [re.split(r" *\| *", line) for line in lines]
    rules = [i for i, row in enumerate(cells) if set("".join(row)) <= {"-", "|"} and "".join(row)]
    heads = {i - 1 for i in rules} | set(rules)
    return [row for i, row in enumerate(cells) if i not in heads]


def section(title: str) -> str:
    """What is under a heading, up to the next."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert match is not None, title
    return match[1]


def heading(model: str) -> str:
    """The heading of a document's table."""
    match = re.search(rf"^### (.*: {model})$", TEXT, re.MULTILINE)
    assert match is not None, model
    return match[1]


@pytest.mark.parametrize("model", DOCUMENTS)
def test_fields_of_documents(model: str) -> None:
    documented = {row[0].strip("`"): row[1] for row in rows(section(heading(model)))}
    fields = getattr(manifest, model).model_fields
    assert list(documented) == list(fields)
    for name, field in fields.items():
        if name in ("kind", "parent", "snapshot", "digest_before"):
            continue  # written always; the others depend on the version, as their lines say
        assert ("*opt*" in documented[name]) == (not field.is_required()), name
    assert documented["kind"] == f'`"{fields["kind"].default}"`'


def test_fields_of_parts() -> None:
    found: dict[str, list[str]] = {}
    part = ""
    for first, field, *_ in rows(section("Parts of documents")):
        part = first or part
        found.setdefault(part, []).append(field.strip("`"))
    assert found == {name: list(getattr(manifest, name).model_fields) for name in PARTS}


def test_every_document_is_listed() -> None:
    models = {
        name
        for name, value in vars(manifest).items()
        if isinstance(value, type) and issubclass(value, manifest.Document)
    }
    assert models == {"Document", *DOCUMENTS, *PARTS}


def test_columns() -> None:
    documented = [
        name
        for row in rows(section("Delta shard"))
        for name in re.findall(r"`(\w+)`", row[0])
        if name in shard.BOX_SCHEMA.names
    ]
    assert documented == shard.BOX_SCHEMA.names
    assert all(f"`{name}: " in section("Bits, tensors, layout") for name in layout.LAYOUT_SCHEMA.names)
    assert all(f"`{coding}`" in section("Delta shard") for coding in shard.CODINGS)


def test_dtypes() -> None:
    documented = {
        name: int(row[0])
        for row in rows(section("Bits, tensors, layout"))
        for name in re.findall(r"`(\w+)`", row[1])
    }
    assert documented == WIDTHS


def test_bounds() -> None:
    """The words on the left are in the document; the constants on the right say the same."""
    kib, gib = 1 << 10, 1 << 30
    said = {
        "at most 512\nbytes in all": (names.MAX_KEY_BYTES, 512),
        "string of at most 512 characters": (512, 512),
        "integer from 0 to 10^12 − 1": (manifest.MAX_VERSION, 10**12 - 1),
        "integer from 0 to\n2^45": (manifest.MAX_OBJECT_BYTES, 1 << 45),
        "`readers/{id}.json` | 4 KiB |": (manifest.MAX_HINT_BYTES, 4 * kib),
        "list of companion files | 8 MiB |": (manifest.MAX_MANIFEST_BYTES, 8 * kib * kib),
        "| layout | 1 GiB |": (layout.MAX_LAYOUT_BYTES, gib),
        "| delta shard | 1 GiB |": (manifest.MAX_SHARD_BYTES, gib),
        "At most 64 KiB of UTF-8": (manifest.MAX_METADATA_BYTES, 64 * kib),
        "array of ShardRef, at most 20,000": (manifest.MAX_SHARDS, 20_000),
        "`format` | integer, 1 |": (manifest.FORMAT, 1),
        "Format 1 has five. A snapshot manifest lists `mix2`, if its layout has mix 2 (state digest); a version manifest "
        "lists that, too, and `class`, if a row of its shards has the coding `class`; `pairs`, if one has the coding "
        "`pairs`; `boxes`, if one is a box; `packed`, if": (
            set(manifest.FEATURES),
            {"class", "pairs", "boxes", "packed", "mix2"},
        ),
        "Its content is at most 1 GiB, and at most 16 times as long": (shard.MAX_EXPANSION, 16),
        "is 1/32 or more of them": (shard.PACKED_SHARE, 32),
        "begins with the bytes 28 B5 2F FD": (frames.MAGIC.hex(" ").upper(), "28 B5 2F FD"),
        "more than 2^28 pairs of rows": (crossings.BUDGET, 1 << 28),
        "with unequal strides count 32-fold": (crossings.UNEQUAL_COST, 32),
        "1 to 1024 bytes of UTF-8": (names.MAX_TENSOR_NAME_BYTES, 1024),
        "is not `__metadata__`": (set(names.RESERVED_TENSOR_NAMES), {"__metadata__"}),
        "at most 4,000,000\ntensors": (layout.MAX_TENSORS, 4_000_000),
        "at most 32 dimensions": (layout.MAX_DIMENSIONS, 32),
        "at most 2^48 elements in all": (layout.MAX_ELEMENTS, 1 << 48),
        "intervals of at most 2^24 elements": (shard.MAX_ROW_ELEMENTS, 1 << 24),
        "`gap_shift` at most 24": (shard.MAX_GAP_SHIFT, 24),
        "A lease lives for an hour": (LEASE_AGE_S, 3600),
        "is a day old": (ORPHAN_AGE_S, 86_400),
        "the grace (an hour)": (GRACE_S, 3600),
    }
    for words, (constant, value) in said.items():
        assert re.sub(r"\s+", " ", words) in re.sub(r"\s+", " ", TEXT), words
        assert constant == value, words
