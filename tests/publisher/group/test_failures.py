"""What a failed publish of a group leaves behind: the next one goes on, and each error is told once."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.faultstore import FaultStore, Hold, refuse
from tests.publisher.hooks.kit import assert_same_bits
from weightcast.manifest.commit import create_stream
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher
from weightcast.publisher.group import GroupPublisher, TorchMessenger
from weightcast.publisher.group.flight import Flight
from weightcast.publisher.group.share import Share
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Conflict, StorageError, UsageError, WeightcastError
from weightcast.schemas.settings import PublisherSettings

from .kit import (
    RANKS,
    Crew,
    agreed,
    head,
    held_by_a_subscriber,
    model,
    published,
    raised,
    rows,
    stir,
    together,
)

Open = Callable[..., Crew]


def test_a_reset_under_a_held_plan_keeps_second_names_and_empty_tensors(
    stores: list[FaultStore], crew_at: Open
) -> None:
    """Neither is in any part: only the plan knows of them."""
    table, crew = torch.randn(30, 8), crew_at()
    whole = {"embed": table, "head": table, "none": torch.zeros(0, 3)}
    for reset in (False, False, True):
        manifest = published(crew.publish(lambda _: whole, reset=reset))
        table += 1
    layout = StreamReader.open(stores[0]).layout(manifest.layout)
    assert {spec.name for spec in layout} == set(whole)
    assert layout["head"].tied_to == "embed"
    published(crew.publish(lambda _: whole))
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)


def test_a_manifest_that_nobody_would_read_is_not_tried_again(
    stores: list[FaultStore], crew_at: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, crew = model(), crew_at()
    published(crew.publish(lambda r: rows(whole, r, RANKS)))
    stir(whole, 1)
    with monkeypatch.context() as patch:
        patch.setattr("weightcast.manifest.commit.MAX_MANIFEST_BYTES", 100)
        error = agreed(crew.publish(lambda r: rows(whole, r, RANKS)))
    assert isinstance(error, UsageError)
    stir(whole, 2)
    assert published(crew.publish(lambda r: rows(whole, r, RANKS))).version == 1
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)


def test_ranks_that_were_told_by_publish_are_not_told_again_by_close(
    stores: list[FaultStore], crew_at: Open
) -> None:
    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS))
    stir(whole, 1)
    stores[2].on("put", "data/*", refuse)
    together([lambda r=rank: crew.publishers[r].publish(rows(whole, r, RANKS)) for rank in range(RANKS)])
    assert all(publisher.wait_idle(30) for publisher in crew.publishers)
    assert isinstance(agreed(crew.publish(lambda r: rows(whole, r, RANKS))), StorageError)
    assert together([publisher.close for publisher in crew.publishers]) == [None] * RANKS


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_drop_on_one_rank_is_told_to_all(crew_at: Open, bad: int) -> None:
    whole, crew = model(), crew_at()
    drop: list[Any] = [5 if rank == bad else () for rank in range(RANKS)]
    found = together(
        [
            lambda r=rank: crew.publishers[r].publish(rows(whole, r, RANKS), drop=drop[r])
            for rank in range(RANKS)
        ]
    )
    error = agreed(found)
    assert isinstance(error, WeightcastError)
    assert str(error).startswith(f"rank {bad}: TypeError")
    assert published(crew.publish(lambda r: rows(whole, r, RANKS))).version == 0


def test_a_copy_that_cannot_follow_is_built_anew(
    stores: list[FaultStore], crew_at: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason is: the version is committed, and all ranks say so."""
    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS))
    stir(whole, 1)

    def fail(*_: Any) -> None:
        raise MemoryError("told to fail")

    with monkeypatch.context() as patch:
        patch.setattr("weightcast.publisher.group.holding.update_box", fail)
        assert published(crew.publish(lambda r: rows(whole, r, RANKS))).version == 1
    stir(whole, 2)
    assert published(crew.publish(lambda r: rows(whole, r, RANKS))).version == 2
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)


