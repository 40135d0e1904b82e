"""Recording a loader: what is a copy, what is refused and why, and that the model stays what it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.codec.regions import Move, Region
from weightcast.mapping.images import Image
from weightcast.mapping.record import Recording, record
from weightcast.schemas.layout import Layout, TensorSpec

Weights = Iterator[tuple[str, torch.Tensor]]
Loader = Callable[[torch.nn.Module, str, torch.Tensor], object]


class Model(torch.nn.Module):
    """Parameters of given shapes, and a loader that is given one tensor at a time."""

    def __init__(self, parameters: dict[str, torch.Tensor], loader: Loader) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        self.loader = loader

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.loader(self, name, tensor)


def bf16(*shape: int) -> torch.Tensor:
    """Distinct bits, as far as 16 bits go."""
    return torch.arange(int(np.prod(shape)), dtype=torch.int16).view(torch.bfloat16).reshape(shape).clone()


def layout(dtype: str = "BF16", /, **shapes: tuple[int, ...]) -> Layout:
    return Layout.of(TensorSpec(name, dtype, shape) for name, shape in shapes.items())


def rebuilt(recording: Recording, name: str, elements: int) -> torch.Tensor:
    """int16 [elements]: what the model holds of a tensor, by the recorded moves; -1 where there is nothing."""
    out = torch.full((elements,), -1, dtype=torch.int16)
    for move in recording.moves:
        if move.tensor == name:
            place = recording.places[move.place]
            flat = torch.empty(0, dtype=place.dtype).set_(place.untyped_storage()).view(torch.int16)
            part = torch.as_strided(flat, move.target.shape, move.target.strides, move.target.offset)
            torch.as_strided(out, move.source.shape, move.source.strides, move.source.offset).copy_(part)
    return out


def loaded(model: Model, plan: Layout, load: Callable[[Weights], object] | None = None) -> Recording:
    """Record, and check that the model is bit for bit, storage for storage and object for object what it was."""
    before = {
        n: (p, p.data_ptr(), tuple(p.shape), p.stride(), p.detach().clone())
        for n, p in model.named_parameters()
    }
    recording = record(model, plan, load)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, (parameter, address, shape, stride, value) in before.items():
        assert after[name] is parameter
        assert (parameter.data_ptr(), tuple(parameter.shape), parameter.stride()) == (address, shape, stride)
        assert torch.equal(parameter.data.view(torch.uint8), value.view(torch.uint8)) or not value.numel()
    return recording


def follows(model: Model, plan: Layout) -> Recording:
    """Record, load real tensors by the real loader, and check that the moves say where their elements went."""
    recording = loaded(model, plan)
    assert recording.refused == {}
    real = {s.name: bf16(*s.shape) for s in plan.stored}
    with torch.no_grad():
        model.load_weights(iter(real.items()))
    for spec in plan.stored:
        here = rebuilt(recording, spec.name, spec.elements)
        held = here != -1
        assert torch.equal(here[held], real[spec.name].view(torch.int16).flatten()[held])
    return recording


def test_plain_copy() -> None:
    recording = follows(Model({"w": bf16(4, 6)}, lambda m, n, t: m.w.data.copy_(t)), layout(w=(4, 6)))
    flat = Region((24,), (1,), 0)
    assert recording.moves == (Move("w", flat, "w", flat),)
    assert recording.absent == ()
    assert set(recording.places) == {"w"}


def test_fused_tensors_go_to_one_parameter() -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        start = {"q": 0, "k": 4, "v": 6}[n]
        m.qkv.narrow(0, start, t.shape[0]).copy_(t)

    recording = follows(Model({"qkv": bf16(8, 3)}, load), layout(q=(4, 3), k=(2, 3), v=(2, 3)))
    assert {m.tensor: m.target.offset for m in recording.moves} == {"q": 0, "k": 12, "v": 18}


def test_column_slice_of_a_rank() -> None:
    model = Model({"w": bf16(3, 4)}, lambda m, n, t: m.w.data.copy_(t.chunk(2, 1)[1]))
    recording = follows(model, layout(w=(3, 8)))
    assert recording.moves == (Move("w", Region((3, 4), (8, 1), 4), "w", Region((3, 4), (4, 1), 0)),)


def test_transposed_place_and_vocabulary_padding() -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        m.w.data[:, : t.shape[0]] = t.t()
        m.w.data[:, t.shape[0] :].fill_(0)

    recording = follows(Model({"w": bf16(4, 8)}, load), layout(w=(5, 4)))
    assert (rebuilt(recording, "w", 20) != -1).all()


def test_experts_through_views_and_splits() -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        gate, up = t.reshape(2, 6, 4).split(3, dim=1)
        m.experts.data[:, :3].copy_(gate)
        m.experts.data[:, 3:].copy_(up)

    recording = follows(Model({"experts": bf16(2, 6, 4)}, load), layout(w=(12, 4)))
    assert (rebuilt(recording, "w", 48) != -1).all()


def test_scalars_go_to_one_element() -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        if n == "a":
            m.scales.data[1] = t
        else:
            m.scales.data[2:3] = t[0]

    recording = follows(Model({"scales": bf16(4)}, load), layout(a=(), b=(1,)))
    assert [(m.tensor, m.target.offset, m.target.elements) for m in recording.moves] == [
        ("a", 1, 1),
        ("b", 2, 1),
    ]


@pytest.mark.parametrize(
    "copied",
    [
        lambda t: t.t().contiguous(),
        lambda t: t.t().clone().to("cpu", copy=True),
        lambda t: t[2:, 1:].t().contiguous().t().contiguous().t(),
    ],
)
def test_copies_on_the_way_are_followed(copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        source = copied(t)
        m.w.data[: source.shape[0], : source.shape[1]].copy_(source)

    follows(Model({"w": bf16(8, 8)}, load), layout(w=(5, 4)))


def test_the_same_bits_under_another_dtype() -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        m.w.data.view(torch.int16).copy_(t.view(torch.int16))

    assert len(follows(Model({"w": bf16(2, 3)}, load), layout(w=(2, 3))).moves) == 1


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int64, "I64"), (torch.bool, "BOOL")]
)
def test_dtypes_of_every_width(dtype: torch.dtype, name: str) -> None:
    model = Model({"w": torch.zeros(4, 2, dtype=dtype)}, lambda m, n, t: m.w.data.copy_(t))
    assert [m.source.elements for m in loaded(model, layout(name, w=(4, 2))).moves] == [8]


def test_parts_of_one_storage_are_one_place() -> None:
    flat = bf16(12)
    model = Model({"a": flat[:4], "b": flat[4:].view(2, 4)}, lambda m, n, t: getattr(m, n).data.copy_(t))
    recording = follows(model, layout(a=(4,), b=(2, 4)))
    assert [(m.tensor, m.place, m.target.offset) for m in recording.moves] == [("a", "a", 0), ("b", "a", 4)]


def tied() -> Layout:
    return Layout.of(
        [TensorSpec("embed", "BF16", (4, 2)), TensorSpec("head", "BF16", (4, 2), tied_to="embed")]
    )


def test_b022_a_tied_name_is_booked_under_the_tensor_it_repeats() -> None:
    model = Model({"embed": bf16(4, 2), "head": bf16(4, 2)}, lambda m, n, t: getattr(m, n).data.copy_(t))
    recording = loaded(model, tied())
    assert [(m.tensor, m.place) for m in recording.moves] == [("embed", "embed"), ("embed", "head")]
    assert recording.absent == ()


def test_b022_a_tied_name_in_the_same_place_is_one_move() -> None:
    recording = loaded(Model({"embed": bf16(4, 2)}, lambda m, n, t: m.embed.data.copy_(t)), tied())
    assert len(recording.moves) == 1


def test_b022_a_tied_name_that_fails_is_held_against_the_tensor() -> None:
    model = Model(
        {"embed": bf16(4, 2), "head": bf16(4, 2).float()}, lambda m, n, t: getattr(m, n).data.copy_(t)
    )
    recording = loaded(model, tied())
    assert recording.moves == ()
    assert recording.refused == {"embed": "'head', which is tied to it: head: bfloat16 -> float32"}


def test_names_without_a_place_are_absent() -> None:
    model = Model({"w": bf16(2)}, lambda m, n, t: m.w.data.copy_(t) if n == "w" else None)
    assert loaded(model, layout(w=(2,), other=(3,))).absent == ("other",)


REFUSALS: dict[str, tuple[Callable[[torch.nn.Module, torch.Tensor], object], str]] = {
    "computed": (lambda m, t: m.w.data.copy_(t * 2), "w: written from a computed tensor"),
    "in two steps": (lambda m, t: m.w.data.copy_((t + 1)[:, :4].contiguous()), "w: written from a computed tensor"),
    "through a buffer": (lambda m, t: m.w.data.copy_(torch.zeros_like(t).copy_(t)), "w: written from a computed tensor"),
    "cast": (lambda m, t: m.w.data.copy_(t.float()), "w: bfloat16 -> float32"),
    "cast by copy": (lambda m, t: m.wide.data.copy_(t), "wide: bfloat16 -> float32"),
    "cast of equal width": (lambda m, t: m.fp16.data.copy_(t), "fp16: bfloat16 -> float16"),
    "selected": (lambda m, t: m.w.data.copy_(t[torch.tensor([3, 2, 1, 0])]), "w: written from a computed tensor"),
    "joined": (lambda m, t: m.w.data.copy_(torch.cat([t[:2], t[2:]])), "w: written from a computed tensor"),
    "broadcast": (lambda m, t: m.w.data.copy_(t[0]), "w: shape (4,) is written to a part of shape (4, 4)"),
    "expanded": (lambda m, t: m.w.data.copy_(t[:1].expand(4, 4)), "w: written from or to an overlapping view"),
    "expanded and copied": (lambda m, t: m.w.data.copy_(t[:1].expand(4, 4).clone()), "w: written from a computed tensor"),
    "filled with": (lambda m, t: m.w.data.fill_(t[0, 0]), "w: shape () is written to a part of shape (4, 4)"),
    "flattened out of order": (
        lambda m, t: m.w.data.view(-1).copy_(t.t().contiguous().view(-1)),
        "w: written from a view that is no strided part of the tensor",
    ),
    "added": (lambda m, t: m.w.data.add_(t), "w: written by aten.add_.Tensor"),
    "added by many": (lambda m, t: torch._foreach_add_([m.w.data], [t]), "w: written by aten._foreach_add_.List"),
    "put by index": (
        lambda m, t: m.w.data.index_put_((torch.tensor([0]),), t[:1]),
        "w: written by aten.index_put_.default",
    ),
    "output of": (lambda m, t: torch.add(t, t, out=m.w.data), "w: written by aten.add.out"),
    "set": (lambda m, t: m.w.data.set_(t), "w: written by aten.set_.source_Tensor"),
    "another's": (
        lambda m, t: m.w.data.copy_(torch.ones(4, 4, dtype=torch.bfloat16)),
        "w: written from a tensor that is not in the checkpoint",
    ),
    "drawn": (lambda m, t: m.w.data.normal_(), "w: written by aten.normal_.default"),
    "replaced data": (lambda m, t: setattr(m.w, "data", t), "w: the loader replaces its storage"),
    "replaced data by a copy": (lambda m, t: setattr(m.w, "data", t * 1), "w: the loader replaces its storage"),
    "replaced parameter": (
        lambda m, t: setattr(m, "w", torch.nn.Parameter(t, requires_grad=False)),
        "w: the loader replaces its storage",
    ),
    "kept": (lambda m, t: setattr(m, "mine", t), "mine: the model keeps the loaded tensor itself"),
    "kept as a buffer": (lambda m, t: m.register_buffer("mine", t), "mine: the model keeps the loaded tensor itself"),
    "turned": (lambda m, t: m.w.copy_(t).t_(), "w: the loader replaces its storage"),
    "item": (lambda m, t: m.w.data.copy_(t) if t[0, 0].item() >= 0 else None, "the loader looks at values"),
    "any": (lambda m, t: m.w.data.copy_(t) if t.any() else None, "the loader looks at values"),
    "equal": (lambda m, t: torch.equal(t, t) or m.w.data.copy_(t), "the loader looks at values"),
    "mask": (lambda m, t: m.w.data.copy_(t) if len(t[t > 0]) >= 0 else None, "the loader looks at values"),
    "changed in place": (lambda m, t: m.w.data.copy_(t.mul_(2)), "the loader changes the loaded tensor in place"),
    "filled after": (lambda m, t: m.w.data.copy_(t)[2:].zero_(), "w: overwritten after it was loaded"),
    "two parts in one place": (
        lambda m, t: (m.w.data[:2].copy_(t[:2]), m.w.data[1:3].copy_(t[2:])),
        "w: two parts of the tensor are written to the same elements",
    ),
    "numpy": (
        lambda m, t: m.w.data.copy_(torch.from_numpy(t.view(torch.int16).numpy()).view(torch.bfloat16)),
        "w: written from a tensor that is not in the checkpoint",
    ),
    "attribute": (lambda m, t: m.plain.copy_(t), "plain: it is neither a parameter nor a buffer"),
    "empty parameter": (
        lambda m, t: m.empty.data.copy_(t),
        "empty: the parameter has shape (0,), what is loaded (4, 4)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSALS)
def test_refused_by_name(how: str) -> None:
    act, reason = REFUSALS[how]

    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        if n == "bad":
            act(m, t)
        else:
            m.other.data.copy_(t)

    tensors = {
        "w": bf16(4, 4),
        "wide": bf16(4, 4).float(),
        "fp16": bf16(4, 4).view(torch.float16),
        "other": bf16(3),
        "empty": bf16(0),
    }
    model = Model(tensors, load)
    model.plain = bf16(4, 4)
    before = model.plain.clone()
    recording = loaded(model, layout(bad=(4, 4), good=(3,)))
    assert recording.refused == {"bad": reason}
    assert [m.tensor for m in recording.moves] == ["good"]
    assert torch.equal(model.plain.view(torch.int16), before.view(torch.int16))
    assert not hasattr(model, "mine")


def test_a_fill_before_the_copy_is_fine() -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        m.w.data.zero_()
        m.w.data[:2] = t

    assert len(follows(Model({"w": bf16(4, 4)}, load), layout(w=(2, 4))).moves) == 1


def test_a_later_write_is_held_against_the_tensor_that_was_there() -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        m.w.data.copy_(t if n == "a" else t * 2)

    refused = loaded(Model({"w": bf16(4)}, load), layout(a=(4,), b=(4,))).refused
    assert refused == {"a": "w: overwritten after it was loaded", "b": "w: written from a computed tensor"}


def test_two_tensors_in_one_place_are_both_refused() -> None:
    recording = loaded(Model({"w": bf16(4)}, lambda m, n, t: m.w.data.copy_(t)), layout(a=(4,), b=(4,)))
    assert recording.moves == ()
    assert set(recording.refused) == {"a", "b"}
    assert "'b' is written to the same elements" in recording.refused["a"]


def test_tensors_taken_all_at_once_are_told_apart() -> None:
    """The loader's copies come long after it took the last name."""
    model = Model({"w": bf16(8), "x": bf16(4)}, lambda m, n, t: None)

    def load(weights: Weights) -> None:
        held = dict(weights)
        model.w.data[:4].copy_(held["a"])
        model.w.data[4:].copy_(held["b"])
        model.x.data.copy_(held["c"] + held["d"])

    recording = loaded(model, layout(a=(4,), b=(4,), c=(4,), d=(4,)), load)
    assert [(m.tensor, m.target.offset) for m in recording.moves] == [("a", 0), ("b", 4)]
    assert set(recording.refused) == {"c", "d"}


