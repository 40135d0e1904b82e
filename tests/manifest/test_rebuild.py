"""Rebuilding versions: from snapshots and deltas, over changes of layout, resets, holes, pruning and
damage.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.codec import Geometry, Memory
from weightcast.manifest.commit import hint_head, now
from weightcast.manifest.rebuild import (
    State,
    copy_file,
    proved,
    read_chain,
    rebuild,
    retained,
    snapshot_choices,
)
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.manifest.tensorfile import encode_header
from weightcast.schemas.errors import Corrupt, Gap, NotFound, Untrusted
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.manifest import Floor
from weightcast.schemas.names import FLOOR_KEY, version_key

from .author import POOL, Author, CountingStore, Tensors, check_state

START = Tensors.of(w=("BF16", [1, 2, 3, 4]), b=("F32", [[5], [6]]))


def memory_author() -> Author:
    return Author(open_store(f"memory://{uuid.uuid4().hex}"))


@pytest.fixture(params=["memory", "local"])
def author(request: pytest.FixtureRequest, tmp_path: Path) -> Author:
    return memory_author() if request.param == "memory" else Author(open_store(str(tmp_path / "store")))


def extend(author: Author, head: int, snapshots: tuple[int, ...] = ()) -> None:
    """Versions up to `head`, each of which changes one element."""
    if not author.positions:
        author.reset(START)
    while author.head < head:
        author.publish(author.tensors[-1].changed("w", (author.head % 4, 100 + author.head)))
        if author.head in snapshots:
            author.snapshot()


def lower(author: Author, floor: int) -> None:
    """Raise the floor, and lose what lies below it."""
    author.store.put(FLOOR_KEY, Floor(version=floor, time=now()).encode())
    for prefix in ("data/", "snapshots/"):
        for entry in list(author.store.list(prefix)):
            version = int(entry.key[len(prefix) : len(prefix) + 12])
            if version < floor or (prefix == "data/" and version == floor):
                author.store.delete(entry.key)


def counted(author: Author) -> tuple[CountingStore, StreamReader]:
    counting = CountingStore(author.store)
    return counting, StreamReader(counting, author.reader.stream)


def test_every_version_rebuilds(author: Author) -> None:
    extend(author, 6, (3,))
    author.publish(author.tensors[-1])
    for version in range(8):
        state = rebuild(author.reader, version, POOL)
        check_state(state, author.tensors[version])
        assert state.position == author.positions[version]


def every_layout() -> list[Tensors]:
    """Added, removed, reshaped, retyped, tied, untied, emptied, renamed; and back to the start."""
    one = Tensors.of(a=("BF16", [1, 2, 3, 4]), b=("F32", [[5, 6]]), z=("U8", 7))
    return [
        one,
        Tensors.of(
            a=("BF16", [1, 2, 9, 4]),
            b=("F32", [[5, 6]]),
            z=("U8", 7),
            n=("BF16", [[0, 8]]),
            zero=("I64", [0, 0]),
        ),
        Tensors.of(a=("BF16", [1, 2, 9, 4]), z=("U8", 7), n=("BF16", [[0, 8]])),
        Tensors.of(a=("BF16", [[1, 2], [9, 4]]), z=("U8", 7), n=("BF16", [[0, 8]])),
        Tensors.of(a=("F16", [[1, 2], [9, 4]]), z=("U8", 7), n=("BF16", [[0, 8]])),
        Tensors.of({"t": "a"}, a=("F16", [[1, 2], [9, 4]]), z=("U8", 7), n=("BF16", [[0, 8]])),
        Tensors.of({"t": "a"}, a=("F16", [[1, 2], [9, 5]]), z=("U8", 7), n=("BF16", [[0, 8]])),
        Tensors.of(
            a=("F16", [[1, 2], [9, 5]]), t=("F16", [[1, 2], [9, 6]]), z=("U8", 7), n=("BF16", [[0, 8]])
        ),
        Tensors.of(
            {"a": "t"},
            t=("F16", [[1, 2], [9, 6]]),
            z=("U8", 7),
            n=("BF16", [[0, 8]]),
            e=("C64", np.zeros((0, 3))),
        ),
        Tensors.of(z=("U8", 7), e=("C64", np.zeros((0, 3)))),
        one,
    ]


@pytest.mark.parametrize("coding", [None, "gap", "pairs", "dense", "whole"])
def test_changes_of_layout(author: Author, coding: Any) -> None:
    """Each step alone, and all from the start; the tensors that stay keep their bits, the others come
    from zero.
    """
    states = every_layout()
    author.reset(states[0])
    for tensors in states[1:]:
        author.publish(tensors, coding=coding)
    held = rebuild(author.reader, 0, POOL)
    for version, tensors in enumerate(states):
        check_state(rebuild(author.reader, version, POOL), tensors)
        held = rebuild(author.reader, version, POOL, start=held)
        check_state(held, tensors)
    assert [t.tied_to for t in rebuild(author.reader, 5, POOL).layout if t.name == "t"] == ["a"]


def test_what_is_retained() -> None:
    states = every_layout()
    assert retained(states[2].layout, states[3].layout) == ["n", "z"]
    assert retained(states[5].layout, states[7].layout) == ["n", "a", "z"], (
        "t was tied: it has no bits to keep"
    )


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_histories(data: st.DataObject) -> None:
    """Random tensors come, go, change shape, dtype and bits; resets and snapshots in between."""
    author = memory_author()
    shapes = [(), (3,), (2, 2), (0,), (5,)]
    for _ in range(data.draw(st.integers(2, 6))):
        names = data.draw(st.sets(st.sampled_from("abcd"), min_size=1))
        named: dict[str, Any] = {}
        for name in sorted(names):
            shape = data.draw(st.sampled_from(shapes))
            values = data.draw(
                st.lists(st.integers(0, 3), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
            )
            named[name] = (data.draw(st.sampled_from(["U8", "BF16", "F64"])), np.array(values).reshape(shape))
        tensors = Tensors.of(**named)
        if not author.positions or data.draw(st.booleans()):
            author.reset(tensors)
        else:
            author.publish(
                tensors,
                coding=data.draw(st.sampled_from([None, "gap", "pairs", "dense", "whole"])),
                small=1,
                row_elements=3,
            )
        if data.draw(st.booleans()):
            author.snapshot()
    for version in range(author.head + 1):
        check_state(rebuild(author.reader, version, POOL), author.tensors[version])


# Ways


def test_b110_a_late_reader_fetches_the_snapshot_and_what_follows(author: Author) -> None:
    """B110: snapshots at 0 and 10, head 12: v10 to v12 are read, and nothing else."""
    extend(author, 12, (10,))
    hint_head(author.store, 12)
    counting, reader = counted(author)
    head = reader.head()
    assert head == 12
    check_state(rebuild(reader, head, POOL), author.tensors[12])
    assert {k.split("/")[1] for k in counting.keys("data/")} == {f"{v:012d}" for v in (11, 12)}
    assert {k.split("/")[1] for k in counting.keys("snapshots/") if k != "snapshots/"} == {f"{10:012d}"}
    assert {int(k[9:21]) for k in counting.keys("versions/")} == {10, 11, 12, 13}
    assert len(counting.calls) <= 15


def test_b111_a_jump_over_what_was_pruned(author: Author) -> None:
    """B111: at v3, all below the snapshot of v10 pruned, head 12. Then the same without a snapshot."""
    extend(author, 12, (10,))
    held = rebuild(author.reader, 3, POOL)
    lower(author, 10)
    check_state(rebuild(author.reader, 12, POOL, start=held), author.tensors[12])
    for entry in list(author.store.list("snapshots/")):
        author.store.delete(entry.key)
    held = State(author.positions[3], held.geometry, held.memory)
    before = {n: held.memory.tensor(n).tobytes() for n in ("w", "b")}
    with pytest.raises(Gap, match="version 4 is not available as a delta and no snapshot leads past it"):
        rebuild(author.reader, 12, POOL, start=held)
    assert {n: held.memory.tensor(n).tobytes() for n in ("w", "b")} == before


def test_b112_a_version_is_missing(author: Author) -> None:
    """B112: v6 is gone: v7 is not applied, the message names v6; a snapshot of v8 leads on."""
    extend(author, 8)
    missing = author.reader.manifest_bytes(6)
    assert missing is not None
    author.store.delete(version_key(6))
    held = rebuild(author.reader, 5, POOL)
    with pytest.raises(Gap, match="version 6 "):
        rebuild(author.reader, 7, POOL, start=held)
    author.snapshot(8)
    check_state(rebuild(author.reader, 8, POOL, start=held), author.tensors[8])
    assert [p.version for p in read_chain(author.reader, 4, 8, POOL)] == [4, 5]


def test_b113_a_state_of_another_stream_is_refused() -> None:
    """B113: equal names, shapes and bits, but another run."""
    one, two = memory_author(), memory_author()
    extend(one, 4)
    extend(two, 4)
    with pytest.raises(Untrusted, match="SHA-256"):
        rebuild(two.reader, 4, POOL, start=rebuild(one.reader, 3, POOL))


def test_b116_a_shard_that_vanishes_while_it_is_read(author: Author) -> None:
    """B116: the manifest was read, then the version is pruned: the attempt fails, and the next one takes
    the snapshot.
    """
    extend(author, 7, (6,))
    held = rebuild(author.reader, 3, POOL)
    for shard in author.positions[4].manifest.shards:
        author.store.delete(shard.key)
    with pytest.raises(NotFound, match=f"data/{4:012d}"):
        rebuild(author.reader, 5, POOL, start=held)
    lower(author, 6)
    check_state(rebuild(author.reader, 7, POOL, start=rebuild(author.reader, 6, POOL)), author.tensors[7])


def test_b120_following_downloads_each_delta_once(author: Author) -> None:
    """B120: v1 to v16 one by one: 15 deltas after v1."""
    extend(author, 16)
    counting, reader = counted(author)
    held = rebuild(reader, 1, POOL)
    counting.calls.clear()
    for version in range(2, 17):
        held = rebuild(reader, version, POOL, start=held)
    check_state(held, author.tensors[16])
    assert len(counting.keys("data/")) == 15


def test_an_older_version_does_not_start_from_a_newer_state(author: Author) -> None:
    extend(author, 6)
    newer = rebuild(author.reader, 6, POOL)
    check_state(rebuild(author.reader, 4, POOL, start=newer), author.tensors[4])


def test_b123_a_damaged_snapshot_is_passed_over(author: Author, caplog: pytest.LogCaptureFixture) -> None:
    """B123: the newest snapshot's weights are flipped, cut, or gone in turn: the one before and the
    deltas lead on.
    """
    caplog.set_level(logging.DEBUG)
    extend(author, 8, (2, 6))
    key = f"snapshots/{6:012d}/model-00001-of-00001.safetensors"
    good = author.store.get(key, max_bytes=1 << 20)
    for bad in (good[:-1] + bytes([good[-1] ^ 1]), good[:-1], b"", None):
        author.store.delete(key) if bad is None else author.store.put(key, bad)
        check_state(rebuild(author.reader, 8, POOL), author.tensors[8])
    with_manifest = f"snapshots/{6:012d}/manifest.json"
    author.store.put(with_manifest, b"{}")
    check_state(rebuild(author.reader, 8, POOL), author.tensors[8])
    assert [c.version for c in snapshot_choices(author.reader, 8)] == [2, 0]
    assert [c.version for c in snapshot_choices(author.reader, 8, limit=1)] == [2]


def test_b123_damage_is_reported_where_nothing_else_leads_on(author: Author) -> None:
    extend(author, 8, (6,))
    lower(author, 6)
    author.store.put(f"snapshots/{6:012d}/model-00001-of-00001.safetensors", b"x")
    with pytest.raises(Corrupt, match=f"snapshots/{6:012d}/model-00001"):
        rebuild(author.reader, 8, POOL)


def test_a_state_that_is_not_what_the_manifest_says_is_refused(author: Author) -> None:
    extend(author, 2)
    state = author.state(1)
    assert proved(state, POOL) is state
    with pytest.raises(Corrupt, match="version 2 rebuilt has state"):
        proved(State(author.positions[2], state.geometry, state.memory), POOL)


def test_a_lie_in_the_digest_after_is_found(author: Author) -> None:
    extend(author, 1)
    target = author.tensors[-1].changed("w", (0, 55))
    author.publish(target)
    document = author.positions[2].manifest.model_copy(update={"digest_after": "0" * 32})
    author.store.put(version_key(2), document.encode())
    with pytest.raises(Corrupt, match="version 2 rebuilt has state"):
        rebuild(author.reader, 2, POOL)


def test_a_base_with_one_wrong_bit_is_found(author: Author) -> None:
    """The step is taken from the old bits, so that the outcome's digest shows a wrong base wherever it
    was changed.
    """
    extend(author, 3)
    held = rebuild(author.reader, 2, POOL)
    held.memory.tensor("w")[2] ^= 1  # version 3 changes this element
    with pytest.raises(Corrupt):
        proved(rebuild(author.reader, 3, POOL, start=held), POOL)


def test_read_chain_asks_for_a_bounded_number_beyond_a_hole(author: Author) -> None:
    extend(author, 3)
    counting, reader = counted(author)
    assert [p.version for p in read_chain(reader, 1, 10**12 - 1, POOL)] == [1, 2, 3]
    assert len(counting.calls) <= 64


def test_copying_a_file_that_the_layout_does_not_list(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    spec = TensorSpec("w", "U8", (2,))
    path.write_bytes(encode_header([spec]) + b"ab")
    for other in (TensorSpec("v", "U8", (2,)), TensorSpec("w", "I8", (2,)), TensorSpec("w", "U8", (2, 1))):
        layout = Layout.of([other])
        with pytest.raises(Corrupt, match="'w' U8"):
            copy_file(path, layout, Memory.allocate(Geometry(layout)))


def test_scratch_folders_are_removed(author: Author, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    extend(author, 1)
    rebuild(author.reader, 1, POOL)
    named = author.positions[0].manifest.snapshot
    assert named is not None
    author.store.put(named.key.replace("manifest.json", "model-00001-of-00001.safetensors"), b"x")
    with pytest.raises(Corrupt):
        rebuild(author.reader, 1, POOL)
    assert list(scratch.iterdir()) == []
