"""Ranks as threads on one store: who publishes what, what all of them learn, and what failures leave behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.faultstore import FaultStore, Hold, refuse
from tests.publisher.hooks.kit import assert_same_bits
from tests.publisher.older import as_an_older_release, mix_of
from weightcast.manifest.deltas import changed_positions
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher
from weightcast.publisher.placement import Slice
from weightcast.schemas.errors import Conflict, Corrupt, StorageError, UsageError
from weightcast.schemas.settings import PublisherSettings

from .kit import (
    RANKS,
    Crew,
    agreed,
    columns,
    head,
    held_by_a_subscriber,
    model,
    published,
    rebuilt,
    rows,
    stir,
    together,
)


def assert_rebuilt(store: Any, expected: dict[str, torch.Tensor]) -> None:
    """The head has exactly these tensors."""
    found = rebuilt(store)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        assert found[name].numpy().tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name


def test_rows_and_columns_and_replicas_arrive_and_each_change_is_sent_once(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    for divide in (rows, columns):
        whole = model()
        crew = crew_at()
        manifest = published(crew.publish(lambda r, d=divide, w=whole: d(w, r, RANKS), step=7, reset=True))
        assert (manifest.step, manifest.reset) == (7, True)
        assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)
        for step in range(3):
            before = {n: t.clone() for n, t in whole.items()}
            stir(whole, step)
            manifest = published(crew.publish(lambda r, d=divide, w=whole: d(w, r, RANKS)))
            changed = sum(int((before[n].view(-1) != t.view(-1)).sum()) for n, t in whole.items())
            assert manifest.totals.changed == changed
            assert manifest.totals.elements == sum(t.numel() for t in whole.values())
            assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)
        assert ("boxes" in manifest.features) == (divide is columns)
        crew.close()


def test_a_stream_that_an_older_release_began_keeps_its_digest_until_a_reset(
    stores: list[FaultStore], crew_at: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model()
    with monkeypatch.context() as patch:
        as_an_older_release(patch)
        crew = crew_at()
        assert mix_of(stores[0], published(crew.publish(lambda r: rows(whole, r, RANKS)))) == 1
    for new, reset, expected in [(False, False, 1), (True, False, 1), (False, True, 2), (False, False, 2)]:
        if new:
            crew.close()
            crew = crew_at()
        stir(whole, expected)
        manifest = published(crew.publish(lambda r: columns(whole, r, RANKS), reset=reset))
        assert mix_of(stores[0], manifest) == expected
        assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)


def test_nothing_changed_is_a_version_without_shards(crew_at: Callable[..., Crew]) -> None:
    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS))
    manifest = published(crew.publish(lambda r: rows(whole, r, RANKS)))
    assert (manifest.version, manifest.shards, manifest.totals.changed) == (1, [], 0)


def test_ranks_with_different_tensors_and_with_none(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole, crew = model(), crew_at()
    stage = {
        0: ["embed.weight", "counts"],
        1: [],
        2: [n for n in whole if n not in ("embed.weight", "counts")],
    }
    for step in range(2):
        published(crew.publish(lambda r: {n: whole[n] for n in stage[r]}))
        assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)
        stir(whole, step)


def test_a_large_replica_is_cut_evenly_and_a_tied_one_is_sent_once(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole, crew = {"embed.weight": torch.randn(3000, 64).bfloat16()}, crew_at()
    tied = {**whole, "lm_head.weight": whole["embed.weight"]}
    crew.publish(lambda _: tied)
    stir(whole, 0)
    manifest = published(crew.publish(lambda _: tied))
    assert manifest.totals.elements == 3000 * 64
    assert manifest.totals.changed == 1920
    sent = [sum(s.size for s in manifest.shards if f"publisher.{r}-" in s.key) for r in range(RANKS)]
    assert max(sent) < 1.05 * sum(sent) / RANKS
    assert_same_bits(held_by_a_subscriber(stores[0], tied), tied)
    layout = StreamReader.open(stores[0]).layout(manifest.layout)
    assert layout["lm_head.weight"].tied_to == "embed.weight"


def test_b039_equal_replicas_are_accepted_once_and_others_refused_by_name(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    each = [{"norm.weight": torch.ones(8), "w": torch.ones(40, 8)} for _ in range(RANKS)]
    crew = crew_at()
    each[1]["norm.weight"][3] = 1.0000001
    error = agreed(crew.publish(lambda r: each[r]))
    assert isinstance(error, UsageError)
    assert "'norm.weight' has other bits on rank 1 than on rank 0" in str(error)
    assert head(stores[0]) is None
    each[1]["norm.weight"][3] = 1
    assert published(crew.publish(lambda r: each[r])).totals.elements == 8 + 320
    each[2]["w"][0, 0] = 5
    error = agreed(crew.publish(lambda r: each[r]))
    assert isinstance(error, UsageError)
    assert "ranks 0 and 2" in str(error)
    error = agreed(crew.publish(lambda r: each[r]))
    assert "'w' has other bits on rank 2 than on rank 0" in str(error)
    assert head(stores[0]) == 0
    each[2]["w"][0, 0] = 1
    each[0]["w"][0, 1] = each[1]["w"][0, 1] = each[2]["w"][0, 1] = 7
    assert published(crew.publish(lambda r: each[r])).totals.changed == 1


def test_tensors_that_do_not_fit_are_refused_on_all_ranks_by_name(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole, crew = model(), crew_at()

    def partly(rank: int) -> list[Slice]:
        return [s for s in rows(whole, rank, RANKS) if rank != 1 or s.name != "embed.weight"]

    error = agreed(crew.publish(partly))
    assert isinstance(error, UsageError)
    assert "no rank has 6400 of the 19200 elements of tensor 'embed.weight'" in str(error)
    error = agreed(crew.publish(lambda r: {"w": torch.ones(4, dtype=torch.half if r == 2 else torch.float)}))
    assert "'w' is F32[4] on rank 0 and F16[4] on rank 2" in str(error)
    error = agreed(crew.publish(lambda r: [Slice("w", (4,), (r,), torch.ones(2))]))
    assert "ranks 0 and 1 hold parts of tensor 'w' that overlap" in str(error)
    error = agreed(crew.publish(lambda r: {"w": torch.ones(4, device="meta" if r == 1 else "cpu")}))
    assert str(error).startswith("rank 1: tensor 'w' is on the meta device")
    assert head(stores[0]) is None
    assert published(crew.publish(lambda r: rows(whole, r, RANKS))).version == 0


def test_the_stream_goes_on_with_another_number_of_ranks_and_other_slices(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole = model()
    first = crew_at(3)
    first.publish(lambda r: rows(whole, r, 3))
    stir(whole, 1)
    first.publish(lambda r: rows(whole, r, 3))
    first.close()
    stir(whole, 2)
    second = crew_at(2)
    manifest = published(second.publish(lambda r: columns(whole, r, 2)))
    assert manifest.version == 3  # 2 is the fence
    assert 0 < manifest.totals.changed < manifest.totals.elements // 20
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)
    second.close()
    stir(whole, 3)
    with Publisher("", PublisherSettings(threads=1), store=stores[0]) as alone:
        assert alone.publish(whole).wait(30).version == 5
    third = crew_at(3)
    stir(whole, 4)
    assert published(third.publish(lambda r: rows(whole, r, 3))).version == 7
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)


def test_tensors_come_change_their_shape_and_go(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS))
    whole["layer.new.weight"] = torch.randn(50, 20)
    whole["experts"] = torch.randn(3, 20, 31).half()
    stir(whole, 1)
    manifest = published(crew.publish(lambda r: columns(whole, r, RANKS)))
    assert not manifest.reset
    assert_rebuilt(stores[0], whole)
    del whole["layer.new.weight"], whole["counts"]
    error = agreed(crew.publish(lambda r: rows(whole, r, RANKS)))
    assert isinstance(error, UsageError)
    assert "no rank has now: 'layer.new.weight', 'counts'" in str(error)
    stir(whole, 2)
    published(crew.publish(lambda r: rows(whole, r, RANKS), drop=["counts", "layer.new.weight"]))
    assert_rebuilt(stores[0], whole)


def test_files_and_metadata_of_rank_0_and_files_of_a_version_that_failed(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS), files={"config.json": b"1"}, metadata={"a": 1})
    stir(whole, 1)
    stores[2].on("put", "data/*", refuse)
    crew.publish(lambda r: rows(whole, r, RANKS), files={"config.json": b"2"})
    stores[2].heal()
    manifest = published(crew.publish(lambda r: rows(whole, r, RANKS)))
    listed = StreamReader.open(stores[0]).files(manifest.files)
    assert [f.name for f in listed.files] == ["config.json"]
    assert stores[0].get(f"files/{listed.files[0].sha256}", max_bytes=9) == b"2"


@pytest.mark.parametrize("failing", [0, 2])
def test_b095_a_rank_that_cannot_upload_leaves_no_version_and_all_ranks_hear_it(
    stores: list[FaultStore], crew_at: Callable[..., Crew], failing: int
) -> None:
    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS))
    stir(whole, 1)
    stores[failing].on("put", "data/*", refuse)
    error = agreed(crew.publish(lambda r: rows(whole, r, RANKS)))
    assert isinstance(error, StorageError)
    assert str(error).startswith(f"rank {failing}: cannot reach data/")
    assert head(stores[0]) == 0
    stores[failing].heal()
    stir(whole, 2)
    assert published(crew.publish(lambda r: rows(whole, r, RANKS))).version == 1
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)


def test_a_failed_first_version_and_a_failed_reset_are_made_up_for(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole, crew = model(), crew_at()
    stores[1].on("put", "data/*", refuse)
    assert isinstance(agreed(crew.publish(lambda r: rows(whole, r, RANKS))), StorageError)
    stores[1].heal()
    assert published(crew.publish(lambda r: rows(whole, r, RANKS))).version == 0
    stir(whole, 1)
    stores[0].on("put", "snapshots/*", refuse)
    stores[0].on("put_stream", "snapshots/*", refuse)
    assert isinstance(agreed(crew.publish(lambda r: rows(whole, r, RANKS), reset=True)), StorageError)
    stores[0].heal()
    stir(whole, 2)
    manifest = published(crew.publish(lambda r: rows(whole, r, RANKS)))
    assert (manifest.version, manifest.reset) == (1, False)
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)
    stir(whole, 3)
    assert published(crew.publish(lambda r: rows(whole, r, RANKS), reset=True)).reset
    stir(whole, 4)
    published(crew.publish(lambda r: rows(whole, r, RANKS)))
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)


@pytest.mark.parametrize("after", [False, True])
def test_a_commit_whose_outcome_is_unknown_is_settled_by_the_next_publish(
    stores: list[FaultStore], crew_at: Callable[..., Crew], after: bool
) -> None:
    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS))
    stir(whole, 1)
    stores[0].on("create", "versions/*", refuse, after=after)
    error = agreed(crew.publish(lambda r: rows(whole, r, RANKS)))
    assert isinstance(error, StorageError)
    stir(whole, 2)
    error = agreed(
        crew.publish(lambda r: rows(whole, r, RANKS))
    )  # still not known: nothing else may be begun
    assert isinstance(error, StorageError)
    stores[0].heal()
    stir(whole, 3)
    manifest = published(crew.publish(lambda r: rows(whole, r, RANKS)))
    assert manifest.version == 2
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)


def test_b082_b087_another_publisher_ends_this_one(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS))
    successor = crew_at(2)
    stir(whole, 1)
    error = agreed(crew.publish(lambda r: rows(whole, r, RANKS)))
    assert isinstance(error, Conflict)
    assert isinstance(agreed(crew.publish(lambda r: rows(whole, r, RANKS))), Conflict)
    assert isinstance(crew.publishers[0].broken, Conflict)
    assert published(successor.publish(lambda r: rows(whole, r, 2))).version == 2
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)


def test_while_a_version_is_on_its_way_the_next_one_is_skipped_or_waits_on_all_ranks(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS))
    stir(whole, 1)
    hold = Hold()
    stores[1].on("put", "data/*", hold)
    pending = together(
        [lambda r=rank: crew.publishers[r].publish(rows(whole, r, RANKS)) for rank in range(RANKS)]
    )
    assert hold.reached.wait(30)
    stir(whole, 2)
    assert agreed(crew.publish(lambda r: rows(whole, r, RANKS), busy="skip")) is None
    threading.Timer(0.3, hold.release).start()
    assert published(crew.publish(lambda r: rows(whole, r, RANKS), busy="wait")).version == 2
    assert [p.wait(30).version for p in pending] == [1] * RANKS
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)


def test_a_rank_that_takes_its_time_is_waited_for_as_long_as_it_lives(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS))
    stir(whole, 1)
    for messenger in crew.messengers:
        messenger.timeout_s = 1.0
    hold = Hold()
    stores[1].on("put", "data/*", hold)
    threading.Timer(2.5, hold.release).start()
    assert published(crew.publish(lambda r: rows(whole, r, RANKS))).version == 1


def test_an_error_that_nobody_waited_for_is_raised_once_by_the_next_publish_on_all_ranks(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS))
    stir(whole, 1)
    stores[2].on("put", "data/*", refuse)
    together([lambda r=rank: crew.publishers[r].publish(rows(whole, r, RANKS)) for rank in range(RANKS)])
    for publisher in crew.publishers:
        assert publisher.wait_idle(30)
    stores[2].heal()
    assert "rank 2: cannot reach data/" in str(agreed(crew.publish(lambda r: rows(whole, r, RANKS))))
    assert published(crew.publish(lambda r: rows(whole, r, RANKS))).version == 1


def test_bits_that_change_while_they_are_read_are_not_published(
    stores: list[FaultStore], crew_at: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightcast.publisher.group import draft

    whole, crew = model(), crew_at()
    crew.publish(lambda r: rows(whole, r, RANKS))
    stir(whole, 1)
    original, done = draft.encode_box, threading.Event()

    def restless(space: Any, box: Any, new: int, old: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(space, box, new, old, *args, **kwargs)
        if found.row is not None and not done.is_set():
            done.set()
            return type(found)(
                None, found.digest, type(found.change)()
            )  # as if the change had come after the look
        return found

    monkeypatch.setattr(draft, "encode_box", restless)
    error = agreed(crew.publish(lambda r: rows(whole, r, RANKS)))
    assert isinstance(error, Corrupt)
    assert "the changes found lead to state" in str(error)
    assert head(stores[0]) == 0
    assert published(crew.publish(lambda r: rows(whole, r, RANKS))).version == 1
    assert_same_bits(held_by_a_subscriber(stores[0], whole), whole)


def test_rows_of_all_ranks_together_are_each_element_at_most_once(
    stores: list[FaultStore], crew_at: Callable[..., Crew]
) -> None:
    whole, crew = model(), crew_at()
    crew.publish(lambda r: columns(whole, r, RANKS))
    for tensor in whole.values():
        tensor += 1
    manifest = published(crew.publish(lambda r: columns(whole, r, RANKS)))
    from concurrent.futures import ThreadPoolExecutor

    from weightcast.codec import Geometry

    geometry = Geometry(StreamReader.open(stores[0]).layout(manifest.layout))
    with ThreadPoolExecutor(1) as pool:
        fetched = DeltaFetcher(stores[0], pool, 1 << 26).rows(manifest)
        found = changed_positions(geometry, fetched, pool)  # refuses rows that overlap
    assert sum(len(p) for p in found.values()) == manifest.totals.changed == manifest.totals.elements


def test_casts_and_strided_tensors(stores: list[FaultStore], crew_at: Callable[..., Crew]) -> None:
    whole = {"a.weight": torch.randn(70, 90), "b": torch.randn(40, 30).t()}
    crew = crew_at(settings={"cast": {"*.weight": "bfloat16"}, "row_elements": 1 << 16})
    for step in range(2):
        published(crew.publish(lambda r, w=whole: rows(w, r, RANKS)))
        expected = {"a.weight": whole["a.weight"].bfloat16(), "b": whole["b"].contiguous()}
        assert_same_bits(held_by_a_subscriber(stores[0], expected), expected)
        whole = {"a.weight": whole["a.weight"] * 1.01, "b": whole["b"] + step}