def test_many_copies_in_one_operation() -> None:
    model = Model({"a": bf16(4), "b": bf16(4)}, lambda m, n, t: None)

    def load(weights: Weights) -> None:
        held = dict(weights)
        torch._foreach_copy_([model.a.data, model.b.data], [held["b"], held["a"]])

    moves = loaded(model, layout(a=(4,), b=(4,)), load).moves
    assert [(m.tensor, m.place) for m in moves] == [("a", "b"), ("b", "a")]


def test_one_bad_tensor_does_not_hide_the_rest() -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        assert getattr(m, n).shape == t.shape
        getattr(m, n).data.copy_(t)

    names = "abcdef"
    model = Model({n: bf16(0) if n in "be" else bf16(4) for n in names}, load)
    recording = loaded(model, layout(**dict.fromkeys(names, (4,))))
    assert [m.tensor for m in recording.moves] == list("acdf")
    assert set(recording.refused) == {"b", "e"}


def test_an_empty_parameter_is_named_where_the_loader_only_says_no() -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        param = m.packed.data
        if param.shape != t.shape:
            raise ValueError("wrong shape\nand a long story")

    reason = loaded(Model({"packed": bf16(0)}, load), layout(w=(4,))).refused["w"]
    assert reason == "loader failed: ValueError: wrong shape (packed: the parameter has shape (0,))"


