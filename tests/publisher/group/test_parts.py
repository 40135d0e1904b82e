"""Parts by hand: staged by writers that know nothing of each other, committed by one process."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.faultstore import FaultStore, refuse
from tests.publisher.hooks.kit import assert_same_bits
from weightcast.manifest.store import StoreSettings, open_store
from weightcast.publisher.group import PartWriter, commit_parts
from weightcast.schemas.errors import Conflict, Corrupt, StorageError, Unsupported, Untrusted, UsageError
from weightcast.schemas.part import Part
from weightcast.schemas.settings import PublisherSettings

from .kit import columns, head, held_by_a_subscriber, model, rows, stir

SIZE = 2
ONE = PublisherSettings(threads=1)


@pytest.fixture
def store() -> FaultStore:
    """A fresh store in memory."""
    return FaultStore(open_store(f"memory://{uuid.uuid4().hex}", settings=StoreSettings(max_attempts=1)))


@pytest.fixture
def writers(store: FaultStore) -> Iterator[list[PartWriter]]:
    """Two writers."""
    with ExitStack() as stack:
        yield [stack.enter_context(PartWriter("", rank, SIZE, ONE, store=store)) for rank in range(SIZE)]


def staged(writers: list[PartWriter], whole: dict[str, torch.Tensor], **options: Any) -> list[Part]:
    """A part of each writer's rows."""
    return [writer.stage(rows(whole, rank, SIZE), **options) for rank, writer in enumerate(writers)]


def test_parts_as_text_lead_a_subscriber_from_version_to_version(
    store: FaultStore, writers: list[PartWriter]
) -> None:
    whole = model()
    for step in range(4):
        texts = [part.encode().decode() for part in staged(writers, whole)]
        manifest = commit_parts("", texts, step=step, store=store, settings=ONE)
        assert (manifest.version, manifest.step) == (step, step)
        if step != 1:  # where nobody says so, the writers see by themselves that theirs was committed
            for writer in writers:
                writer.settle(manifest)
        assert_same_bits(held_by_a_subscriber(store, whole), whole)
        stir(whole, step)
    assert 0 < manifest.totals.changed < manifest.totals.elements // 20


def test_a_part_that_was_never_committed_is_made_up_for(store: FaultStore, writers: list[PartWriter]) -> None:
    whole = model()
    commit_parts("", staged(writers, whole), store=store)
    stir(whole, 1)
    staged(writers, whole)
    stir(whole, 2)
    assert commit_parts("", staged(writers, whole), store=store).version == 1
    assert_same_bits(held_by_a_subscriber(store, whole), whole)


def test_other_writers_go_on_from_the_head(store: FaultStore, writers: list[PartWriter]) -> None:
    whole = model()
    commit_parts("", staged(writers, whole), store=store)
    stir(whole, 1)
    parts = []
    for rank in range(3):
        own = [s for s in columns(whole, rank, 3) if rank == 0 or len(s.shape) == 2]  # others have one owner
        with PartWriter("", rank, 3, ONE, store=store) as writer:
            parts.append(writer.stage(own))
    manifest = commit_parts("", parts, store=store)
    assert "boxes" in manifest.features
    assert_same_bits(held_by_a_subscriber(store, whole), whole)


def test_tied_tensors_are_sent_once(store: FaultStore) -> None:
    whole = {"embed.weight": torch.randn(50, 8)}
    tied = {**whole, "lm_head.weight": whole["embed.weight"]}
    with PartWriter("", 0, 1, ONE, store=store) as writer:
        for step in range(3):
            manifest = commit_parts("", [writer.stage(tied)], store=store)
            assert manifest.totals.elements == 400
            assert_same_bits(held_by_a_subscriber(store, tied), tied)
            stir(whole, step)


def test_what_is_not_one_whole_version_is_not_committed(store: FaultStore, writers: list[PartWriter]) -> None:
    whole = model()
    first = staged(writers, whole)
    with pytest.raises(UsageError, match="parts of ranks 1 of 2 are missing"):
        commit_parts("", first[:1], store=store)
    with pytest.raises(UsageError, match="two parts of rank 0"):
        commit_parts("", [first[0], first[0]], store=store)
    assert not list(store.list("versions/"))
    commit_parts("", first, store=store)
    stir(whole, 1)
    second = staged(writers, whole)
    with pytest.raises(UsageError, match="the part of rank 1 is of version 0 told from None"):
        commit_parts("", [second[0], first[1]], store=store)
    with PartWriter("", 1, SIZE, ONE, store=store) as twice:
        again = twice.stage(rows(whole, 0, SIZE))
    with pytest.raises(Corrupt, match="in no part, or in two"):
        commit_parts("", [second[0], again], store=store)
    less = [s for s in rows(whole, 1, SIZE) if s.name != "embed.weight"]
    with PartWriter("", 1, SIZE, ONE, store=store) as partly:
        part = partly.stage(less)
    with pytest.raises(Corrupt, match="in no part, or in two"):
        commit_parts("", [second[0], part], store=store)
    commit_parts("", second, store=store)
    stir(whole, 2)
    with pytest.raises(Conflict, match="the next version is 2"):
        commit_parts("", [second[0], again], store=store)
    assert head(store) == 1


def test_whole_parts_must_cover_every_tensor(store: FaultStore, writers: list[PartWriter]) -> None:
    whole = model()
    parts = [
        writers[0].stage(rows(whole, 0, SIZE)),
        writers[1].stage([s for s in rows(whole, 1, SIZE) if s.name != "embed.weight"]),
    ]
    with pytest.raises(UsageError, match="elements together"):
        commit_parts("", parts, store=store)
    assert not list(store.list("versions/"))


@pytest.mark.parametrize("after", [False, True])
def test_the_same_parts_again_find_out_whether_they_were_committed(
    store: FaultStore, writers: list[PartWriter], after: bool
) -> None:
    whole = model()
    for version in range(2):
        parts = staged(writers, whole)
        store.on("create", "versions/*", refuse, after=after)
        with pytest.raises(StorageError):
            commit_parts("", parts, step=version, store=store)
        store.heal()
        assert commit_parts("", parts, step=version, store=store).version == version
        assert commit_parts("", parts, step=version, store=store).version == version
        stir(whole, version)
    assert head(store) == 1


def test_a_part_is_read_strictly() -> None:
    part = {
        "kind": "part", "format": 1, "version": 3, "base": "a" * 64, "rank": 1, "size": 2, "shards": [], "features": [],
        "tiles": [], "ties": {}, "elements": 7, "digest_before": f"{1:032x}", "digest_after": f"{3:032x}",
        "digest_moved": f"{2:032x}",
    }  # fmt: skip
    assert Part.decode(json.dumps(part)).elements == 7
    shard = {
        "key": "data/000000000009/w-00000-a.arrow",
        "size": 1,
        "sha256": "b" * 64,
        "rows": 1,
        "elements": 1,
    }
    for change, what in [
        ({"rank": 2}, "rank 2 of 2"),
        ({"digest_moved": f"{1:032x}"}, "do not lead from its digest"),
        ({"other": 1}, "other"),
        ({"version": -1}, "version"),
        ({"shards": [shard | {"changed": 1}]}, "does not belong to version 3"),
        ({"tiles": [[]]}, "exactly the shards of a whole part"),
    ]:
        text = json.dumps(part | change)
        with pytest.raises(Untrusted, match=what):
            Part.decode(text)
    newer = json.dumps(part | {"format": 2})
    with pytest.raises(Unsupported):
        Part.decode(newer)
