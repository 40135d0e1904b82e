"""safetensors headers: what is broken is named for what it is, and what we write is what safetensors
reads.
"""

from __future__ import annotations

import json
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from weightcast.manifest.tensorfile import (
    encode_header,
    encode_index,
    file_names,
    read_header,
    split_into_files,
)
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.errors import Corrupt, NotFound, StorageError, UsageError, WeightcastError
from weightcast.schemas.layout import Layout, TensorSpec


def raw_file(path: Path, header: object, body: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    return path


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(
        {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(4, dtype=np.int8)},
        path,
        {"format": "pt"},
    )
    return path


def test_reads_what_safetensors_writes(good: Path) -> None:
    entries = {e.spec.name: e for e in read_header(good)}
    assert entries["b"].spec == TensorSpec("b", "F32", (2, 3))
    assert entries["a"].spec == TensorSpec("a", "I8", (4,))
    data = good.read_bytes()
    assert data[entries["a"].begin : entries["a"].end] == bytes(range(4))
    assert np.frombuffer(data[entries["b"].begin : entries["b"].end], np.float32).tolist() == list(range(6))


@pytest.mark.parametrize("kept", [1.0, 0.5, "8", "0"])
def test_b125_cut_files(good: Path, kept: float | str) -> None:
    """B125: cut by one byte, at half, to 8 bytes, to nothing: an error with both sizes."""
    data = good.read_bytes()
    size = int(kept) if isinstance(kept, str) else int(len(data) * kept) - (1 if kept == 1.0 else 0)
    good.write_bytes(data[:size])
    with pytest.raises(Corrupt, match=f"{size} bytes") as caught:
        read_header(good)
    assert str(good) in str(caught.value)
    assert size == 0 or str(len(data)) in str(caught.value) or "too few for the" in str(caught.value)


def test_longer_than_the_header_says(good: Path) -> None:
    good.write_bytes(good.read_bytes() + b"x")
    with pytest.raises(Corrupt, match="its header promises"):
        read_header(good)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
            "Git LFS pointer",
        ),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page or XML"),
        (b"\n <html>" + b" " * 500, "web page or XML"),
        (b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>', "web page or XML"),
        (b"\x80\x04\x95" + b"." * 50, "too few"),
        (b"abc", "3 bytes"),
    ],
)
def test_b228_each_is_named_for_what_it_is(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(Corrupt, match=what) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert f"{len(content)} bytes" in str(caught.value)


def test_no_such_file_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_header(tmp_path / "none")
    with pytest.raises(StorageError):
        read_header(tmp_path)


HUGE = 1 << 32


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"w": entry("F32", [HUGE, HUGE], 0, 8)}, 8),
        ({"w": entry("F32", [1 << 63], 0, 8)}, 8),
        ({"w": entry("F32", [-1], 0, 8)}, 8),
        ({"w": entry("F32", [-2, -1], 0, 8)}, 8),
        ({"w": entry("F32", [1.5], 0, 8)}, 8),
        ({"w": entry("F32", [True], 0, 4)}, 4),
        ({"w": entry("F32", ["2"], 0, 8)}, 8),
        ({"w": entry("F32", [1] * 100_000, 0, 4)}, 4),
        ({"w": entry("F32", [(1 << 63) - 1] * 100_000, 0, 4)}, 4),
        ({"w": entry("F32", [10**4000], 0, 4)}, 4),
        ({"w": entry("F32", [2], 0, 4)}, 4),
        ({"w": entry("F32", [2], 8, 0)}, 8),
        ({"w": entry("F32", [2], -8, 0)}, 8),
        ({"w": entry("F32", [2], 8, 16)}, 16),
        ({"w": entry("F32", [2], 0, 8), "v": entry("F32", [2], 4, 12)}, 12),
        ({"w": entry("F32", [2], 0, 8), "v": entry("F32", [2], 0, 8)}, 8),
        ({"w": entry("F32", [2], 0, 8), "v": entry("F32", [2], 12, 20)}, 20),
        ({"w": {"dtype": "F32", "shape": [2]}}, 8),
        ({"w": entry(["F32"], [2], 0, 8)}, 8),  # type: ignore[arg-type]
        ({"w": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, 8),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}, 8),
        ({"w": 5}, 0),
        ([1, 2], 0),
        (b"null", 0),
        (b"{" * 50, 0),
        (b"[" * 100_000, 0),
        (b'{"w":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', 8),
        (
            b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            1,
        ),
        (b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
        ({"__metadata__": {"n": 1}}, 0),
        ({"__metadata__": "x"}, 0),
    ],
)
def test_b167_impossible_headers(tmp_path: Path, header: object, body: int) -> None:
    """B167: shapes, offsets and numbers that cannot be: refused quickly, by name."""
    path = raw_file(tmp_path / "x.safetensors", header, bytes(body))
    started = time.process_time()
    with pytest.raises(Corrupt, match=str(path)):
        read_header(path)
    assert time.process_time() - started < 20


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 0, 1, 100_000_001])
def test_b167_impossible_header_lengths(tmp_path: Path, length: int) -> None:
    """B167: nothing is allocated by a length that was not checked."""
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length) + b"{}")
        file.truncate(100_000_100 if length == 100_000_001 else 10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Corrupt, match=str(path.stat().st_size)):
        read_header(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_b038_a_tensor_called_metadata(tmp_path: Path) -> None:
    """B038: no one could open such a file: the name is refused, and not taken for metadata."""
    path = raw_file(tmp_path / "x.safetensors", {"__metadata__": entry("U8", [2], 0, 2)}, b"ab")
    with pytest.raises(UsageError, match="'__metadata__' is reserved"):
        read_header(path)
    with pytest.raises(UsageError, match="reserved"):
        Layout.of([TensorSpec("__metadata__", "U8", (1,))])


@pytest.mark.parametrize(
    ("name", "fine"),
    [("n" * 300, True), ("重" * 200, True), ("a/b/c", True), ("..", True), ("", False), ("n" * 1025, False)],
)
def test_b035_names(tmp_path: Path, name: str, fine: bool) -> None:
    """B035: names never become file names, so that any of up to 1,024 bytes will do."""
    path = tmp_path / "x.safetensors"
    if fine:
        spec = TensorSpec(name, "U8", (2,))
        path.write_bytes(encode_header([spec]) + b"ab")
        assert [e.spec for e in read_header(path)] == [spec]
        with safe_open(path, "numpy") as file:
            assert list(file.keys()) == [name]
        return
    raw_file(path, {name: entry("U8", [2], 0, 2)}, b"ab")
    with pytest.raises(UsageError, match=r"is empty|1025 bytes"):
        read_header(path)


def test_b047_complex(tmp_path: Path) -> None:
    """B047: complex64 has elements of 8 bytes; complex128 is refused by tensor and dtype."""
    path = raw_file(tmp_path / "x.safetensors", {"c": entry("C64", [2], 0, 16)}, bytes(16))
    assert read_header(path)[0].spec.width == 8
    raw_file(path, {"c": entry("C128", [2], 0, 32)}, bytes(32))
    with pytest.raises(UsageError, match="'c' has dtype 'C128'"):
        read_header(path)


def test_b048_unknown_dtypes(tmp_path: Path) -> None:
    """B048: scales of 8-bit exponents are carried; packed 4-bit floats and inventions are named."""
    path = raw_file(tmp_path / "x.safetensors", {"s": entry("F8_E8M0", [4, 32], 0, 128)}, bytes(128))
    assert read_header(path)[0].spec == TensorSpec("s", "F8_E8M0", (4, 32))
    for dtype, size in (("F4", 32), ("XYZ9", 64)):
        raw_file(path, {"t": entry(dtype, [4, 16], 0, size)}, bytes(size))
        with pytest.raises(UsageError, match=f"'t' has dtype '{dtype}'"):
            read_header(path)


def test_b033_a_hundred_thousand_tensors(tmp_path: Path) -> None:
    """B033: one file, read back by us and by safetensors, in seconds."""
    specs = [TensorSpec(f"model.layers.{i}.weight", "BF16", (2,)) for i in range(100_000)]
    started = time.thread_time()  # others in this process may be at work
    groups = split_into_files(specs, 1 << 30)
    assert len(groups) == 1
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode_header(groups[0]) + bytes(400_000))
    assert [e.spec for e in read_header(path)] == groups[0]
    assert time.thread_time() - started < 100  # measured 3; the square of it would be hours
    with safe_open(path, "numpy") as file:
        assert len(file.keys()) == 100_000