def test_a_failure_after_the_last_name_is_looked_for_one_by_one() -> None:
    model = Model({"a": bf16(4), "b": bf16(4)}, lambda m, n, t: None)

    def load(weights: Weights) -> None:
        for name, tensor in sorted(dict(weights).items(), reverse=True):
            if name == "c":
                raise KeyError(name)
            getattr(model, name).data.copy_(tensor)

    recording = loaded(model, layout(a=(4,), b=(4,), c=(4,)), load)
    assert [m.tensor for m in recording.moves] == ["a", "b"]
    assert recording.refused == {"c": "loader failed: KeyError: 'c'"}


def test_a_loader_that_takes_nothing_fails_for_all() -> None:
    def load(weights: Weights) -> None:
        raise NotImplementedError("no loading here")

    refused = loaded(Model({"a": bf16(4)}, lambda m, n, t: None), layout(a=(4,), b=(4,)), load).refused
    assert set(refused.values()) == {"loader failed: NotImplementedError: no loading here"}


def test_a_loader_that_looks_one_ahead_does_not_blame_the_next() -> None:
    model = Model({"a": bf16(2), "b": bf16(4)}, lambda m, n, t: None)

    def load(weights: Weights) -> None:
        held = next(weights, None)
        while held is not None:
            following = next(weights, None)
            if held[0] == "a":
                raise ValueError("a is bad")
            model.b.data.copy_(held[1])
            held = following

    recording = loaded(model, layout(a=(4,), b=(4,)), load)
    assert [m.tensor for m in recording.moves] == ["b"]


