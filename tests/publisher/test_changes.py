"""What changed from one version to the next, and nothing else, is published: bits, never values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from weightcast.publisher import Publisher
from weightcast.schemas.errors import Corrupt, UsageError

from ..faultstore import FaultStore
from ..versions import (
    assert_version,
    bf16,
    chain_of,
    changed_places,
    copy_of,
    objects_in,
    read,
    rows_of,
    state_at,
)


def test_b001_a_sign_flip_of_zero_is_a_change(store: FaultStore, publisher: Publisher) -> None:
    publisher.publish({"w": bf16(0x0000, 0x8000, 0x3F80, 0x0000)}).wait()
    manifest = publisher.publish({"w": bf16(0x8000, 0x0000, 0x3F80, 0x0000)}).wait()
    assert manifest.totals.changed == 2
    assert changed_places(store, 1) == {"w": [0, 1]}
    assert read(store, 1)["w"].data == bytes.fromhex("00 80 00 00 80 3F 00 00")


def test_b002_an_equal_nan_is_no_change_and_another_payload_is(
    store: FaultStore, publisher: Publisher
) -> None:
    publisher.publish({"w": bf16(0x7FC0, 0x3F80, 0x7FC0)}).wait()
    assert publisher.publish({"w": bf16(0x7FC0, 0x3F80, 0x7FC0)}).wait().totals.changed == 0
    assert publisher.publish({"w": bf16(0x7FC0, 0x3F80, 0x7FC1)}).wait().totals.changed == 1
    assert changed_places(store, 2) == {"w": [2]}
    assert read(store, 2)["w"].data == bytes.fromhex("C07F 803F C17F")


def test_b004_nan_among_changes_and_integers_beside_them(store: FaultStore, publisher: Publisher) -> None:
    publisher.publish({"w": bf16(0x3F80, 0x3F80, 0x4000, 0x0001), "i": torch.tensor([5, 5, 5])}).wait()
    publisher.publish({"w": bf16(0x3F80, 0x7FC0, 0x4000, 0x0001), "i": torch.tensor([6, 5, 5])}).wait()
    assert changed_places(store, 1) == {"w": [1], "i": [0]}
    assert_version(
        store, 1, copy_of({"w": bf16(0x3F80, 0x7FC0, 0x4000, 0x0001), "i": torch.tensor([6, 5, 5])})
    )


def test_b006_changes_that_keep_the_low_byte(store: FaultStore, publisher: Publisher) -> None:
    publisher.publish({"w": bf16(0x3F80, 0x3F80, 0x3F80)}).wait()
    assert publisher.publish({"w": bf16(0x4080, 0xBF80, 0x3F81)}).wait().totals.changed == 3
    assert read(store, 1)["w"].data == bytes.fromhex("8040 80BF 813F")


def test_b007_changes_of_all_steps_since_the_last_version(store: FaultStore, publisher: Publisher) -> None:
    w = bf16(0, 0, 0)
    publisher.publish({"w": w}).wait()
    w[0] = 1.0
    w[1] = 1.0
    publisher.publish({"w": w}).wait()
    assert changed_places(store, 1) == {"w": [0, 1]}


def test_denormals_are_bits_too(store: FaultStore, publisher: Publisher) -> None:
    torch.set_flush_denormal(True)
    try:
        publisher.publish({"w": bf16(0x0001, 0x0000, 0x807F)}).wait()
        publisher.publish({"w": bf16(0x0002, 0x0001, 0x807F)}).wait()
    finally:
        torch.set_flush_denormal(False)
    assert changed_places(store, 1) == {"w": [0, 1]}


def test_b044_the_scale_alone_changes(store: FaultStore, publisher: Publisher) -> None:
    codes = torch.full((128, 128), 0x38, dtype=torch.uint8)
    codes[::2] = 0x7E
    state = {"w": codes.view(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1)}
    publisher.publish(state).wait()
    state["w_scale_inv"][0, 0] = 2
    manifest = publisher.publish(state).wait()
    assert [r.tensor for r in rows_of(store, manifest)] == ["w_scale_inv"]
    assert_version(store, 1, copy_of(state))


def test_b052_an_added_tensor_comes_whole(store: FaultStore, publisher: Publisher) -> None:
    state = {"w": torch.randn(16).bfloat16()}
    publisher.publish(state).wait()
    state["lm_head.bias"] = torch.randn(32).bfloat16()
    publisher.publish(state).wait()
    assert_version(store, 1, copy_of(state))
    assert sorted(read(store, 0)) == ["w"]


def test_b053_one_removed_and_another_added_with_the_same_bytes(
    store: FaultStore, publisher: Publisher
) -> None:
    head, trunk = torch.randn(6, 2), torch.randn(4)
    publisher.publish({"trunk": trunk, "value_head.weight": head}).wait()
    with pytest.raises(UsageError, match=r"'value_head\.weight'"):
        publisher.publish({"trunk": trunk, "q_head.weight": head})
    publisher.publish({"trunk": trunk, "q_head.weight": head}, drop=["value_head.weight"]).wait()
    assert_version(store, 1, copy_of({"trunk": trunk, "q_head.weight": head}))
    publisher.snapshot()
    index = store.inner.get("snapshots/000000000001/model.safetensors.index.json", max_bytes=1 << 20)
    assert b"value_head" not in index
    assert b'"total_size": 64' in index or b'"total_size":64' in index


def test_b054_a_tied_vocabulary_grows(store: FaultStore, publisher: Publisher) -> None:
    small, large = torch.randn(8, 4).bfloat16(), torch.randn(10, 4).bfloat16()
    publisher.publish({"embed": small, "head": small}).wait()
    publisher.publish({"embed": large, "head": large}).wait()
    assert_version(store, 0, copy_of({"embed": small, "head": small}))
    assert_version(store, 1, copy_of({"embed": large, "head": large}))
    assert {s.name: s.shape for s in state_at(store, 1).layout} == {"embed": (10, 4), "head": (10, 4)}


def test_a_tensor_that_changes_its_dtype(store: FaultStore, publisher: Publisher) -> None:
    w = torch.randn(64)
    for version, state in enumerate(
        [{"w": w, "x": w}, {"w": w.bfloat16(), "x": w}, {"w": w.double(), "x": w}]
    ):
        publisher.publish(state).wait()
        assert_version(store, version, copy_of(state))


def test_b057_frozen_tensors_are_looked_at_every_time(store: FaultStore, publisher: Publisher) -> None:
    vision, policy = torch.randn(32), torch.randn(32)
    vision.requires_grad_(False)
    for version in range(7):
        policy += 1
        if version in (4, 6):
            vision[version] += 1
        publisher.publish({"vision.w": vision, "policy.w": policy}).wait()
        assert_version(store, version, copy_of({"vision.w": vision, "policy.w": policy}))
    assert "vision.w" not in changed_places(store, 5)
    assert changed_places(store, 6)["vision.w"] == [6]


def test_b059_a_step_without_change_is_a_version_without_shards(
    store: FaultStore, publisher: Publisher
) -> None:
    state = {"w": torch.randn(100)}
    publisher.publish(state, step=1).wait()
    before = objects_in(store)
    manifest = publisher.publish(state, step=2).wait()
    assert (manifest.version, manifest.step, manifest.shards, manifest.totals.changed) == (1, 2, [], 0)
    assert manifest.digest_after == manifest.digest_before
    assert not [k for k in objects_in(store).keys() - before.keys() if k.startswith("data")]
    assert_version(store, 1, copy_of(state))


@pytest.mark.parametrize("changed", [0, 1, 10_000, 50_000, 100_000])
def test_b061_no_density_costs_more_than_the_raw_tensor(
    store: FaultStore, publisher: Publisher, changed: int
) -> None:
    generator = torch.Generator().manual_seed(changed)
    raw = torch.randint(-(1 << 15), 1 << 15, (100_000,), generator=generator).to(torch.int16)
    publisher.publish({"w": raw.view(torch.bfloat16)}).wait()
    places = torch.randperm(100_000, generator=generator)[:changed]
    raw[places] ^= torch.randint(1, 1 << 15, (changed,), generator=generator).to(torch.int16)
    publisher.publish({"w": raw.view(torch.bfloat16)}).wait()
    assert_version(store, 1, copy_of({"w": raw.view(torch.bfloat16)}))
    published = sum(
        n for k, n in objects_in(store).items() if "000000000001" in k and not k.startswith("snapshots")
    )
    assert published <= 200_000 * 1.05 + 8192
    assert changed > 1 or published < 8192


def test_b062_each_tensor_gets_the_form_that_suits_it(store: FaultStore, publisher: Publisher) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b, c = (
        torch.randint(-(1 << 15), 1 << 15, (100_000,), generator=generator).to(torch.int16) for _ in range(3)
    )
    state = {name: t.view(torch.bfloat16) for name, t in [("A", a), ("B", b), ("C", c)]}
    publisher.publish(state).wait()
    a[77] ^= 1
    b ^= torch.randint(1, 1 << 15, (100_000,), generator=generator).to(torch.int16)
    publisher.publish(state).wait()
    assert_version(store, 1, copy_of(state))
    published = sum(
        n for k, n in objects_in(store).items() if "000000000001" in k and not k.startswith("snapshots")
    )
    assert published <= 200_000 * 1.05 + 8192


def test_b063_a_periodic_snapshot_has_every_tensor(
    store: FaultStore, publisher_at: Callable[..., Publisher]
) -> None:
    publisher = publisher_at(snapshot_every=3)
    state = {"embed.w": torch.randn(50), "w": torch.randn(50)}
    for _ in range(4):
        state["w"] += 1
        publisher.publish(state).wait()
    publisher.close()
    assert "snapshots/000000000003/manifest.json" in objects_in(store)
    for key in [k for k in objects_in(store) if k.startswith("data/")]:
        store.delete(key)  # so that only the snapshot can lead there
    assert_version(store, 3, copy_of(state))


def test_b065_the_label_is_of_the_step_whose_bytes_they_are(store: FaultStore, publisher: Publisher) -> None:
    weights = torch.full((1000,), 99.0)
    publisher.publish({"w": weights}, step=99)
    for step in (100, 101, 102):
        weights.fill_(step)
        publisher.publish({"w": weights}, step=step, metadata={"loss": step})
        weights.fill_(-1)
    weights.fill_(7)
    publisher.close()
    manifests = chain_of(store)
    assert manifests[-1].step == 102
    for manifest in manifests:
        step = manifest.step or 0
        assert_version(store, manifest.version, copy_of({"w": torch.full((1000,), float(step))}))
        assert manifest.metadata == ({"loss": step} if step > 99 else {})


def test_b074_a_trainer_that_never_waits_never_mixes_two_steps(
    store: FaultStore, publisher: Publisher
) -> None:
    a, b = torch.zeros(1 << 19, dtype=torch.bfloat16), torch.zeros(1 << 19, dtype=torch.bfloat16)
    for step in range(60):
        a.fill_(step)
        b.fill_(step)
        if step % 5 == 0:
            publisher.publish({"a": a, "b": b}, step=step)
    publisher.close()
    manifests = chain_of(store)
    assert manifests[-1].step == 55
    for manifest in manifests:
        found = state_at(store, manifest.version).memory.flat("BF16")
        wanted = int(torch.tensor([manifest.step]).bfloat16().view(torch.int16)[0])
        assert found.min() == found.max() == wanted


def test_a_source_in_motion_is_never_published_wrong(store: FaultStore, publisher: Publisher) -> None:
    w = torch.zeros(1 << 20, dtype=torch.int16)
    publisher.publish({"w": w}).wait()
    stopped = threading.Event()

    def train() -> None:
        while not stopped.is_set():
            w.add_(1)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(5):
            with suppress(Corrupt):  # refused: the digest shows that it moved
                publisher.publish({"w": w}).wait()
    finally:
        stopped.set()
        trainer.join()
    publisher.publish({"w": w}).wait()
    last = chain_of(store)[-1].version
    for version in range(last):
        state_at(store, version)  # proves that the store holds what the manifests say
    assert_version(store, last, copy_of({"w": w}))


def test_a_mapping_that_fails_half_way_leaves_nothing_behind(store: FaultStore, publisher: Publisher) -> None:
    state = {"a": torch.zeros(1 << 17), "b": torch.zeros(1 << 17)}
    publisher.publish(state).wait()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1 << 17)
        raise RuntimeError("the trainer ran out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        publisher.publish(broken())
    publisher.wait_idle()
    assert len(chain_of(store)) == 1
    state["b"] += 1
    publisher.publish(state).wait()
    assert changed_places(store, 1) == {"b": list(range(1 << 17))}


def test_what_a_version_says_about_itself_is_checked_before_it_is_published(
    store: FaultStore, publisher: Publisher
) -> None:
    w = {"w": torch.zeros(2)}
    refused: list[dict[str, Any]] = [
        {"metadata": {"x": float("nan")}},
        {"metadata": {"x": object()}},
        {"metadata": {"x": "y" * 70_000}},
        {"step": "ten"},
    ]
    for bad in refused:
        with pytest.raises(UsageError):
            publisher.publish(w, **bad)
    for name in (
        "../x",
        "manifest.json",
        "model.safetensors.index.json",
        "model-00001-of-00001.safetensors",
        "",
    ):
        with pytest.raises(UsageError, match="companion file"):
            publisher.publish(w, files={name: b""})
    manifest = publisher.publish(w, step=torch.tensor(3), metadata={"α": [1, {"b": None}]}).wait()
    assert (manifest.step, manifest.metadata) == (3, {"α": [1, {"b": None}]})
