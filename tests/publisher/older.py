"""Streams as an older release begins them, whose digest has mix 1 (docs/format.md)."""

from __future__ import annotations

from typing import Final

import pytest

from weightcast.manifest.store import Store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.layout import Layout
from weightcast.schemas.manifest import VersionManifest

PARTS: Final = "weightcast.publisher.group"


def as_an_older_release(patch: pytest.MonkeyPatch) -> None:
    """New streams have mix 1."""
    patch.setattr(Layout.of.__func__, "__defaults__", (1,))  # type: ignore[attr-defined]
    for name in (f"{PARTS}.plan.MIX", f"{PARTS}.parts.MIX"):
        patch.setattr(name, 1)


def mix_of(store: Store, manifest: VersionManifest) -> int:
    """As the layout says it, after checking that the manifest lists it."""
    found = StreamReader.open(store).layout(manifest.layout).mix
    assert ("mix2" in manifest.features) == (found == 2)
    return found
