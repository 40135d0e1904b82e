"""Comparing versions by their bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weightcast.manifest.inspect.changes import Diff, diff
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher
from weightcast.schemas.errors import NotFound

from .. import sample


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample stream; not to be changed."""
    folder = tmp_path_factory.mktemp("changes") / "stream"
    sample.publish_sample(folder)
    return folder


@pytest.fixture
def reader(root: Path) -> StreamReader:
    return sample.reader_of(root)


def _counts(found: Diff) -> dict[str, int]:
    return {t.name: t.changed for t in found.tensors if t.kind != "same"}


@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, 0), (0, 2), (2, 0)])
def test_diff_counts_bits_either_way(reader: StreamReader, a: int, b: int) -> None:
    found = diff(reader, a, b)
    assert (found.a, found.b, found.identical) == (a, b, False)
    assert _counts(found) == sample.CHANGES_1 | {"lm_head.weight": 50}
    assert (found.changed, found.elements) == (54, sample.ELEMENTS_0)


def test_diff_does_not_count_what_was_undone(reader: StreamReader) -> None:
    found = diff(reader, 0, 4)
    kinds = {t.name: t.kind for t in found.tensors if t.kind != "same"}
    assert kinds == {
        "small.7.weight": "changed",
        "scale": "changed",
        "odd": "changed",
        "small.0.weight": "reshaped",
        "small.9.weight": "removed",
        "extra.bias": "added",
    }
    assert _counts(found) == {
        "small.7.weight": 1,
        "scale": 1,
        "odd": 1,
        "small.0.weight": 6,
        "small.9.weight": 5,
        "extra.bias": 7,
    }
    assert found.changed == 1 + 1 + 1 + 6 + 7
    assert len(found.tensors) == len(sample.states()[0]) + 1


def test_diff_tells_shapes_of_both_sides(reader: StreamReader) -> None:
    tensors = {t.name: t for t in diff(reader, 4, 2).tensors}
    assert (tensors["small.0.weight"].shape_a, tensors["small.0.weight"].shape_b) == ((6,), (5,))
    assert (tensors["extra.bias"].kind, tensors["extra.bias"].shape_b) == ("removed", None)
    assert (tensors["small.9.weight"].kind, tensors["small.9.weight"].dtype_a) == ("added", None)


@pytest.mark.parametrize(("a", "b"), [(1, 2), (2, 1), (3, 3)])
def test_diff_of_equal_versions(reader: StreamReader, a: int, b: int) -> None:
    found = diff(reader, a, b)
    assert (found.identical, found.changed, _counts(found)) == (True, 0, {})


def test_b011_zeros_nan_inf_empty_and_scalars_are_identical_to_their_copy(tmp_path: Path) -> None:
    odd = {
        "zeros": torch.zeros(8, dtype=torch.bfloat16),
        "infinite": torch.tensor([float("inf"), float("nan")]),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(float("nan")),
    }
    with Publisher(str(tmp_path / "s"), fence=False) as publisher:
        for _ in range(2):
            publisher.publish({n: t.clone() for n, t in odd.items()}).wait()
        odd["zeros"][0] = -0.0  # equal as a number, not as bits
        publisher.publish(odd).wait()
    reader = sample.reader_of(tmp_path / "s")
    assert diff(reader, 0, 1).identical
    assert _counts(diff(reader, 1, 2)) == {"zeros": 1}


def test_diff_goes_around_damage_in_between(root: Path, tmp_path: Path) -> None:
    copy = sample.copied(root, tmp_path / "s")
    sample.shard_path(copy, 1).unlink()
    assert diff(sample.reader_of(copy), 0, 4).changed == 16  # by way of version 3's snapshot


def test_diff_of_a_version_that_is_not_there(reader: StreamReader) -> None:
    with pytest.raises(NotFound, match="version 9"):
        diff(reader, 9, 0)
