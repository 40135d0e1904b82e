"""Live weights of an engine against plain torch copies between the same views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from weightcast.codec import Changes, Geometry, Memory, Move, Region, digest_all, simplify
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.subscriber.engines import live
from weightcast.subscriber.engines.live import LiveWeights
from weightcast.subscriber.engines.live_classes import UNUSED

Bits = npt.NDArray[Any]
State = dict[str, torch.Tensor]
View = Callable[[torch.Tensor], torch.Tensor]

KINDS = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64}
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.fixture(params=[False, True], ids=["kernels", "operations"])
def by_index(request: pytest.FixtureRequest) -> bool:
    """Both ways to touch the weights."""
    return bool(request.param)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def rows(start: int, count: int) -> View:
    return lambda t: t.narrow(0, start, count)


def columns(start: int, count: int) -> View:
    return lambda t: t.narrow(1, start, count)


def random_state(layout: Layout, rng: np.random.Generator) -> State:
    """Any bits, NaNs of all kinds among them."""
    found = {}
    for spec in layout.stored:
        raw = torch.from_numpy(np.frombuffer(rng.bytes(spec.nbytes) or b"\0" * 8, np.uint8).copy())
        found[spec.name] = raw[: spec.nbytes].view(KINDS[spec.dtype]).reshape(spec.shape)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(SIGNED[tensor.element_size()])


def unsigned(tensor: torch.Tensor) -> Bits:
    array = bits(tensor).numpy()
    return array.view(f"u{array.itemsize}")


def memory_of(geometry: Geometry, state: State) -> Memory:
    return Memory.over(geometry, {name: unsigned(t).reshape(-1) for name, t in state.items()})


@dataclass
class Model:
    """A rank's parameters, and the copies by which a loader would fill them."""

    layout: Layout
    places: State = field(default_factory=dict)
    copies: list[tuple[str, View, str, View]] = field(default_factory=list)

    def place(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        tensor = torch.zeros(tuple(shape), dtype=torch.uint8).to(KINDS[dtype])
        self.places[name] = torch.nn.Parameter(tensor, requires_grad=False)

    def copy(self, tensor: str, source: View, place: str, target: View) -> None:
        self.copies.append((tensor, source, place, target))

    @property
    def moves(self) -> list[Move]:
        found = []
        for tensor, source, place, target in self.copies:
            probe = source(torch.empty(self.layout[tensor].shape))
            there = target(self.places[place].detach())
            pair = simplify(
                Region(tuple(probe.shape), probe.stride(), int(probe.storage_offset())),
                Region(tuple(there.shape), there.stride(), int(there.storage_offset())),
            )
            found.append(Move(tensor, pair[0], place, pair[1]))
        return found

    def expected(self, state: State) -> State:
        """What the parameters are once a loader has run."""
        filled = {name: bits(t).clone() for name, t in self.places.items()}
        for tensor, source, place, target in self.copies:
            target(filled[place]).copy_(source(bits(state[tensor])))
        return filled

    def check(self, expected: State) -> None:
        for name, tensor in self.places.items():
            assert torch.equal(bits(tensor), expected[name]), name


H, V, F, E = 24, 40, 36, 4  # hidden, vocabulary, intermediate, experts


def layout_of(dtype: str) -> Layout:
    shapes = {
        "embed": (V, H),
        "q": (H, H),
        "k": (H // 2, H),
        "v": (H // 2, H),
        "o": (H, H),
        "gate": (F, H),
        "up": (F, H),
        "down": (H, F),
        "mixed": (H, 2 * H),
        "experts": (E, F, H),
        "norm": (H,),
        "scale": (),
        "nothing": (0, H),
    }
    return Layout.of(
        [*(TensorSpec(n, dtype, s) for n, s in shapes.items()), TensorSpec("steps", "I64", (3,))]
    )


def model_of(dtype: str, rank: int) -> Model:
    """One of two tensor-parallel ranks of a made-up model that has one of each kind of destination."""
    model, half = Model(layout_of(dtype)), rank * H // 2
    model.place("embed", dtype, (V // 2 + 8, H))  # padded to more rows than the vocabulary has
    model.copy("embed", rows(rank * V // 2, V // 2), "embed", rows(0, V // 2))
    model.place("qkv", dtype, (H // 2 + H // 2 + H // 2, H))
    model.copy("q", rows(half, H // 2), "qkv", rows(0, H // 2))
    model.copy("k", whole, "qkv", rows(H // 2, H // 2))  # replicated on both ranks
    model.copy("v", whole, "qkv", rows(H, H // 2))
    model.place("o", dtype, (H, H // 2))
    model.copy("o", columns(half, H // 2), "o", whole)
    model.place("gate_up", dtype, (F, H))
    model.copy("gate", rows(rank * F // 2, F // 2), "gate_up", rows(0, F // 2))
    model.copy("up", rows(rank * F // 2, F // 2), "gate_up", rows(F // 2, F // 2))
    model.place("down", dtype, (F // 2, H))
    model.copy("down", columns(rank * F // 2, F // 2), "down", lambda t: t.t())  # transposed
    model.place("mixed", dtype, (H, H))
    model.copy("mixed", lambda t: t[:, rank::2], "mixed", whole)  # every second column
    model.place("experts", dtype, (E // 2, H, F))
    for e in range(E // 2):
        model.copy("experts", lambda t, e=e: t[rank * E // 2 + e], "experts", lambda t, e=e: t[e].t())
    for copy in range(2):
        model.place(f"norm{copy}", dtype, (H,))  # held twice
        model.copy("norm", whole, f"norm{copy}", whole)
    model.place("scale", dtype, (5,))
    model.copy("scale", whole, "scale", lambda t: t[3])
    model.place("nothing", dtype, (0, H))
    model.copy("nothing", whole, "nothing", whole)
    if rank == 0:
        model.place("steps", "I64", (3,))
        model.copy("steps", whole, "steps", whole)
    return model


def plan(model: Model, rank: int) -> list[tuple[int, bool]]:
    """Class 2 on both ranks, class 3 twice on each, class `rank` on this one alone."""
    found, seen = [], set[str]()
    for tensor, *_ in model.copies:
        number = {"k": 2, "v": 2, "scale": 2, "norm": 3}.get(tensor, rank)
        found.append((number, (rank == 0 or number == rank) and not (number == 3 and tensor in seen)))
        seen.add(tensor)
    return found


def live_of(model: Model, rank: int, by_index: bool) -> LiveWeights:
    geometry = Geometry(model.layout)
    elsewhere = () if rank == 0 else ("steps",)
    weights = LiveWeights(geometry, model.moves, model.places, elsewhere=elsewhere, by_index=by_index)
    weights.assign(plan(model, rank))
    return weights


def source_of(state: State) -> Callable[[str], Bits | None]:
    """Bytes as in a mapped file: read-only, and not aligned."""

    def source(name: str) -> Bits:
        raw = unsigned(state[name]).reshape(-1).view(np.uint8).tobytes()
        return np.frombuffer(b"\0" + raw, np.uint8)[1:]

    return source


def changed(
    geometry: Geometry, state: State, share: float, rng: np.random.Generator
) -> tuple[State, dict[str, Changes]]:
    """Another state, and the changes that lead there, as mapped files give them."""
    new, changes = {n: t.clone() for n, t in state.items()}, {}
    memory = memory_of(geometry, new)
    for space in geometry:
        at = np.flatnonzero(rng.random(space.elements) < share)
        values = np.frombuffer(rng.bytes(len(at) * space.width), f"u{space.width}")
        flat = np.concatenate([memory.tensor(n).ravel() for n in space.names])
        flat[at] = values
        for i, name in enumerate(space.names):
            memory.tensor(name)[...] = flat[space.starts[i] : space.starts[i + 1]].reshape(state[name].shape)
        at.flags.writeable = False
        changes[space.dtype] = Changes(space.dtype, at, values)
    return new, changes


def total(parts: Sequence[Mapping[int, Digest]]) -> Digest:
    """One part a class, after checking that all of a class are equal."""
    merged: dict[int, Digest] = {}
    for part in parts:
        for number, digest in part.items():
            assert merged.setdefault(number, digest) == digest
    return sum(merged.values(), Digest())


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3"])
def test_two_ranks_follow_a_version_in_every_kind_of_place(
    dtype: str, by_index: bool, rng: np.random.Generator
) -> None:
    models = [model_of(dtype, rank) for rank in (0, 1)]
    geometry = Geometry(models[0].layout)
    state = random_state(geometry.layout, rng)
    ranks = [live_of(model, rank, by_index) for rank, model in enumerate(models)]
    for rank, model in zip(ranks, models, strict=True):
        expected = model.expected(state)
        rank.load(source_of(state))
        model.check(expected)
    parts = [rank.parts() for rank in ranks]
    assert total(parts) == digest_all(geometry, memory_of(geometry, state))
    for share in (0.0, 0.05, 0.6):
        old, (state, changes) = state, changed(geometry, state, share, rng)
        check_reads(ranks, geometry, old, changes)
        moved = []
        for rank, model in zip(ranks, models, strict=True):
            expected = model.expected(state)
            moved.append(rank.write(changes))
            model.check(expected)
        parts = [
            {c: digest + m.get(c, Digest()) for c, digest in part.items()}
            for part, m in zip(parts, moved, strict=True)
        ]
        assert total(parts) == digest_all(geometry, memory_of(geometry, state))
        assert parts == [rank.parts() for rank in ranks]
        assert [set(rank.write(changes).values()) <= {Digest()} for rank in ranks] == [True, True]


def check_reads(
    ranks: Sequence[LiveWeights], geometry: Geometry, state: State, changes: Mapping[str, Changes]
) -> None:
    """Together the ranks answer every position once, with the bits that are there."""
    memory = memory_of(geometry, state)
    for dtype, found in changes.items():
        flat = np.concatenate([memory.tensor(n).ravel() for n in geometry[dtype].names])
        answers = [rank.gather(dtype, found.positions) for rank in ranks]
        index = np.concatenate([i for i, _ in answers])
        assert sorted(index.tolist()) == list(range(len(found)))
        assert np.array_equal(np.concatenate([v for _, v in answers]), flat[found.positions[index]])


def single(dtype: str, values: Sequence[int], by_index: bool) -> tuple[LiveWeights, torch.Tensor]:
    """One vector in one parameter, loaded and proved."""
    width = TensorSpec("w", dtype, ()).width
    array = np.array(values, f"u{width}")
    model = Model(Layout.of([TensorSpec("w", dtype, (len(array),))]))
    model.place("p", dtype, (len(array),))
    model.copy("w", whole, "p", whole)
    weights = LiveWeights(Geometry(model.layout), model.moves, model.places, by_index=by_index)
    weights.assign([(0, True)])
    weights.load(lambda name: array.view(np.uint8))
    weights.parts()
    return weights, model.places["p"]


def put(weights: LiveWeights, dtype: str, at: Sequence[int], values: Sequence[int]) -> dict[int, Digest]:
    width = weights.geometry[dtype].width
    return weights.write({dtype: Changes(dtype, np.array(at, np.int64), np.array(values, f"u{width}"))})


def test_b001_a_sign_of_zero_is_written(by_index: bool) -> None:
    weights, parameter = single("BF16", [0x0000, 0x8000, 0x3F80, 0x0000], by_index)
    put(weights, "BF16", [0, 1], [0x8000, 0x0000])
    assert unsigned(parameter).tobytes().hex() == "00800000803f0000"


def test_b002_payloads_of_nan_are_told_apart(by_index: bool) -> None:
    weights, parameter = single("BF16", [0x7FC0, 0x3F80, 0x7FC0], by_index)
    before = weights.parts()[0]
    assert put(weights, "BF16", [0, 2], [0x7FC0, 0x7FC0]) == {0: Digest()}
    moved = put(weights, "BF16", [2], [0x7FC1])[0]
    assert moved != Digest()
    assert before + moved == weights.parts()[0]
    assert unsigned(parameter).tolist() == [0x7FC0, 0x3F80, 0x7FC1]


def test_b004_nan_is_a_value_like_any_other(by_index: bool) -> None:
    floats, parameter = single("BF16", [0x3F80] * 4, by_index)
    put(floats, "BF16", [1], [0x7FC0])
    assert unsigned(parameter).tolist() == [0x3F80, 0x7FC0, 0x3F80, 0x3F80]
    numbers, parameter = single("I64", [5, 5, 5], by_index)
    put(numbers, "I64", [0], [6])
    assert parameter.tolist() == [6, 5, 5]


def test_a_replaced_storage_is_refused_by_name(by_index: bool) -> None:
    weights, parameter = single("BF16", [1, 2, 3], by_index)
    parameter.data = parameter.data.clone()
    at = np.array([0])
    for call in (
        lambda: put(weights, "BF16", [0], [9]),
        lambda: weights.gather("BF16", at),
        weights.digests,
        weights.parts,
        weights.check,
        lambda: weights.load(lambda name: None),
    ):
        with pytest.raises(Corrupt, match="parameter 'p': its storage was replaced since the plan was made"):
            call()
    assert unsigned(parameter).tolist() == [1, 2, 3]


def test_an_unused_move_is_not_touched_even_if_its_storage_is_gone(
    by_index: bool, rng: np.random.Generator
) -> None:
    model = model_of("BF16", 0)
    weights, state = live_of(model, 0, by_index), random_state(model.layout, rng)
    weights.load(source_of(state))
    unused = [i for i, (tensor, *_) in enumerate(model.copies) if tensor in ("q", "k", "v")]
    classes = [(UNUSED, False) if i in unused else c for i, c in enumerate(plan(model, 0))]
    weights.assign(classes)
    model.places["qkv"].data = torch.zeros(0)
    expected = digest_all(weights.geometry, memory_of(weights.geometry, state))
    assert 2 in weights.parts()  # `scale`
    assert sum(weights.parts().values(), Digest()) != expected
    space = weights.geometry["BF16"]
    at = np.array([space.starts[space.index["q"]]])
    assert weights.gather("BF16", at)[0].tolist() == []
    with pytest.raises(UsageError, match="tensor 'q' has changes"):
        put(weights, "BF16", at.tolist(), [1])


def bad_changes(weights: LiveWeights) -> list[tuple[str, Changes]]:
    ints = weights.geometry["I64"]
    elements = weights.geometry["BF16"].elements
    one = np.ones(1, np.uint16)

    def of(at: list[int], values: Bits) -> Changes:
        return Changes("BF16", np.array(at, np.int64), values)

    return [
        ("not ascending", of([5, 4], np.ones(2, np.uint16))),
        ("not ascending", of([5, 5], np.ones(2, np.uint16))),
        ("not ascending", of([elements], one)),
        ("not ascending", of([-1], one)),
        ("not ascending", Changes("BF16", np.array([1], np.int32), one)),
        ("not for the BF16 space", of([1], np.ones(1, np.uint32))),
        ("not for the BF16 space", Changes(ints.dtype, np.array([1]), one)),
        ("1 positions, but 2 values", of([1], np.ones(2, np.uint16))),
    ]


@pytest.mark.parametrize("which", range(8))
def test_changes_that_are_wrong_write_nothing(which: int, by_index: bool) -> None:
    model = model_of("BF16", 0)
    weights = live_of(model, 0, by_index)
    before = model.expected({s.name: torch.zeros(s.shape, dtype=KINDS[s.dtype]) for s in model.layout.stored})
    message, changes = bad_changes(weights)[which]
    good = Changes("I64", np.array([0]), np.array([7], np.uint64))
    with pytest.raises(UsageError, match=message):
        weights.write({"I64": good, "BF16": changes})
    model.check(before)


def test_changes_of_a_tensor_without_a_place_write_nothing_unless_it_is_elsewhere(by_index: bool) -> None:
    model = model_of("BF16", 1)
    weights = live_of(model, 1, by_index)
    changes = {
        "BF16": Changes("BF16", np.array([0]), np.array([7], np.uint16)),
        "I64": Changes("I64", np.array([0]), np.array([7], np.uint64)),
    }
    weights.check(changes)
    here = LiveWeights(Geometry(model.layout), model.moves, model.places, by_index=by_index)
    here.assign(plan(model, 1))
    for call in (here.check, here.write):
        with pytest.raises(UsageError, match="tensor 'steps' has changes"):
            call(changes)
    assert all(not bits(tensor).any() for tensor in model.places.values())
    with pytest.raises(UsageError, match="stores no F64 tensor"):
        weights.write({"F64": Changes("F64", np.array([0]), np.array([7], np.uint64))})


def test_copies_that_differ_are_found_by_a_proof_and_by_a_write(
    by_index: bool, rng: np.random.Generator
) -> None:
    model = model_of("BF16", 0)
    weights, state = live_of(model, 0, by_index), random_state(model.layout, rng)
    weights.load(source_of(state))
    sound = weights.parts()
    space = weights.geometry["BF16"]
    at = int(space.starts[space.index["norm"]]) + 5
    bits(model.places["norm1"])[5] ^= 1
    with pytest.raises(Corrupt, match=r"tensor 'norm' and others: copy 1"):
        put(weights, "BF16", [at], [7])
    bits(model.places["norm1"])[5] ^= 1
    put(weights, "BF16", [at], [7])  # what a cut write left is not judged, but what is there afterwards
    assert weights.parts().keys() == sound.keys()
    bits(model.places["norm1"])[6] ^= 1
    with pytest.raises(Corrupt, match=r"tensor 'norm' and others: copy 1"):
        weights.parts()


def test_moves_that_lead_to_one_element_are_refused(by_index: bool) -> None:
    model = Model(Layout.of([TensorSpec("a", "BF16", (4,)), TensorSpec("b", "BF16", (4,))]))
    model.place("p", "BF16", (7,))
    model.places["q"] = model.places["p"][1:]  # shares the storage
    model.copy("a", whole, "p", rows(0, 4))
    model.copy("b", whole, "q", rows(2, 4))
    with pytest.raises(UsageError, match="tensors 'a' and 'b' have elements of parameter 'q' in common"):
        LiveWeights(Geometry(model.layout), model.moves, model.places, by_index=by_index)


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (Move("w", Region((4,), (1,), 1), "p", Region((4,), (1,), 0)), "leaves one of them"),
        (Move("w", Region((4,), (1,), 0), "p", Region((4,), (2,), 0)), "leaves one of them"),
        (
            Move("w", Region((4,), (1,), 0), "wide", Region((4,), (1,), 0)),
            "parameter 'wide' is torch.float32",
        ),
        (Move("x", Region((4,), (1,), 0), "p", Region((4,), (1,), 0)), "stores no tensor 'x'"),
        (Move("w", Region((4,), (1,), 0), "z", Region((4,), (1,), 0)), "'z', which the engine does not have"),
        (Move("w", Region((4,), (1,), 0), "meta", Region((4,), (1,), 0)), "'meta' is Tensor"),
        (Move("w", Region((4,), (1,), 0), "p", Region((2, 2), (2, 1), 0)), "shape"),
    ],
)
def test_moves_that_do_not_fit_are_refused(move: Move, message: str) -> None:
    geometry = Geometry(Layout.of([TensorSpec("w", "BF16", (4,))]))
    places = {
        "p": torch.zeros(4, dtype=torch.bfloat16),
        "wide": torch.zeros(4),
        "meta": torch.zeros(4, dtype=torch.bfloat16, device="meta"),
    }
    with pytest.raises(UsageError, match=message):
        LiveWeights(geometry, [move], places)


def test_load_refuses_a_tensor_of_another_size_and_leaves_what_it_is_not_given(by_index: bool) -> None:
    weights, parameter = single("BF16", [1, 2, 3], by_index)
    with pytest.raises(UsageError, match="tensor 'w' has 6 bytes, found 5"):
        weights.load(lambda name: np.zeros(5, np.uint8))
    weights.load(lambda name: None)
    assert unsigned(parameter).tolist() == [1, 2, 3]


def test_weights_made_in_inference_mode_are_written_outside_and_inside_of_it(by_index: bool) -> None:
    with torch.inference_mode():
        weights, parameter = single("BF16", [1, 2, 3], by_index)
    put(weights, "BF16", [0], [9])
    with torch.inference_mode():
        put(weights, "BF16", [1], [8])
        assert unsigned(parameter.clone()).tolist() == [9, 8, 3]


def test_classes_are_one_a_move() -> None:
    weights, _ = single("BF16", [1, 2, 3], False)
    with pytest.raises(UsageError, match="2 classes for 1 moves"):
        weights.assign([(0, True), (0, True)])


def test_digests_and_loads_take_a_bounded_amount_of_memory(by_index: bool) -> None:
    """The parameter has 192 MiB, laid out the other way round."""
    shape = (6144, 16384)
    model = Model(Layout.of([TensorSpec("w", "BF16", shape)]))
    model.places["p"] = torch.ones(shape[::-1], dtype=torch.bfloat16)
    model.copy("w", whole, "p", lambda t: t.t())
    weights = LiveWeights(Geometry(model.layout), model.moves, model.places, by_index=by_index)
    weights.assign([(0, True)])
    data = torch.full(shape, 2, dtype=torch.bfloat16)
    raw = unsigned(data).reshape(-1).view(np.uint8)
    weights.warm()  # a compiler takes memory, too
    before = reset_peak_kib()
    weights.load(lambda name: raw)
    found = weights.parts()[0]
    assert peak_kib() - before < 160 << 10
    assert found == digest_all(weights.geometry, memory_of(weights.geometry, {"w": data}))


def reset_peak_kib() -> int:
    """Forget how much memory was in use before; how much is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_kib()


def peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_warm_makes_every_width_of_the_layout_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[int] = []
    monkeypatch.setattr(live.places, "warm", warmed.append)
    live_of(model_of("BF16", 0), 0, False).warm()
    assert warmed == [2, 8]