def test_nobody_reads_the_tensors_once_publish_has_raised(
    crew_at: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 cannot take up the head; rank 0 is still about to when the trainer goes on."""
    whole = model()
    first = crew_at(2)
    first.publish(lambda _: whole)
    first.close()
    crew = crew_at(2)
    going, read = threading.Event(), []

    def load(reader: StreamReader, *_: Any) -> Digest:
        if reader.store is crew.stores[1]:
            raise StorageError("told to fail")
        assert going.wait(30)
        return Digest()

    monkeypatch.setattr("weightcast.publisher.group.member.load", load)
    monkeypatch.setattr(Share, "replicas", lambda *_: read.append(1) or {})
    for messenger in crew.messengers:
        messenger.timeout_s = 1.0

    outcomes = crew.publish(lambda _: whole)
    assert isinstance(agreed(outcomes), StorageError)
    going.set()
    crew.publishers[0]._helper.shutdown(wait=True)
    assert read == []


def test_a_rank_that_cannot_open_the_stream_is_an_error_for_all(stores: list[FaultStore]) -> None:
    keys = dist.HashStore()
    stores[1].on("get", "*", refuse)
    messengers = [TorchMessenger.over(keys, rank, 2, 30) for rank in range(2)]
    error = agreed(
        together([lambda r=rank: GroupPublisher("", messengers[r], store=stores[r]) for rank in range(2)])
    )
    assert isinstance(error, StorageError)
    assert str(error).startswith("rank 1: cannot reach")


def test_ranks_on_different_streams_do_not_begin(stores: list[FaultStore]) -> None:
    """As with a path on each host's own disk: the shards of one rank would be in another stream than their version."""
    other = open_store(f"memory://{uuid.uuid4().hex}")
    create_stream(other)
    keys, each = dist.HashStore(), [stores[0], other]
    messengers = [TorchMessenger.over(keys, rank, 2, 30) for rank in range(2)]
    error = agreed(
        together([lambda r=rank: GroupPublisher("", messengers[r], store=each[r]) for rank in range(2)])
    )
    assert isinstance(error, UsageError)
    assert "rank 1 has opened stream" in str(error)


def test_a_thread_that_does_not_start_leaves_nothing_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    flight = Flight()
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError):
        flight.start(lambda: raised(StorageError("never")))
    assert (flight.busy, flight.join(1)) == (False, True)


def test_second_names_that_no_rank_lists_stay_until_they_are_dropped_or_a_reset(
    stores: list[FaultStore], crew_at: Open
) -> None:
    table = torch.randn(30, 8)
    less, both = {"embed": table}, {"embed": table, "head": table}

    def names() -> set[str]:
        return {s.name for s in StreamReader.open(stores[0]).layout(manifest.layout)}

    for options in ({"drop": ["head"]}, {"reset": True}):
        crew = crew_at()
        published(crew.publish(lambda _: both, reset=True))
        for step in range(2):
            table += 1
            manifest = published(crew.publish(lambda _: less))
            assert names() == {"embed", "head"}, step
        table += 1
        manifest = published(crew.publish(lambda _: less, **options))
        assert names() == {"embed"}
        manifest = published(crew.publish(lambda _: less))
        assert names() == {"embed"}
        crew.close()


def test_a_group_and_a_publisher_take_over_from_each_other_while_all_are_alive(
    stores: list[FaultStore], crew_at: Open
) -> None:
    """Each predecessor has a version on its way, and loses it."""
    whole, one = model(), PublisherSettings(threads=1)
    first = Publisher("", one, store=stores[0])
    first.publish(whole).wait(30)
    stir(whole, 1)
    hold = Hold()
    stores[0].on("create", "versions/*", hold, times=1)
    lost = first.publish(whole)
    assert hold.reached.wait(30)
    crew = crew_at()  # version 1 is its fence
    hold.release()
    with pytest.raises(Conflict):
        lost.wait(30)
    stir(whole, 2)
    assert published(crew.publish(lambda r: rows(whole, r, RANKS))).version == 2
    stir(whole, 3)
    hold = Hold()
    stores[0].on("create", "versions/*", hold, times=1)
    late = together(
        [lambda r=rank: crew.publishers[r].publish(rows(whole, r, RANKS)) for rank in range(RANKS)]
    )
    assert hold.reached.wait(30)
    last = Publisher("", one, store=stores[1])  # 3
    hold.release()
    assert isinstance(agreed(together([lambda p=p: p.wait(30) for p in late])), Conflict)
    assert isinstance(agreed(crew.publish(lambda r: rows(whole, r, RANKS))), Conflict)
    assert last.publish(whole).wait(30).version == head(stores[0]) == 4
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)
    last.close()
    with pytest.raises(Conflict):
        first.close()
