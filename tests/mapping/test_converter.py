"""Recorded maps equal the converter on random bits; what computes is found, and streamed; what decides is caught."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from weightcast.codec.regions import Region
from weightcast.mapping import layout_map
from weightcast.mapping.converter import Position, record_map
from weightcast.mapping.layout_map import LayoutMap
from weightcast.schemas.errors import UsageError

from . import layouts
from .layouts import Megatron, Pairs, Tensors, random

DTYPES = [torch.bfloat16, torch.float32]
Convert = Callable[[Tensors], Pairs]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def put_together(plan: LayoutMap, trainer: Tensors) -> dict[str, torch.Tensor]:
    """From slices alone; what no slice holds stays 0xCD."""
    found: dict[str, torch.Tensor] = {}
    for part in plan.slices(trainer):
        fresh = torch.full(
            (torch.Size(part.shape).numel() * part.tensor.element_size(),), 0xCD, dtype=torch.uint8
        )
        whole = found.setdefault(part.name, fresh.view(part.tensor.dtype).reshape(part.shape))
        whole[tuple(slice(s, s + n) for s, n in zip(part.start, part.extent, strict=True))] = part.tensor
    return found


def moved(plan: LayoutMap, trainer: Tensors) -> dict[str, torch.Tensor]:
    """From the moves alone."""
    looks = {o.name: o for o in plan.outputs}
    found = {o.name: torch.zeros(o.shape, dtype=o.dtype) for o in plan.outputs}
    for move in plan.moves:
        source = trainer[move.place].view(looks[move.tensor].dtype)
        part = source.as_strided(move.target.shape, move.target.strides, move.target.offset)
        whole = found[move.tensor].flatten()
        whole.as_strided(move.source.shape, move.source.strides, move.source.offset).copy_(part)
        found[move.tensor] = whole.reshape(looks[move.tensor].shape)
    return found


def follows(convert: Convert, trainer: dict[str, torch.Tensor]) -> LayoutMap:
    """Record, and hold everything that the map gives to the converter."""
    plan = record_map(convert, trainer)
    assert plan.computed == {}
    expected = dict(convert(trainer))
    assert [o.name for o in plan.outputs] == list(expected)
    given = dict(plan.tensors(trainer))
    together, by_moves = put_together(plan, trainer), moved(plan, trainer)
    for name, tensor in expected.items():
        assert same(given[name], tensor), name
        assert same(together[name], tensor), name
        assert same(by_moves[name], tensor), name
    return plan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_megatron(dtype: torch.dtype, ranks: int) -> None:
    shape = Megatron(ranks=ranks)
    whole = shape.whole(dtype)
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for rank in range(ranks):
        held = shape.held(whole, rank)
        plan = record_map(lambda tensors, rank=rank: shape.convert(tensors, rank), held, shape.parts(rank))
        assert plan.computed == {}
        storages = {tensor.untyped_storage().data_ptr() for tensor in held.values()}
        for part in plan.slices(held):
            assert part.shape == tuple(whole[part.name].shape)
            where = tuple(slice(s, s + n) for s, n in zip(part.start, part.extent, strict=True))
            found[part.name][where] = part.tensor
            if part.tensor.numel():
                assert part.tensor.untyped_storage().data_ptr() in storages, part.name
    for name, tensor in whole.items():
        assert same(found[name], tensor), name


def test_interleaved_heads_are_one_slice_a_group() -> None:
    shape = Megatron()
    held = shape.held(shape.whole(torch.bfloat16), 0)
    plan = record_map(shape.convert, held)
    tiles = {o.name: o.tiles for o in plan.outputs}
    assert [(t.start, t.extent, t.offset) for t in tiles["q.weight"] or ()] == [
        ((12 * g, 0), (12, 10), 240 * g) for g in range(4)
    ]
    assert [(t.start, t.extent, t.offset) for t in tiles["k.weight"] or ()] == [
        ((6 * g, 0), (6, 10), 240 * g + 120) for g in range(4)
    ]
    assert [len(tiles[name] or ()) for name in ("gate.weight", "up.weight", "embed.weight")] == [1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("convert", "held"),
    [
        (layouts.split_qkv, lambda dtype: {"qkv": random(dtype, 96, 10)}),
        (layouts.conv1d, layouts.conv1d_held),
        (layouts.stacked, layouts.stacked_held),
        (layouts.single, layouts.single_held),
        (
            layouts.rotary,
            lambda dtype: {"pairs": random(dtype, 24, 10), "halves": random(dtype, 24, 10, seed=1)},
        ),
        (layouts.odd, layouts.odd_held),
        (layouts.buffers, layouts.buffers_held),
    ],
    ids=["split qkv", "Conv1D", "stacked experts", "single experts", "rotary", "odd", "buffers"],
)
def test_layouts(
    convert: Convert, held: Callable[[torch.dtype], dict[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    follows(convert, held(dtype))


def test_trainer_tensors_of_any_strides() -> None:
    wide = random(torch.bfloat16, 12, 10)
    held = {"columns": wide[:, 2:8], "turned": wide.t(), "part": wide[3:9], "row": wide[4, 1:]}

    def convert(tensors: Tensors) -> Pairs:
        for name, tensor in tensors.items():
            yield name, tensor.contiguous()
            yield f"{name}.half", tensor[: len(tensor) // 2]

    plan = record_map(convert, held)
    assert plan.computed == {}
    for name, tensor in plan.tensors(held):
        assert same(tensor, dict(convert(held))[name]), name


def test_every_dtype_and_size() -> None:
    dtypes = [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.float64, torch.complex64]
    held = {f"{dtype}": torch.ones(3, 4).to(dtype) for dtype in dtypes}
    held |= {"scalar": torch.tensor(3.0), "empty": torch.ones(0, 4), "one": torch.ones(1, 1)}

    def convert(tensors: Tensors) -> Pairs:
        for name, tensor in tensors.items():
            yield name, tensor.clone()
            yield f"{name}.flat", tensor.reshape(-1)

    assert len(follows(convert, held).moves) == 2 * len(held) - 2


def test_the_check_keeps_random_bits_of_a_few_tensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_map, "_KEPT_BYTES", 1000)
    made: list[str] = []
    make = layout_map._Random._make
    monkeypatch.setattr(layout_map._Random, "_make", lambda self, name: made.append(name) or make(self, name))
    random = layout_map._Random({f"{i}": layout_map.Look.of(torch.ones(100)) for i in range(6)})
    seen = [random[f"{i}"].clone() for i in (*range(6), 5, 2, 0)]
    assert made == ["0", "1", "2", "3", "4", "5", "0"]
    assert same(seen[0], seen[8])
    assert same(seen[2], seen[7])


def test_slices_are_views_of_the_trainers_tensors() -> None:
    shape = Megatron()
    held = shape.held(shape.whole(torch.float32), 0)
    plan = record_map(shape.convert, held)
    before = {s.name: s.tensor for s in plan.slices(held) if s.name in ("gate.weight", "o.weight")}
    held["fc1"].zero_()
    held["proj"].fill_(2)
    assert not before["gate.weight"].any()
    assert before["o.weight"].eq(2).all()
    assert all(not s.tensor.any() for s in plan.slices(held) if s.name == "up.weight")


def test_a_move_as_a_pair_of_regions() -> None:
    held = {"w": random(torch.float32, 4, 6)}
    plan = record_map(lambda t: {"w": t["w"].t()}, held, {"w": Position((6, 12), (0, 8))})
    (move,) = plan.moves
    assert (move.tensor, move.place) == ("w", "w")
    assert move.source == Region((6, 4), (12, 1), 8)
    assert move.target == Region((6, 4), (1, 6), 0)


# -- what computes


def computes(tensors: Tensors) -> Pairs:
    yield "moved", tensors["a"].t()
    yield "added", tensors["a"] + 1
    yield "cast", tensors["a"].to(torch.float16)
    yield "scaled", tensors["a"].clone().mul_(2)[1:]
    yield "product", torch.cat([tensors["a"], tensors["a"] @ tensors["b"]])
    yield "constant", torch.arange(3)
    yield "padded", torch.nn.functional.pad(tensors["a"], (0, 0, 0, 2))
    yield "shuffled", tensors["long"][torch.arange(20000) * 7919 % 20000]
    yield "windows", tensors["a"].clone().flatten().unfold(0, 3, 2)
    yield "last", tensors["b"][:2]


def computes_held() -> dict[str, torch.Tensor]:
    return {"a": torch.randn(4, 4), "b": torch.randn(4, 4), "long": torch.randn(20000)}


def test_what_computes_is_found_with_the_reason() -> None:
    plan = record_map(computes, computes_held())
    assert plan.computed == {
        "added": "computed by aten.add.Tensor",
        "cast": "cast: float32 -> float16",
        "scaled": "written by aten.mul_.Tensor",
        "product": "computed by aten.mm.default",
        "constant": "not made from the trainer's tensors by torch operations",
        "padded": "computed by aten.constant_pad_nd.default",
        "windows": "a view that is not made of boxes of the trainer's tensors",
        "shuffled": "aten.index.Tensor scatters elements too finely, or mixes them with others",
    }
    assert {m.tensor for m in plan.moves} == {"moved", "last"}


def test_what_computes_is_streamed_in_the_converters_order() -> None:
    held = computes_held()
    plan = record_map(computes, held)
    for _ in range(2):
        given = list(plan.tensors(held))
        assert [name for name, _ in given] == [name for name, _ in computes(held)]
        assert all(same(a, b) for (_, a), (_, b) in zip(given, computes(held), strict=True))
        together = put_together(plan, held)
        assert all(same(together[name], tensor) for name, tensor in computes(held))
        held["a"].add_(1)


def test_a_stream_holds_one_computed_tensor_at_a_time() -> None:
    live: list[int] = []

    def convert(tensors: Tensors) -> Pairs:
        for name, tensor in tensors.items():
            live.append(1)
            yield name, tensor * 2
            live.pop()

    held = {f"{i}": torch.randn(3) for i in range(5)}
    plan = record_map(convert, held)
    assert len(plan.computed) == 5
    assert [len(live) for _ in plan.slices(held)] == [1] * 5


def test_what_only_moves_does_not_run_the_converter_again() -> None:
    calls = 0

    def convert(tensors: Tensors) -> Mapping[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        return {name: tensor.t() for name, tensor in tensors.items()}

    held = {"w": torch.randn(2, 3)}
    plan = record_map(convert, held)
    for _ in range(3):
        assert len(list(plan.slices(held))) == 1
    assert calls == 3  # recorded, proved on random bits, proved on the trainer's


def test_recording_takes_no_memory_and_reads_no_values() -> None:
    """A converter of 64 GiB of bf16."""
    held = {"qkv": torch.empty(1 << 20, 1 << 15, dtype=torch.bfloat16, device="meta")}

    def convert(tensors: Tensors) -> Pairs:
        q, k = tensors["qkv"].view(2, -1, 1 << 15).unbind()
        yield "q", torch.cat([q, k])
        yield "k", k.t().contiguous()

    plan = record_map(convert, held)
    assert plan.computed == {}
    assert [len(o.tiles or ()) for o in plan.outputs] == [1, 1]


def test_buffers_with_something_else_in_them_are_computed() -> None:
    def convert(tensors: Tensors) -> Pairs:
        padded = torch.zeros(4, 3)
        padded[:2] = tensors["w"]
        yield "padded", padded
        yield "cut", padded[:2]
        padded[2:].copy_(tensors["w"])
        yield "full", padded.clone()
        padded[0].fill_(1)
        yield "filled", padded.clone()
        padded[0] = tensors["w"][0] * 2
        yield "scaled", padded
        whole = torch.zeros(2, 3, dtype=torch.bfloat16)
        whole[:] = tensors["w"]
        yield "rounded", whole
        whole[torch.tensor([1])] = whole[torch.tensor([0])]
        yield "put", whole

    held = {"w": torch.randn(2, 3)}
    plan = record_map(convert, held)
    assert plan.computed == {
        "padded": "parts of it are not made from the trainer's tensors",
        "filled": "parts of it are not made from the trainer's tensors",
        "scaled": "computed by aten.mul.Tensor",
        "rounded": "cast: float32 -> bfloat16",
        "put": "cast: float32 -> bfloat16",
    }
    assert all(same(a, b) for (_, a), (_, b) in zip(plan.tensors(held), convert(held), strict=True))


def test_an_output_is_what_it_is_when_it_is_given() -> None:
    def convert(tensors: Tensors) -> Pairs:
        reused = torch.empty(2, 3)
        for name, tensor in tensors.items():
            yield name, reused.copy_(tensor)

    held = {"a": torch.randn(2, 3), "b": torch.randn(2, 3)}
    plan = record_map(convert, held)
    assert plan.computed == {}
    assert all(same(tensor, held[name]) for name, tensor in plan.tensors(held))


# -- what decides


def test_a_converter_that_looks_at_values_is_streamed_from_there_on() -> None:
    def convert(tensors: Tensors) -> Pairs:
        yield "first", tensors["a"]
        yield "chosen", tensors["a"] if tensors["a"].sum() > 0 else tensors["b"]
        yield "last", tensors["b"]

    held = {"a": torch.ones(3), "b": torch.zeros(3)}
    plan = record_map(convert, held)
    assert plan.computed == dict.fromkeys(("chosen", "last"), "the converter looks at values of 'a'")
    assert dict(plan.tensors(held))["chosen"] is not None
    held["a"].neg_()
    assert torch.equal(dict(plan.tensors(held))["chosen"], held["b"])


def test_a_branch_that_torch_does_not_see_is_caught_by_the_check() -> None:
    def convert(tensors: Tensors) -> Pairs:
        large = bool((tensors["a"].numpy() > 1e-3).any())  # no torch operation
        yield "w", tensors["a"] if large else tensors["b"]

    small = {"a": torch.zeros(64), "b": torch.ones(64)}
    plan = record_map(convert, small)
    with pytest.raises(
        UsageError, match=r"on random bits: expected the bits of 'w' as mapped, found other"
    ) as caught:
        list(plan.slices(small))
    assert "depends on values" in str(caught.value.hint)
    with pytest.raises(UsageError, match="is not what was recorded"):
        plan.check(small)


def test_a_branch_that_only_the_trainers_values_take_is_caught_too() -> None:
    def convert(tensors: Tensors) -> Pairs:
        flat = bool((tensors["a"].numpy() == 3).all())  # neither stand-ins nor random bits are
        yield "w", tensors["b"] if flat else tensors["a"]

    held = {"a": torch.full((4,), 3.0), "b": torch.ones(4)}
    with pytest.raises(UsageError, match=r"on the trainer's tensors: expected the bits of 'w'"):
        record_map(convert, held).check(held)


def test_another_number_of_outputs_is_caught() -> None:
    calls: list[int] = []

    def convert(tensors: Tensors) -> Pairs:
        calls.append(1)
        yield "a", tensors["a"]
        if len(calls) != 2:
            yield "b", tensors["a"]

    held = {"a": torch.ones(3)}
    with pytest.raises(UsageError, match=r"expected 'b' torch.float32 \[3\], found None"):
        record_map(convert, held).check(held)
    calls.append(1)
    plan = record_map(lambda t: dict(list(convert(t))[: 1 + (len(calls) > 4)]), held)
    with pytest.raises(UsageError, match="expected nothing more, found 'b'"):
        plan.check(held)


# -- refusals


def test_a_converter_that_writes_to_the_trainers_tensors_is_refused() -> None:
    def convert(tensors: Tensors) -> Pairs:
        yield "w", tensors["w"][1:].mul_(2)

    held = {"w": torch.ones(3)}
    with pytest.raises(UsageError, match="changes trainer tensor 'w' in place"):
        record_map(convert, held)
    assert held["w"].eq(1).all()


def test_a_converter_that_fails_is_told_with_its_own_words() -> None:
    with pytest.raises(UsageError, match="fails on stand-ins without values: KeyError: 'gone'"):
        record_map(lambda tensors: {"w": tensors["gone"]}, {})


@pytest.mark.parametrize("given", [[torch.ones(1)], [("w", 3)], [(3, torch.ones(1))]])
def test_what_is_no_pair_is_refused(given: list[object]) -> None:
    with pytest.raises(UsageError, match=r"must give \(name, tensor\) pairs"):
        record_map(lambda tensors: given, {})  # type: ignore[arg-type, return-value]


def test_two_outputs_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two tensors under the name 'w'"):
        record_map(lambda t: [("w", t["a"]), ("w", t["a"])], {"a": torch.ones(2)})


@pytest.mark.parametrize("place", [((4, 3), (1, 1)), ((4, 2), (3, 0)), ((4,), (0,)), ((4, 2), (-1, 0))])
def test_parts_that_do_not_fit_are_refused(place: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match=r"output 'w' of shape .* does not lie at"):
        record_map(lambda t: {"w": t["w"]}, {"w": torch.ones(2, 3)}, {"w": place})


def test_parts_of_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="parts has 'v', which the converter does not give"):
        record_map(lambda t: {"w": t["w"]}, {"w": torch.ones(2)}, {"v": ((4,), (0,))})


@pytest.mark.parametrize(
    "other", [{}, {"w": torch.ones(3, 2)}, {"w": torch.ones(2, 3).double()}, {"w": torch.ones(3, 2).t()}]
)
def test_other_tensors_than_recorded_are_refused(other: dict[str, torch.Tensor]) -> None:
    held = {"w": torch.ones(2, 3)}
    plan = record_map(lambda t: {"w": t["w"]}, held)
    plan.check(held)
    with pytest.raises(UsageError, match="trainer tensor 'w' is not what the map was recorded with"):
        list(plan.slices(other))


def test_parts_are_no_whole_tensors() -> None:
    held = {"w": torch.ones(2, 3)}
    plan = record_map(lambda t: {"w": t["w"]}, held, {"w": Position((4, 3), (2, 0))})
    with pytest.raises(UsageError, match=r"'w' of shape \[4, 3\] is here in part only"):
        list(plan.tensors(held))


def test_tensors_whose_bits_lie_elsewhere_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'w' is a .* a map needs plain dense ones"):
        record_map(lambda t: {"w": t["w"]}, {"w": torch.eye(3).to_sparse()})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sharded = distribute_tensor(
            torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        with pytest.raises(UsageError, match="'w' is a DTensor") as caught:
            record_map(lambda t: {"w": t["w"]}, {"w": sharded})
        assert "to_local()" in str(caught.value.hint)
    finally:
        dist.destroy_process_group()