def test_in_inference_mode() -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        with torch.inference_mode():
            m.w.data.copy_(t.reshape(2, 6).t().contiguous().chunk(2)[1])

    recording = follows(Model({"w": bf16(3, 2)}, load), layout(w=(12,)))
    assert (rebuilt(recording, "w", 12) != -1).sum() == 6


def test_parameters_of_classes_of_their_own() -> None:
    class Special(torch.nn.Parameter):
        def load_row(self, tensor: torch.Tensor, at: int) -> None:
            self.data.narrow(0, at, len(tensor)).copy_(tensor)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return super().__torch_function__(func, types, args, kwargs or {})

    model = Model({}, lambda m, n, t: m.w.load_row(t, 4))
    model.w = Special(bf16(8), requires_grad=False)
    model.w.weight_loader = None
    assert [m.target.offset for m in follows(model, layout(w=(4,))).moves] == [4]
    assert isinstance(model.w, Special)
    assert hasattr(model.w, "weight_loader")


def test_replaced_data_of_a_loaded_parameter_refuses_who_is_in_it() -> None:
    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        m.w.data[:4].copy_(t)
        m.w.data = m.w.data.clone()

    refused = loaded(Model({"w": bf16(8)}, load), layout(a=(4,))).refused
    assert refused == {"a": "w: the loader replaces its storage"}


