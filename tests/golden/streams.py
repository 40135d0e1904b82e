"""Golden streams of features: where they are, what they must lead to, and their reading by the document alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader

from .make import write_boxes, write_classes, write_mix, write_packed, write_pairs
from .minireader import MiniReader, Model


@dataclass(frozen=True)
class Golden:
    """A stream that is kept as it was written once.

    Attributes:
        feature: that some of its versions need.
        write: writes it anew.
    """

    feature: str
    write: Callable[..., Any]

    @cached_property
    def folder(self) -> Path:
        return Path(__file__).parent / f"v1-{self.feature}"

    @cached_property
    def store(self) -> Path:
        return self.folder / "store"

    @cached_property
    def expected(self) -> list[dict[str, Any]]:
        """Of each version the digest, and the hash of each tensor."""
        found: list[dict[str, Any]] = json.loads((self.folder / "expected.json").read_text("utf-8"))[
            "versions"
        ]
        return found

    @cached_property
    def reader(self) -> StreamReader:
        return StreamReader.open(open_store(str(self.store)))

    @cached_property
    def models(self) -> list[Model]:
        return self.read(self.store)

    def read(self, store: Path) -> list[Model]:
        """All versions, by the reader that knows the document alone."""
        mini, found = MiniReader(store), list[Model]()
        for version in range(len(self.expected)):
            found.append(mini.read(version, found[-1] if found else None))
        return found


CLASSES: Final = Golden("class", write_classes)
BOXES: Final = Golden("boxes", write_boxes)
PACKED: Final = Golden("packed", write_packed)
PAIRS: Final = Golden("pairs", write_pairs)
MIX: Final = Golden("mix2", write_mix)
FEATURES: Final = (CLASSES, BOXES, PACKED, PAIRS, MIX)