def test_b033_headers_stay_readable(tmp_path: Path) -> None:
    """B033: many tensors of long names and no bytes: split by what the header takes, which safetensors
    limits to 100 MB.
    """
    specs = [
        TensorSpec(f"{i:06d}" + "\x01" * 1000, "U8", (0,)) for i in range(12_000)
    ]  # 6 bytes a character in JSON
    groups = split_into_files(specs, 1 << 30)
    assert len(groups) == 2
    assert sum(map(len, groups)) == len(specs)
    for group in groups:
        assert len(encode_header(group)) < 60_000_000


specs = st.lists(
    st.builds(
        TensorSpec,
        st.text('abcé"\\\x01重', min_size=1, max_size=9),
        st.sampled_from(sorted(WIDTHS)),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    unique_by=lambda s: s.name,
    max_size=12,
)


@given(specs, st.integers(1, 200))
def test_split_encode_read(found: list[TensorSpec], max_bytes: int) -> None:
    """Every tensor once, aligned, in files that are as large as asked for or have one tensor; headers
    come back.
    """
    groups = split_into_files(found, max_bytes)
    assert sorted((s for g in groups for s in g), key=lambda s: s.name) == sorted(found, key=lambda s: s.name)
    for group in groups:
        assert sum(s.nbytes for s in group) <= max_bytes or sum(s.nbytes > 0 for s in group) == 1
        header = encode_header(group)
        assert len(header) % 8 == 0
        position = len(header)
        for spec in group:
            assert position % spec.width == 0
            position += spec.nbytes


@given(specs)
def test_headers_come_back(tmp_path_factory: pytest.TempPathFactory, found: list[TensorSpec]) -> None:
    path = tmp_path_factory.getbasetemp() / "h.safetensors"
    path.write_bytes(encode_header(found) + bytes(sum(s.nbytes for s in found)))
    assert sorted(e.spec.name for e in read_header(path)) == sorted(s.name for s in found)
    assert {e.spec for e in read_header(path)} == set(found)


@given(st.binary(max_size=300).filter(lambda n: not n.strip().startswith(b"{")))
def test_noise_is_an_error_of_ours(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "n.safetensors"
    path.write_bytes(struct.pack("<Q", len(noise)) + noise)
    with pytest.raises(WeightcastError):
        read_header(path)


def test_names_and_index() -> None:
    names = file_names(2)
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    a, b = TensorSpec("a", "F32", (2,)), TensorSpec("é", "U8", (3,))
    index = json.loads(encode_index([(names[0], [a]), (names[1], [b])]))
    assert index == {"metadata": {"total_size": 11}, "weight_map": {"a": names[0], "é": names[1]}}
