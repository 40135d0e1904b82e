"""Every bit of every kind of tensor arrives, in both targets, by every way there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Gap, Untrusted, UsageError
from weightcast.subscriber import CheckpointFolder, Subscriber, Tensors

from ..faultstore import FaultStore
from .conftest import Trainer
from .kit import Model, bits, blank, every_dtype, loaded, stir

SubscriberAt = Callable[..., Subscriber]


@pytest.fixture(params=["folder", "tensors"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Model], tuple[Any, Callable[[], Any]]]:
    """Makes a target that shall hold models like the one given, and a function that says what it holds."""

    def make(model: Model) -> tuple[Any, Callable[[], Any]]:
        if request.param == "folder":
            return CheckpointFolder(tmp_path / "model"), lambda: loaded(tmp_path / "model")
        live = blank(model)
        return Tensors(live), lambda: bits(live)

    return make


def test_every_dtype_arrives_by_snapshot_and_by_deltas(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, kept: Callable[..., Any]
) -> None:
    model = every_dtype()
    target, held = kept(model)
    subscriber = subscriber_at(store, target)
    for seed, share in enumerate([0, 0.001, 0.02, 0.5, 1.0], 1):
        model = stir(model, seed, share)
        trainer.publish(model)
        assert subscriber.once().version == seed - 1
        assert held() == bits(model)


def test_b001_b002_signs_of_zero_and_nan_payloads_arrive(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, kept: Callable[..., Any]
) -> None:
    def tensor(*words: int) -> Model:
        return {"w": torch.tensor(words, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)}

    target, held = kept(tensor(0, 0, 0, 0))
    subscriber = subscriber_at(store, target)
    for words in ([0, 0x8000, 0x3F80, 0x7FC0], [0x8000, 0, 0x3F80, 0x7FC1], [1, 0x8001, 0x7F81, 0xFF81]):
        trainer.publish(tensor(*words))
        subscriber.once()
        assert held()["w"].data == b"".join(w.to_bytes(2, "little") for w in words)


def test_b020_positions_above_2_to_the_24_arrive(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, kept: Callable[..., Any]
) -> None:
    model = {"w": torch.zeros((1 << 24) + 2, dtype=torch.bfloat16)}
    target, held = kept(model)
    subscriber = subscriber_at(store, target)
    trainer.publish(model)
    subscriber.once()
    model["w"][(1 << 24) + 1] = 1.0
    model["w"][65535] = -0.0
    trainer.publish(model)
    subscriber.once()
    assert held() == bits(model)


def test_b013_live_tensors_of_any_strides_are_kept(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    source = every_dtype()
    wide = torch.zeros(300, 800, dtype=torch.bfloat16)
    live = blank(source) | {
        "bf16.big": wide[:, ::2],
        "e4m3": torch.zeros(65, 64, dtype=torch.float8_e4m3fn).t(),
        "f32": torch.zeros(3, 129).t(),
        "c64": torch.zeros(2, 9, dtype=torch.complex64).t(),
        "bool": torch.zeros(100, dtype=torch.bool)[::2],
        "i64.scalar": torch.zeros(3, dtype=torch.int64)[1],
    }
    subscriber = subscriber_at(store, Tensors(live))
    for seed in range(1, 4):
        source = stir(source, seed)
        trainer.publish(source)
        subscriber.once()
        assert bits(live) == bits(source)
    assert not wide[:, 1::2].view(torch.int16).any()  # what lies between was left alone


@pytest.mark.parametrize("what", ["expanded", "conjugate", "quantised"])
def test_live_tensors_that_cannot_be_written_are_refused(
    what: str, store: FaultStore, subscriber_at: SubscriberAt, trainer: Trainer
) -> None:
    trainer.publish({"w": torch.zeros(5)})
    odd = {
        "expanded": torch.zeros(1).expand(5),
        "conjugate": torch.zeros(5, dtype=torch.complex64).conj(),
        "quantised": torch.quantize_per_tensor(torch.zeros(5), 1.0, 0, torch.qint8),
    }[what]
    with pytest.raises(UsageError, match="'w'"):
        subscriber_at(store, Tensors({"w": odd})).once()


@pytest.mark.parametrize(
    ("tied_in_stream", "tied_in_target"), list(itertools.product([True, False], repeat=2))
)
def test_b022_b206_ties_on_either_side(
    tied_in_stream: bool,
    tied_in_target: bool,
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
) -> None:
    def state(tied: bool) -> Model:
        embed = torch.zeros(8, 4, dtype=torch.bfloat16)
        return {"embed.weight": embed, "head.weight": embed if tied else embed.clone(), "w": torch.zeros(3)}

    source, live = state(tied_in_stream), state(tied_in_target)
    subscriber = subscriber_at(store, Tensors(live))
    for row in range(3):
        source["embed.weight"][row] = row + 1.5
        source["head.weight"][row] = row + 1.5
        trainer.publish(source)
        subscriber.once()
        assert bits(live) == bits(source)


@pytest.mark.parametrize("missing", ["embed.weight", "head.weight"])
def test_b206_a_target_with_one_of_two_tied_names(
    missing: str, store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    embed = torch.zeros(8, 4, dtype=torch.bfloat16)
    live = {
        "embed.weight": torch.ones(8, 4, dtype=torch.bfloat16),
        "head.weight": torch.ones(8, 4, dtype=torch.bfloat16),
    }
    del live[missing]
    subscriber = subscriber_at(store, Tensors(live))
    for row in range(2):
        embed[row] = 2.5
        trainer.publish({"embed.weight": embed, "head.weight": embed})
        subscriber.once()
        assert bits(live) == dict.fromkeys(live, bits({"w": embed})["w"])


def test_b206_a_target_that_has_both_names_in_one_place_and_a_stream_that_has_one(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    embed = torch.zeros(8, 4)
    live = {"embed.weight": embed, "head.weight": embed}
    subscriber = subscriber_at(store, Tensors(live))
    for value in (1.0, 2.0):
        trainer.publish({"embed.weight": torch.full((8, 4), value)})
        subscriber.once()
        assert torch.equal(live["head.weight"], torch.full((8, 4), value))


def test_tensors_in_one_place_that_part_in_the_stream_are_refused_before_a_byte_is_written(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    place = torch.zeros(4)
    live = {"a": place, "b": place, "c": torch.zeros(2)}
    subscriber = subscriber_at(store, Tensors(live))
    trainer.publish({"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(2)})
    subscriber.once()
    before = bits(live)
    trainer.publish({"a": torch.full((4,), 2.0), "b": torch.ones(4), "c": torch.full((2,), 5.0)})
    with pytest.raises(UsageError, match="'a' and 'b' share memory here, but are not equal in version 1"):
        subscriber.once()
    assert bits(live) == before
    assert subscriber.version == 0
    late = subscriber_at(store, Tensors({"a": place, "b": place, "c": torch.zeros(2)}))
    trainer.publisher.snapshot()
    place.fill_(9)
    with pytest.raises(UsageError, match="share memory"):
        late.once()
    assert torch.equal(place, torch.full((4,), 9.0))


@pytest.mark.parametrize("how", ["part", "the same start", "another dtype", "strided", "by one byte"])
def test_tensors_that_overlap_in_part_are_refused_before_a_byte_is_written(
    how: str, store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    """No bits are right for both, unless the stream has the same overlap, which it cannot say."""
    place = torch.zeros(16, dtype=torch.bfloat16)
    other = {
        "part": place[6:10],
        "the same start": place[:4],
        "another dtype": place.view(torch.float32)[2:6],
        "strided": torch.as_strided(place, (4,), (3,), 2),
        "by one byte": place.view(torch.uint8)[31:],
    }[how]
    live = {"a": place[:8] if how == "part" else place, "b": other, "c": torch.zeros(2)}
    trainer.publish({name: torch.ones_like(tensor) for name, tensor in live.items()})
    with pytest.raises(UsageError, match="'a' and 'b' overlap in memory") as refused:
        subscriber_at(store, Tensors(live)).once()
    assert "clone" in (refused.value.hint or "")
    assert not place.view(torch.int16).any()
    assert not live["c"].any()


def test_tensors_side_by_side_between_each_other_or_in_one_place_are_kept(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    """Views of one buffer that share no element; and two names of the very same elements, in two shapes."""
    place = torch.zeros(6, 8, dtype=torch.bfloat16)
    flat = torch.zeros(12)
    source = {
        "left": torch.zeros(2, 8, dtype=torch.bfloat16),
        "even": torch.zeros(2, 4, dtype=torch.bfloat16),
        "odd": torch.zeros(2, 4, dtype=torch.bfloat16),
        "low": torch.zeros(2, 4, dtype=torch.bfloat16),
        "high": torch.zeros(2, 4, dtype=torch.bfloat16),
        "same.0": torch.zeros(3, 4),
        "same.1": torch.zeros(12),
        "empty": torch.zeros(0),
    }
    live = {
        "left": place[:2],
        "even": place[2:4, ::2],
        "odd": place[2:4, 1::2],
        "low": place[4:, :4],
        "high": place[4:, 4:],
        "same.0": flat.view(3, 4),
        "same.1": flat,
        "empty": flat[4:4],
    }
    subscriber = subscriber_at(store, Tensors(live))
    for seed in range(1, 4):
        source = stir(source, seed)
        source["same.1"] = source["same.0"].reshape(12).clone()
        trainer.publish(source)
        assert subscriber.once().version == seed - 1
        assert bits(live) == bits(source)


def test_a_second_copy_of_a_tied_tensor_that_differs_is_not_taken_for_a_version(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    embed = torch.arange(32.0).reshape(8, 4)
    trainer.publish({"embed": embed, "head": embed})
    live = {
        "embed": embed.clone(),
        "head": torch.zeros(8, 4),
    }  # as if only the first was loaded from a checkpoint
    subscriber_at(store, Tensors(live)).once()
    assert torch.equal(live["head"], embed)


def test_b052_b053_b054_layout_changes_of_a_folder(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    model = every_dtype()
    embed = torch.ones(8, 4, dtype=torch.bfloat16)
    model |= {"embed": embed, "head": embed, "value_head.weight": torch.full((3, 3), 7.0)}
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    trainer.publish(model)
    subscriber.once()
    model["lm_head.bias"] = torch.ones(32, dtype=torch.bfloat16)  # added
    trainer.publish(model)
    subscriber.once()
    assert loaded(tmp_path) == bits(model)
    model["q_head.weight"] = model.pop("value_head.weight")  # removed, and one with the same bytes added
    trainer.publish(model, drop=["value_head.weight"])
    subscriber.once()
    assert loaded(tmp_path) == bits(model)
    embed = torch.arange(40).reshape(10, 4).to(torch.bfloat16)
    model |= {"embed": embed, "head": embed}  # reshaped
    model["f32"] = model["f32"].to(torch.bfloat16)  # retyped
    trainer.publish(model)
    subscriber.once()
    assert loaded(tmp_path) == bits(model)
    model["head"] = torch.zeros(10, 4, dtype=torch.bfloat16)  # untied
    trainer.publish(model)
    subscriber.once()
    assert loaded(tmp_path) == bits(model)
    model["head"] = model["embed"]  # tied again, and all at once for one who comes later
    trainer.publish(model)
    subscriber.once()
    assert loaded(tmp_path) == bits(model)
    assert {p.name for p in tmp_path.glob("*.safetensors")} == {p.name for p in tmp_path.glob("model-v5-*")}
    late = tmp_path / "late"
    subscriber_at(store, CheckpointFolder(late)).once()
    assert loaded(late) == bits(model)


def test_b054_tensors_of_other_shapes_stay_at_the_old_version(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    model = {"embed": torch.ones(8, 4), "w": torch.ones(5)}
    live = blank(model)
    subscriber = subscriber_at(store, Tensors(live))
    trainer.publish(model)
    subscriber.once()
    trainer.publish({"embed": torch.ones(10, 4), "w": torch.full((5,), 2.0)})
    with pytest.raises(UsageError, match=r"'embed' is F32\[8, 4\] here and F32\[10, 4\] in the stream"):
        next(subscriber.follow())
    assert bits(live) == bits(model)
    status = subscriber.status()
    assert (status.version, status.head, status.ready) == (0, 1, True)
    assert "[10, 4]" in status.error


def test_b018_an_empty_tensor_grows_and_shrinks(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    for shape in [(0, 8), (0, 8), (2, 8)]:
        model = {"p": torch.ones(shape), "w": torch.ones(3)}
        trainer.publish(model)
        subscriber.once()
        assert loaded(tmp_path) == bits(model)


def test_b208_names_that_do_not_match_are_all_told(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    trainer.publish({"a": torch.ones(2), "b": torch.ones(2)})
    live = {"a": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(
        UsageError,
        match=r"of 2 tensors in the stream 1 are missing here \['b'\], and 1 here are not in the stream \['c'\]",
    ):
        subscriber_at(store, Tensors(live)).once()
    assert not live["a"].any()
    assert not store.keys("download")  # found out before anything was fetched
    ignoring = {"a": torch.zeros(2), "b": torch.zeros(2), "cache.k": torch.zeros(2)}
    subscriber_at(store, Tensors(ignoring, ignore=["cache.*"])).once()
    assert [t.sum().item() for t in ignoring.values()] == [2, 2, 0]


def test_b059_a_version_without_changes(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, kept: Callable[..., Any]
) -> None:
    model = every_dtype()
    target, held = kept(model)
    subscriber = subscriber_at(store, target)
    trainer.publish(model)
    subscriber.once()
    trainer.publish(model)
    assert subscriber.once().version == 1
    assert held() == bits(model)
    assert target.mark().version == 1


def test_a_reset_is_passed_by_its_snapshot(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, kept: Callable[..., Any]
) -> None:
    model = every_dtype()
    target, held = kept(model)
    subscriber = subscriber_at(store, target)
    trainer.publish(model)
    subscriber.once()
    for seed, reset in enumerate(
        [False, True, False], 1
    ):  # so that there is something to fold on both sides of it
        model = stir(model, seed)
        trainer.publish(model, reset=reset)
    assert subscriber.once().version == 3
    assert held() == bits(model)


@pytest.mark.parametrize("lag", [1, 10, 100])
def test_b124_however_far_behind_it_is_applied_at_once(
    lag: int,
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Model = {"w": torch.zeros(200_000, dtype=torch.bfloat16), "s": torch.zeros(())}
    live = blank(model)
    target = Tensors(live)
    subscriber = subscriber_at(store, target)
    trainer.publish(model)
    subscriber.once()
    patches = []
    monkeypatch.setattr(
        target, "patch", lambda *a, _patch=target.patch: (patches.append(a[2].version), _patch(*a))
    )
    for version in range(1, lag + 1):
        model["w"][:100] += version
        model["w"][1000 + version] = -1.0
        model["s"] += 1
        trainer.publish(model)
    assert subscriber.once().version == lag
    assert patches == [lag]
    assert bits(live) == bits(model)


def test_what_does_not_fit_in_one_fold_is_applied_in_several(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    model = {"w": torch.zeros(400_000, dtype=torch.bfloat16)}
    folder = CheckpointFolder(tmp_path)
    subscriber = subscriber_at(store, folder, fold_bytes=1 << 20)
    trainer.publish(model)
    subscriber.once()
    for version in range(1, 7):
        model = stir(model, version, 0.1)
        trainer.publish(model)
    seen: list[int] = []
    for position in subscriber.follow():
        seen.append(position.version)
        if position.version == 6:
            break
    assert seen == [3, 6]  # 40,000 changes of ten bytes each are beyond a mebibyte after the third
    assert loaded(tmp_path) == bits(model)


def test_b110_a_late_joiner_takes_the_newest_snapshot_and_what_follows(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, kept: Callable[..., Any]
) -> None:
    model = every_dtype()
    for version in range(13):
        model = stir(model, version)
        trainer.publish(model)
        if version in (1, 10):
            trainer.publisher.snapshot()
    target, held = kept(model)
    store.calls.clear()
    assert subscriber_at(store, target).once().version == 12
    assert held() == bits(model)
    data = [
        key
        for operation, key in store.calls
        if operation in ("download", "fetch") and key.startswith(("data/", "snapshots/"))
    ]
    assert {int(key.split("/")[1]) for key in data} == {10, 11, 12}


def test_a_snapshot_that_costs_less_than_the_chain_is_taken(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, kept: Callable[..., Any]
) -> None:
    model: Model = {"w": torch.zeros(100_000, dtype=torch.bfloat16)}
    target, held = kept(model)
    subscriber = subscriber_at(store, target)
    trainer.publish(model)
    subscriber.once()
    for version in range(1, 13):
        model = stir(model, version, 1.0)
        trainer.publish(model)
    trainer.publisher.snapshot()
    store.calls.clear()
    assert subscriber.once().version == 12
    assert held() == bits(model)
    assert not [key for key in store.keys("fetch") if key.startswith("data/")]


def test_b113_a_target_of_another_run_is_refused(
    store: FaultStore,
    local_store: FaultStore,
    trainer_at: Callable[..., Trainer],
    subscriber_at: SubscriberAt,
    kept: Callable[..., Any],
) -> None:
    model = every_dtype()
    for seed, each in enumerate((store, local_store)):
        trainer = trainer_at(each)
        for version in range(4):
            trainer.publish(stir(model, seed * 10 + version))
    target, held = kept(model)
    subscriber_at(store, target).once()
    before = held()
    trainer.publish(stir(model, 77))
    ids = [StreamReader.open(each).stream.stream for each in (store, local_store)]
    with pytest.raises(Untrusted, match=f"{ids[0]}.*{ids[1]}"):
        subscriber_at(local_store, target).once()
    assert held() == before


def test_b112_a_hole_in_the_chain_is_passed_by_a_later_snapshot_only(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, kept: Callable[..., Any]
) -> None:
    model = every_dtype()
    target, held = kept(model)
    subscriber = subscriber_at(store, target)
    for version in range(6):
        model = stir(model, version)
        trainer.publish(model)
    subscriber.once()
    before = held()
    for version in (6, 7):
        model = stir(model, version)
        trainer.publish(model)
    store.inner.delete("versions/000000000006.json")
    with pytest.raises(Gap, match="version 6"):
        subscriber.once()
    assert held() == before
    assert subscriber.version == 5
    model = stir(model, 8)
    trainer.publish(model)
    trainer.publisher.snapshot()
    assert subscriber.once().version == 8
    assert held() == bits(model)
