"""A stream whose versions become visible one by one, as if a trainer published them at the test's pace."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path


class Feed:
    """A growing copy of a published stream: same stream id, same manifests, same bytes.

    Attributes:
        root: the copy's folder, to be followed.
        head: its newest version.
    """

    def __init__(self, source: Path, root: Path, head: int = 0) -> None:
        self._source = source
        self.root = root
        self.head = -1
        (root / "versions").mkdir(parents=True)
        shutil.copy(source / "stream.json", root)
        for folder in ("layouts", "files", "snapshots"):
            if (source / folder).exists():
                shutil.copytree(source / folder, root / folder)
        self.reveal(head)

    def reveal(self, version: int) -> None:
        """Commit everything up to `version`: data first, then the manifest, each whole or not at all."""
        for number in range(self.head + 1, version + 1):
            name = f"{number:012d}"
            if (self._source / "data" / name).exists():
                shutil.copytree(self._source / "data" / name, self.root / "data" / name)
            self._put(f"versions/{name}.json", (self._source / "versions" / f"{name}.json").read_bytes())
        self.head = version
        self._put("head.json", (json.dumps({"kind": "head", "version": version})).encode())

    def _put(self, key: str, data: bytes) -> None:
        path = self.root / key
        fresh = path.with_name(path.name + ".tmp")
        fresh.write_bytes(data)
        os.replace(fresh, path)
