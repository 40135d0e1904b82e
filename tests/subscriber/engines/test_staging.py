"""What passes between subscriber and server through files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weightcast.codec import Changes
from weightcast.schemas.errors import Corrupt, StorageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.subscriber.engines.staging import (
    Staging,
    map_positions,
    map_values,
    read_layout,
    read_staged,
    stage_folder,
)
from weightcast.subscriber.journal import Journal
from weightcast.subscriber.target import Mark

MARK = Mark("stream", 3, "0" * 64)


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    """Its folder exists."""
    found = Staging("http://127.0.0.1:1", tmp_path)
    with found.exclusive():
        return found


def test_staged_values_are_mapped_as_they_were(staging: Staging) -> None:
    changes = {
        "U8": Changes("U8", np.array([0, 7, 1 << 40]), np.array([1, 2, 255], np.uint8)),
        "BF16": Changes("BF16", np.array([5]), np.array([0x7FC1], np.uint16)),
        "F64": Changes("F64", np.empty(0, np.int64), np.empty(0, np.uint64)),
    }
    found = read_staged(staging.stage(Journal(MARK, changes)))
    assert list(found) == list(changes)
    for dtype, wanted in changes.items():
        assert found[dtype].positions.tolist() == wanted.positions.tolist()
        assert found[dtype].values.tolist() == wanted.values.tolist()
        assert found[dtype].values.dtype == wanted.values.dtype
        assert not len(wanted) or not found[dtype].values.flags.writeable  # the file itself


def test_a_staged_file_that_is_not_whole_is_refused(staging: Staging) -> None:
    path = staging.stage(Journal(MARK, {"U8": Changes("U8", np.arange(100), np.ones(100, np.uint8))}))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Corrupt):
        read_staged(path)
    path.unlink()
    with pytest.raises(StorageError):
        read_staged(path)


def test_a_read_has_each_dtype_at_its_place(staging: Staging) -> None:
    positions = {"U8": np.array([1, 5, 9]), "F64": np.array([2]), "BF16": np.array([3, 4])}
    counts = {dtype: len(found) for dtype, found in positions.items()}
    with staging.reading(positions) as (at, values):
        assert {d: p.tolist() for d, p in map_positions(at, counts).items()} == {
            d: p.tolist() for d, p in positions.items()
        }
        room = map_values(values, counts, writable=True)
        for number, (dtype, found) in enumerate(room.items()):
            assert found.ctypes.data % 8 == 0, dtype
            found[:] = number + 1
        again = map_values(values, counts, writable=False)
        assert {d: v.tolist() for d, v in again.items()} == {"U8": [1, 1, 1], "F64": [2], "BF16": [3, 3]}
        with pytest.raises(Corrupt, match="bytes, expected"):
            map_values(values, {**counts, "F64": 2}, writable=False)
        with pytest.raises(Corrupt, match="bytes, expected"):
            map_positions(at, {"U8": 1})
    assert not at.exists()
    assert not values.exists()


def test_a_layout_is_checked_by_its_hash(staging: Staging) -> None:
    layout = Layout.of([TensorSpec("w", "BF16", (3,))])
    path = staging.put_layout(layout)
    assert read_layout(path, layout.sha256).tensors == layout.tensors
    with pytest.raises(Corrupt, match="is not the layout"):
        read_layout(path, "0" * 64)
    other = staging.put_layout(Layout.of([TensorSpec("v", "BF16", (3,))]))
    assert other.is_file()
    assert not path.exists()


def test_the_folder_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_STAGE", str(tmp_path / "s"))
    assert stage_folder() == tmp_path / "s"
    monkeypatch.delenv("WEIGHTCAST_STAGE")
    assert stage_folder().name.startswith("weightcast-")
