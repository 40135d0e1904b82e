"""What measurements stand on: models that move, the slow link's arithmetic, other people's formats, counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from weightcast.benchmarks import yardsticks
from weightcast.benchmarks.contest import Pair, entries
from weightcast.benchmarks.data import U16, Walk, layers, rate_for, states, to_bf16
from weightcast.benchmarks.lab.cores import Cores
from weightcast.benchmarks.lab.delay import Lane
from weightcast.benchmarks.lab.memory import peak, resident_bytes
from weightcast.benchmarks.lab.models import Model, ModelSpec, Wandering, check_same, same_bits
from weightcast.benchmarks.lab.tally import Tally
from weightcast.benchmarks.yardsticks import Format, GapXor, IndexValue, XorZstd, formats
from weightcast.manifest.store import open_store

HEADER = b"\0" * 10  # of virtio, which takes no time on the link


def packet(size: int) -> bytes:
    return HEADER + bytes(size)


def test_a_lane_sends_at_its_rate_and_delivers_after_its_delay() -> None:
    lane = Lane(rate=1000, delay_s=0.5)
    assert lane.due_at() == float("inf")
    assert all(
        lane.send(10.0, packet(50)) for _ in range(2)
    )  # each takes 0.05 s to leave, one after the other
    assert lane.due_at() == pytest.approx(10.55)
    assert lane.receive(10.54) is None
    assert lane.receive(10.551) == packet(50)
    assert lane.receive(10.59) is None
    assert lane.receive(10.601) == packet(50)
    assert lane.send(20.0, packet(10))  # idle in between: it starts afresh
    assert lane.due_at() == pytest.approx(20.51)


def test_a_lane_drops_what_its_queue_does_not_hold() -> None:
    lane = Lane(rate=1000, delay_s=1.0)
    assert [lane.send(0.0, packet(60)) for _ in range(4)] == [True, True, False, False]  # 0.1 s of sending
    assert lane.send(0.05, packet(60))
    assert [lane.receive(9.0) is not None for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("form", [XorZstd(), IndexValue(), GapXor()], ids=lambda f: f.name)
@pytest.mark.parametrize(
    "at", [[], [0], [7, 8, 65_535, 65_536], [65_536], [131_071, 199_999], [70_000, 199_999]]
)
def test_formats_of_others_are_exact(form: Format, at: list[int]) -> None:
    random = np.random.default_rng(1)
    old = random.integers(0, 1 << 16, 200_000, np.uint16)
    new = old.copy()
    new[at] ^= random.integers(1, 1 << 16, len(at), np.uint16)
    target = old.copy()
    form.apply(form.encode(old, new), target)
    assert np.array_equal(target, new)


def test_the_slow_format_races_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yardsticks.Arc, "PACKAGE", "no_such_package")
    assert [f.name for f in formats(slow=True)] == ["xor_zstd", "index_value", "gap_xor"]
    monkeypatch.setattr(yardsticks.Arc, "PACKAGE", "json")
    assert [f.name for f in formats(slow=True)][-1] == "arc"
    assert "arc" not in [f.name for f in formats(slow=False)]


def small_pair() -> Pair:
    old, new, _ = states(0.05, 1, 1 << 16)
    return Pair(*({"b": bits[: 1 << 18].reshape(512, 512), "a": bits[1 << 18 :]} for bits in (old, new)))


def test_a_pair_is_cut_into_pieces_without_rest() -> None:
    pair = small_pair()
    for by_tensor in (False, True):
        pieces = pair.slices(by_tensor=by_tensor)
        assert np.array_equal(np.concatenate([p.of(pair.new).reshape(-1) for p in pieces]), pair.new)
    assert [p.shape for p in pair.slices(by_tensor=True)] == [(512, 512), (1 << 18,)]
    assert pair.changed == np.count_nonzero(pair.old != pair.new) == round(pair.density * (1 << 19))


def test_a_contestant_that_is_not_exact_stops_the_race() -> None:
    class Liar(XorZstd):
        name = "liar"

        def apply(self, frame: bytes, target: U16) -> None:
            super().apply(frame, target)
            target[0] ^= 1

    with pytest.raises(SystemExit, match="liar"):
        entries(small_pair(), [Liar()])


@pytest.mark.parametrize("density", [0.002, 0.01, 0.1])
def test_a_step_changes_the_share_that_is_asked_for(density: float) -> None:
    made = layers(density, 1 << 16)
    assert made.share == pytest.approx(density, rel=0.1)
    assert np.mean([np.mean(a != b) for a, b in zip(made.old, made.new, strict=True)]) == pytest.approx(
        made.share
    )
    walk = Walk(1 << 18, density)
    before = walk.bits()
    for _ in range(3):
        after = walk.step()
        assert np.mean(before != after) == pytest.approx(density, rel=0.35)
        before = after


def test_the_rate_for_a_share() -> None:
    master = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    rate = rate_for(0.2, master, np.ones_like(master))
    assert np.mean(to_bf16(master) != to_bf16(master - np.float32(rate))) == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
    "make",
    [
        ModelSpec(density=0.02, elements=1 << 16).make,
        ModelSpec(density=0.02, mib=1, layer_elements=1 << 16).make,
        lambda: Wandering(1, 0.02, 1 << 16),
    ],
)
def test_two_models_of_the_same_sizes_have_the_same_versions(make: Callable[[], Model]) -> None:
    models = [make(), make()]
    left, right = (model.tensors() for model in models)
    first = {name: t.clone() for name, t in left.items()}
    for _ in range(3):
        models[0].move(left)
        assert not same_bits(left, right)
        with pytest.raises(SystemExit):
            check_same(left, right)
        models[1].move(right)
        check_same(left, right)
    assert not same_bits(left, first)
    changed = sum(int((left[n].view(torch.int16) != t.view(torch.int16)).sum()) for n, t in first.items())
    assert changed > 0.01 * sum(t.numel() for t in first.values())


def test_a_tally_counts_bytes_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("snapshots/000000000001/manifest.json", b"12345")
    tally = Tally(store)
    assert tally.get("snapshots/000000000001/manifest.json", max_bytes=10) == b"12345"
    assert tally.as_store.fetch_part("snapshots/000000000001/manifest.json", start=1, stop=3) == b"23"
    assert tally.fetched == 7
    tally.reset()
    assert tally.fetched == 0
    assert [e.size for e in tally.list("snapshots/")] == [5]  # all else is the store's
    tally.put("a", b"1")
    assert store.get("a", max_bytes=1) == b"1"


def test_memory_is_told_as_the_kernel_counts_it() -> None:
    with peak() as found:
        block = bytearray(64 << 20)
        block[:: 1 << 12] = b"x" * (1 << 14)  # touches every page
        del block
    assert 60 << 20 < found.extra < 100 << 20
    assert resident_bytes() == pytest.approx(resident_bytes(pid="self"), rel=0.1)
    with pytest.raises(OSError, match="VmNone"):
        resident_bytes("VmNone")


def test_cores_are_those_of_all_threads() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the thread is there
        before, cpu_s = Cores.of(os.getpid()), time.process_time()
        pool.submit(sum, range(10_000_000)).result()
        taken, cpu_s = Cores.of(os.getpid()) - before, time.process_time() - cpu_s
    assert taken.used_s == pytest.approx(cpu_s, rel=0.2)
    assert taken.waited_s >= 0
