"""What a version says about itself."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

from weightcast.manifest.tensorfile import INDEX_NAME
from weightcast.schemas.errors import Untrusted, UsageError
from weightcast.schemas.manifest import MAX_METADATA_BYTES
from weightcast.schemas.names import check_file_name


@dataclass(frozen=True)
class Label:
    """What a version says about itself: the trainer's step, free-form metadata, companion files (None: as before)."""

    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] | None = None

    @classmethod
    def of(
        cls,
        step: SupportsIndex | None,
        metadata: Mapping[str, Any] | None,
        files: Mapping[str, bytes] | None,
    ) -> Label:
        """Check what a user gives, and copy it.

        Raises:
            UsageError: a step that is no integer, metadata that is not JSON or too long, a file that cannot be one.
        """
        return cls(_step(step), _checked(metadata) if metadata else {}, _named(files))


def _checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        text = json.dumps(dict(metadata), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"metadata is not JSON: {error}") from error
    if len(text) > MAX_METADATA_BYTES:
        raise UsageError(f"metadata has {len(text)} bytes, at most {MAX_METADATA_BYTES} are allowed")
    return dict(json.loads(text))


def _step(step: SupportsIndex | None) -> int | None:
    """A step of any integer type (numpy's, a tensor's) as a plain int."""
    try:
        return None if step is None else operator.index(step)
    except TypeError as error:
        raise UsageError(f"step is {step!r}, expected an integer") from error


def _named(files: Mapping[str, bytes] | None) -> dict[str, bytes] | None:
    """A copy of `files`, whose names must be usable."""
    for name, data in (files or {}).items():
        if not isinstance(data, bytes):
            raise UsageError(f"companion file {name!r} is {type(data).__name__}, expected bytes")
        if name in (INDEX_NAME, "manifest.json") or name.endswith(".safetensors"):
            raise UsageError(
                f"companion file {name!r} has the name of a file that snapshots write themselves"
            )
        try:
            check_file_name(name)
        except Untrusted as error:
            raise UsageError(f"companion file {name!r} does not have a plain file name") from error
    return None if files is None else dict(files)