def test_memory_of_large_tensors_is_not_touched() -> None:
    """16 GiB of stand-ins, copied, transposed and scaled."""
    shape = (1 << 16, 1 << 16)

    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        m.w.data.copy_((t if n == "a" else t.t().contiguous() if n == "b" else t * 2)[:2, :2])

    model = Model({"w": bf16(2, 2)}, load)
    before = getrusage(RUSAGE_SELF).ru_maxrss  # KiB
    assert loaded(model, layout(a=shape, b=shape, c=shape)).absent == ()
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 1 << 20


@pytest.mark.parametrize("good", [True, False])
def test_cost_is_linear_in_the_number_of_tensors(good: bool) -> None:
    names = [f"layer.{i}" for i in range(10_000)]

    def load(m: torch.nn.Module, n: str, t: torch.Tensor) -> None:
        param = m.w.data
        if not good:
            raise ValueError("no")
        param[int(n.split(".")[1])].copy_(t.view(8, 2)[:4])

    model = Model({"w": torch.zeros(10_000, 4, 2, dtype=torch.bfloat16)}, load)
    started = time.process_time()
    recording = record(model, layout(**dict.fromkeys(names, (16,))))
    assert time.process_time() - started < 60  # seconds of one core; measured 3
    assert (len(recording.moves), len(recording.refused)) == ((10_000, 0) if good else (0, 10_000))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_views_through_copies_show_the_right_elements(data: st.DataObject) -> None:
    """Against torch: elements are numbered, copied in another order, and looked at."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    base = torch.arange(int(np.prod(shape)))
    image, held = Image.whole("w", 8, base.numel()), base
    view = base.view(shape)
    for _ in range(data.draw(st.integers(1, 3))):
        view = view.permute(data.draw(st.permutations(range(view.dim()))))
        at = data.draw(st.integers(0, view.dim() - 1))
        view = view.narrow(at, first := data.draw(st.integers(0, view.shape[at] - 1)), view.shape[at] - first)
        fresh = view.clone(memory_format=torch.contiguous_format)
        copied = image.copied(_region(view), _region(fresh))
        assert copied is not None
        image, held = copied, fresh.view(-1)
        view = fresh
    flat = data.draw(st.booleans())
    view = view.reshape(-1)[:: data.draw(st.integers(1, 3))] if flat else view.transpose(0, -1)
    found = image.view(_region(view))
    assert held.numel() == view.numel() or flat
    assert found is not None or flat
    if found is not None:
        assert torch.equal(torch.as_strided(base, found.shape, found.strides, found.offset), view)


def _region(tensor: torch.Tensor) -> Region:
    return Region(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
