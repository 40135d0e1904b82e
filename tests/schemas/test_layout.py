"""The tensor table: what it may say, how it is ordered, how it is stored."""

from __future__ import annotations

import hashlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.schemas.dtypes import TORCH_NAMES, WIDTHS, width_of
from weightcast.schemas.errors import Untrusted, UsageError
from weightcast.schemas.layout import LAYOUT_SCHEMA, Layout, TensorSpec


def encoded(rows: list[tuple[Any, ...]], schema: pa.Schema = LAYOUT_SCHEMA, **options: Any) -> bytes:
    """An Arrow IPC file with these rows."""
    columns = {n: [r[i] for r in rows] for i, n in enumerate(schema.names)}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    return sink.getvalue().to_pybytes()


specs = st.lists(
    st.builds(
        TensorSpec,
        st.text(min_size=1, max_size=6).filter(lambda t: "\0" not in t),
        st.sampled_from(sorted(WIDTHS)),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    unique_by=lambda s: s.name,
    max_size=8,
)


@given(specs, st.randoms())
def test_round_trip_in_any_order(found: list[TensorSpec], random: Any) -> None:
    layout = Layout.of(found)
    random.shuffle(found)
    assert Layout.of(found).encoded == layout.encoded
    again = Layout.decode(layout.encoded)
    assert again == layout
    assert again.sha256 == layout.sha256 == hashlib.sha256(layout.encoded).hexdigest()
    assert list(layout) == sorted(found, key=lambda s: (s.dtype, s.name))
    assert layout.elements == sum(s.elements for s in found)
    assert layout.nbytes == sum(s.elements * WIDTHS[s.dtype] for s in found)
    for dtype, (first, last) in layout.dtypes.items():
        assert {s.dtype for s in layout.stored[first:last]} == {dtype}


def test_ties() -> None:
    a = TensorSpec("a", "BF16", (2, 3))
    layout = Layout.of([TensorSpec("b", "BF16", (2, 3), "a"), a])
    assert layout.stored == (a,)
    assert (len(layout), layout.elements, layout["b"].tied_to, "c" in layout) == (2, 6, "a", False)
    for bad in (
        TensorSpec("b", "BF16", (2, 3), "x"), TensorSpec("b", "BF16", (3, 2), "a"), TensorSpec("b", "F16", (2, 3), "a"),
        TensorSpec("b", "BF16", (2, 3), "b"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="'b' is tied to"):
            Layout.of([a, bad])
    with pytest.raises(UsageError, match="tied to 'b'"):
        Layout.of([a, TensorSpec("b", "BF16", (2, 3), "a"), TensorSpec("c", "BF16", (2, 3), "b")])


def test_two_tensors_of_one_name() -> None:
    with pytest.raises(UsageError, match="two tensors are called 'a'"):
        Layout.of([TensorSpec("a", "U8", (1,)), TensorSpec("a", "F32", (1,))])


@pytest.mark.parametrize("shape", [(1 << 32, 1 << 32), (1 << 63,), (-1,), (-1, -1), (1,) * 33, (1 << 49,)])
def test_b167_impossible_shapes(shape: tuple[int, ...]) -> None:
    """B167: and the largest that is possible."""
    with pytest.raises(UsageError, match="'w' has an impossible shape"):
        Layout.of([TensorSpec("w", "U8", shape)])
    assert Layout.of([TensorSpec("w", "U8", (1 << 48,))]).elements == 1 << 48


def test_b167_impossible_sums() -> None:
    with pytest.raises(UsageError, match="elements in all"):
        Layout.of([TensorSpec(f"w{i}", "U8", (1 << 47,)) for i in range(3)])


ROW = ("w", "U8", [2], None)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not a tensor table"),
        (b"ARROW1\0\0" + bytes(100), "not a tensor table"),
        (encoded([ROW])[:-1], "not a tensor table"),
        (encoded([ROW])[:200], "not a tensor table"),
        (encoded([ROW, ROW]), "two tensors are called"),
        (encoded([("w", "XYZ9", [2], None)]), "dtype 'XYZ9'"),
        (encoded([("w", "U8", [-2], None)]), "impossible shape"),
        (encoded([("w", "U8", [2] * 100_000, None)]), "impossible shape"),
        (encoded([("", "U8", [2], None)]), "is empty"),
        (encoded([("b", "U8", [2], None), ("a", "U8", [2], None)]), "by dtype and name"),
        (encoded([ROW], pa.schema([*list(LAYOUT_SCHEMA)[:3]])), "has columns"),
        (encoded([ROW], pa.schema([f.with_nullable(True) for f in LAYOUT_SCHEMA])), "has columns"),
        (encoded([ROW] * 1, compression="zstd"), "buffer compression"),
        (encoded([ROW] * 1, compression="lz4"), "buffer compression"),
    ],
)
def test_tables_that_are_none(data: bytes, match: str) -> None:
    with pytest.raises(Untrusted, match=match) as caught:
        Layout.decode(data, "layouts/x.arrow")
    assert "layouts/x.arrow" in str(caught.value)


def test_nulls_are_refused() -> None:
    """Arrow's writer does not mind a null in a field that may have none."""
    arrays = [
        pa.array([None], pa.string()),
        pa.array(["U8"]),
        pa.array([[2]], LAYOUT_SCHEMA.field("shape").type),
        pa.array([None], pa.string()),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, LAYOUT_SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=LAYOUT_SCHEMA))
    with pytest.raises(Untrusted, match="column 'name' has a null"):
        Layout.decode(sink.getvalue().to_pybytes())


def test_noise_never_gets_through() -> None:
    """Each byte of a table flipped: it is refused, or is another table, but nothing else happens."""
    good = Layout.of([TensorSpec("abc", "U8", (2,)), TensorSpec("d", "F32", ())]).encoded
    for i in range(len(good)):
        data = bytearray(good)
        data[i] ^= 0xFF
        try:
            found = Layout.decode(bytes(data))
        except Untrusted:
            continue
        assert all(s.dtype in WIDTHS for s in found)


def test_dtypes() -> None:
    assert set(TORCH_NAMES.values()) == set(WIDTHS)
    assert width_of("C64", "c") == 8
    for dtype in ("C128", "F4", "XYZ9", ""):
        with pytest.raises(UsageError, match=f"tensor 'c' has dtype '{dtype}'"):
            width_of(dtype, "c")
