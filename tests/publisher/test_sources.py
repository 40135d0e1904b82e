"""Every kind of tensor that a trainer may hand over arrives with the bits it had."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from weightcast.publisher import Publisher
from weightcast.schemas.errors import UsageError

from ..faultstore import FaultStore
from ..versions import (
    Bits,
    assert_version,
    bf16,
    chain_of,
    changed_places,
    copy_of,
    f32,
    objects_in,
    read,
    state_at,
)


def words(bits: Bits) -> list[int]:
    """16-bit elements as integers."""
    return [int(word) for word in np.frombuffer(bits.data, "<u2")]


def test_b013_every_second_column_of_a_wider_buffer(store: FaultStore, publisher: Publisher) -> None:
    wide = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    publisher.publish({"w": wide[:, ::2]}).wait()
    skipped = wide[:, 1::2].clone()
    wide[:, ::2][2, 1] = 99
    publisher.publish({"w": wide[:, ::2]}).wait()
    assert changed_places(store, 1) == {"w": [7]}
    assert_version(store, 1, copy_of({"w": wide[:, ::2].contiguous()}))
    assert torch.equal(wide[:, 1::2], skipped)


@pytest.mark.parametrize("elements", [6, 1 << 18])
def test_b014_fortran_order_is_published_in_c_order(
    store: FaultStore, publisher: Publisher, elements: int
) -> None:
    plain = np.arange(elements, dtype=np.int32).reshape(2, -1)
    publisher.publish({"w": np.asfortranarray(plain)}).wait()
    assert read(store, 0)["w"] == Bits("I32", plain.shape, plain.tobytes())
    changed = plain.copy()
    changed[1, 0] = -1
    publisher.publish({"w": np.asfortranarray(changed)}).wait()
    assert read(store, 1)["w"].data == changed.tobytes()
    assert changed_places(store, 1) == {"w": [elements // 2]}


def test_big_endian_arrays_keep_their_values_in_little_endian(
    store: FaultStore, publisher: Publisher
) -> None:
    values = np.array([1, 0x01020304, -5])
    publisher.publish(
        {"i": values.astype(">i4"), "f": np.array([1.5], ">f8"), "h": np.array([-0.0], ">f2")}
    ).wait()
    found = read(store, 0)
    assert found["i"] == Bits("I32", (3,), values.astype("<i4").tobytes())
    assert found["f"].data == np.array([1.5], "<f8").tobytes()
    assert found["h"].data == bytes.fromhex("0080")


def test_b016_scalars_keep_their_shape(store: FaultStore, publisher: Publisher) -> None:
    state = {"a": bf16(0x3F80).reshape(()), "b": torch.tensor(2.5), "c": torch.tensor(7)}
    publisher.publish(state).wait()
    state = {"a": bf16(0x4000).reshape(()), "b": torch.tensor(2.5), "c": torch.tensor(8)}
    assert publisher.publish(state).wait().totals.changed == 2
    found = read(store, 1)
    assert [found[n].shape for n in "abc"] == [(), (), ()]
    assert found["a"].data == bytes.fromhex("0040")
    assert found["c"].data == bytes.fromhex("0800000000000000")
    assert changed_places(store, 1) == {"a": [0], "c": [0]}
    publisher.publish({"a": np.array(3.0), "b": np.array(1.0), "c": torch.tensor(8)}).wait()
    assert read(store, 2)["a"] == Bits("F64", (), np.array(3.0).tobytes())


def test_b017_empty_tensors_keep_names_and_shapes(store: FaultStore, publisher: Publisher) -> None:
    state = {"a": torch.zeros(0), "b": torch.zeros(0, 1024), "c": torch.zeros(4, 0, 2), "w": torch.ones(3)}
    publisher.publish(state).wait()
    assert_version(store, 0, copy_of(state))
    state["d"] = torch.zeros(0, 7)
    manifest = publisher.publish(state).wait()
    assert_version(store, 1, copy_of(state))
    assert (manifest.totals.changed, manifest.layout.tensors) == (0, 5)
    publisher.publish({**state, "w": torch.zeros(3)}).wait()
    assert changed_places(store, 2) == {"w": [0, 1, 2]}


def test_a_model_of_nothing_but_empty_tensors(store: FaultStore, publisher: Publisher) -> None:
    publisher.publish({"a": torch.zeros(0, 3)}).wait()
    publisher.publish({"a": torch.zeros(0, 3), "b": np.zeros((2, 0), np.float32)}).wait()
    assert_version(store, 1, {"a": Bits("F32", (0, 3), b""), "b": Bits("F32", (2, 0), b"")})


def test_b018_a_zero_dimension_may_grow_and_shrink(store: FaultStore, publisher: Publisher) -> None:
    shapes = [(0, 8), (0, 8), (2, 8), (0, 8)]
    for shape in shapes:
        publisher.publish({"p": torch.ones(shape), "w": torch.ones(2, dtype=torch.int8)}).wait()
    assert [m.totals.changed for m in chain_of(store)] == [0, 0, 16, 0]
    for version, shape in enumerate(shapes):
        assert_version(
            store, version, copy_of({"p": torch.ones(shape), "w": torch.ones(2, dtype=torch.int8)})
        )


@pytest.mark.parametrize("base", [(64, 64), (64,)])
def test_b019_placeholders_are_refused_by_name(
    store: FaultStore, publisher: Publisher, base: tuple[int, ...]
) -> None:
    state = {f"p{i}": torch.randn(base) for i in range(10)}
    publisher.publish(state).wait()
    holes = {**state, "p2": torch.zeros(0), "p5": torch.zeros(0), "p7": torch.zeros(0)}
    with pytest.raises(UsageError, match="'p2', 'p5', 'p7'"):
        publisher.publish(holes)
    assert len(chain_of(store)) == 1
    publisher.publish(state).wait()
    assert_version(store, 1, copy_of(state))


class Tied(nn.Module):
    """An output head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(8, 4, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight = self.model.embed_tokens.weight


def test_b022_a_tied_head_follows_whichever_way_it_is_named(store: FaultStore, publisher: Publisher) -> None:
    model = Tied()
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    for way in ("state_dict", "named_parameters", "items", "state_dict"):
        with torch.no_grad():
            model.model.embed_tokens.weight[3] += 1
        source = {
            "state_dict": model.state_dict,
            "named_parameters": model.named_parameters,
            "items": lambda: iter(model.state_dict().items()),
        }[way]()
        version = publisher.publish(source).wait().version
        assert_version(store, version, copy_of(dict.fromkeys(names, model.lm_head.weight)))


def test_b022_named_parameters_first_and_the_second_name_later(
    store: FaultStore, publisher: Publisher
) -> None:
    model = Tied()
    publisher.publish(model.named_parameters()).wait()
    manifest = publisher.publish(model.state_dict()).wait()
    assert_version(store, 1, copy_of(model.state_dict()))
    assert manifest.totals.changed == 0  # the second name costs no bytes


def test_the_embedding_keeps_the_bytes_of_a_tied_head(store: FaultStore, publisher: Publisher) -> None:
    # Engines that load a checkpoint with tied embeddings skip lm_head and expect the embedding.
    publisher.publish(Tied().state_dict()).wait()
    assert {s.name: s.tied_to for s in state_at(store, 0).layout} == {
        "model.embed_tokens.weight": None,
        "lm_head.weight": "model.embed_tokens.weight",
    }


@pytest.mark.parametrize("elements", [32, 1 << 17])
@pytest.mark.parametrize("strided", [False, True])
def test_tied_later_and_untied_again(
    store: FaultStore, publisher_at: Callable[..., Publisher], elements: int, strided: bool
) -> None:
    publisher = publisher_at()

    def tensor(value: int) -> torch.Tensor:
        whole = torch.full((elements, 2), value, dtype=torch.int32)
        return whole[:, 0] if strided else whole[:, 0].contiguous()

    one, two = tensor(1), tensor(2)
    states = [
        {"b": one, "a": two},
        {"b": one, "a": one},
        {"b": one, "a": one},
        {"b": two, "a": one},
        {"a": two, "b": two},
    ]
    for version, state in enumerate(states):
        assert publisher.publish(state).wait().version == version
    for version, state in enumerate(states):
        assert_version(store, version, copy_of(state))
    assert chain_of(store)[2].totals.bytes == 0  # still tied: nothing moved


def test_a_cast_of_one_of_two_tied_names_tells_them_apart(
    store: FaultStore, publisher_at: Callable[..., Publisher]
) -> None:
    publisher = publisher_at(cast={"head": "bfloat16"})
    w = torch.randn(300)
    for k in range(2):
        w[k] += 1
        publisher.publish({"embed": w, "head": w}).wait()
        assert_version(store, k, copy_of({"embed": w, "head": w.bfloat16()}))


def test_lazy_views_of_one_memory_are_not_tied(store: FaultStore, publisher: Publisher) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"z": z, "conj": z.conj(), "imag": z.imag, "neg": z.conj().imag}
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    publisher.publish(state).wait()
    z[0] = torch.tensor(5 + 6j)
    publisher.publish(state).wait()
    for version, first in enumerate([1 + 2j, 5 + 6j]):
        plain = torch.tensor([first, 3 - 4j])
        expected = {
            "z": plain,
            "conj": torch.conj_physical(plain),
            "imag": plain.imag.clone(),
            "neg": -plain.imag,
        }
        assert_version(store, version, copy_of(expected))


class Gathered(Mapping[str, torch.Tensor]):
    """A mapping that makes each tensor when it is asked for, as a trainer that gathers shards does.

    A tensor lies where the last but one was, which nobody has any more: what an allocator does, but each time.
    """

    def __init__(self, values: dict[str, int], elements: int) -> None:
        self._values = values
        self._places = deque(torch.empty((elements, 2), dtype=torch.int32) for _ in range(2))

    def __getitem__(self, name: str) -> torch.Tensor:
        self._places.rotate()
        return self._places[0].fill_(self._values[name])[:, 0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@pytest.mark.parametrize("elements", [500, 1 << 17])
def test_tensors_that_take_turns_in_one_place_are_not_tied(
    store: FaultStore, publisher: Publisher, elements: int
) -> None:
    for version in range(3):
        values = {f"w{i}": 10 * version + i for i in range(8)}
        publisher.publish(Gathered(values, elements)).wait()
        assert_version(
            store,
            version,
            copy_of({n: torch.full((elements,), v, dtype=torch.int32) for n, v in values.items()}),
        )


def test_b024_slices_of_a_flat_buffer_are_two_tensors(store: FaultStore, publisher: Publisher) -> None:
    flat = torch.arange(12, dtype=torch.bfloat16)
    state = {"a": flat[:4].view(2, 2), "b": flat[4:]}
    manifest = publisher.publish(state).wait()
    assert manifest.totals.dense_bytes == 24
    flat[5] = 77
    publisher.publish(state).wait()
    assert changed_places(store, 1) == {"b": [1]}
    assert_version(store, 1, copy_of(state))


def test_b027_an_expanded_tensor_has_all_its_elements(store: FaultStore, publisher: Publisher) -> None:
    publisher.publish({"w": bf16(0x3F80).expand(5)}).wait()
    assert read(store, 0)["w"] == Bits("BF16", (5,), bytes.fromhex("803f") * 5)
    real = torch.ones(5, dtype=torch.bfloat16)
    real[3] = 2
    publisher.publish({"w": real}).wait()
    assert changed_places(store, 1) == {"w": [3]}


@pytest.mark.parametrize("elements", [100, 70_000, 300_000])
def test_b028_a_generator_that_overwrites_what_it_gave(
    store: FaultStore, publisher: Publisher, elements: int
) -> None:
    def overwriting(seed: int, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(3):
            buffer.copy_(torch.full((elements,), seed + i).bfloat16())
            yield f"w{i}", buffer
            buffer.fill_(float("nan"))

    for version, seed in enumerate([10, 20]):
        publisher.publish(overwriting(seed, torch.zeros(elements).bfloat16())).wait()
        assert_version(
            store, version, copy_of({f"w{i}": torch.full((elements,), seed + i).bfloat16() for i in range(3)})
        )


def test_b030_wrapper_parts_of_names_are_removed(store: FaultStore, publisher: Publisher) -> None:
    w = torch.randn(4, 4)
    publisher.publish({"layers.0.mlp.weight": w, "base_model.module.x": w + 1}).wait()
    wrapped = "module._orig_mod.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.weight"
    manifest = publisher.publish({wrapped: w, "base_model.module.x": w + 1}).wait()
    assert manifest.totals.changed == 0
    assert sorted(read(store, 1)) == ["base_model.module.x", "layers.0.mlp.weight"]


def test_b032_two_names_that_become_one_are_refused(store: FaultStore, publisher: Publisher) -> None:
    with pytest.raises(UsageError, match=r"'module\.w' and 'w' would both be published as 'w'"):
        publisher.publish({"module.w": bf16(0x3F80), "w": bf16(0x4000)})
    publisher.publish({"w": bf16(0x3F80)}).wait()
    with pytest.raises(UsageError, match=r"'w' and 'module\.w'"):
        publisher.publish({"w": bf16(0x3F80), "module.w": bf16(0x4000)})
    assert len(chain_of(store)) == 1


@pytest.mark.parametrize("elements", [4, 70_000])
def test_b039_a_name_that_comes_twice_is_refused(
    store: FaultStore, publisher: Publisher, elements: int
) -> None:
    one, two = torch.zeros(elements), torch.ones(elements)
    with pytest.raises(UsageError, match=r"'norm\.weight'"):
        publisher.publish([("norm.weight", one), ("norm.weight", two)])
    publisher.publish({"norm.weight": one}).wait()
    with pytest.raises(UsageError, match=r"'norm\.weight' comes twice"):
        publisher.publish([("norm.weight", one), ("norm.weight", two)])
    assert len(chain_of(store)) == 1


def test_b033_a_hundred_thousand_small_tensors(store: FaultStore, publisher: Publisher) -> None:
    flat = torch.zeros(200_000, dtype=torch.bfloat16)
    state = {f"layers.{i:06d}.weight": part for i, part in enumerate(flat.view(-1, 2))}
    publisher.publish(state).wait()
    flat[123_457] = 1
    start = time.process_time()
    manifest = publisher.publish(state).wait()
    took = time.process_time() - start
    assert took < 100, (
        f"{took:.1f} s of processor time"
    )  # 2 s on idle cores; this only catches another order of growth
    assert (manifest.totals.changed, len(manifest.shards)) == (1, 1)
    state_1 = state_at(store, 1)
    space = state_1.geometry["BF16"]
    assert len(space.names) == 100_000
    assert np.flatnonzero(state_1.memory.flat("BF16")).tolist() == [
        space.starts[space.index["layers.061728.weight"]] + 1
    ]
    assert len(store.inner.get("versions/000000000001.json", max_bytes=1 << 20)) <= 64 << 10


def test_b033_names_too_long_for_a_header_are_refused_before_upload(
    store: FaultStore, publisher: Publisher
) -> None:
    state = {f"{i:05d}" + "x" * 6000: torch.zeros(1) for i in range(200)}
    with pytest.raises(UsageError, match="has 6005 bytes, at most 1024"):
        publisher.publish(state)
    assert not [k for k in objects_in(store) if k.startswith(("layouts", "data", "versions", "snapshots"))]


def test_b035_long_and_odd_names_round_trip_or_are_refused_quoted(
    store: FaultStore, publisher: Publisher
) -> None:
    names = ["a" * 300, "重" * 200, "a/b/c", "..", "é.重み", "with space", "new\nline", "\x1b[31m"]
    state = {name: torch.full((3,), float(i)) for i, name in enumerate(names)}
    publisher.publish(state).wait()
    state["a/b/c"] = torch.full((3,), -1.0)
    publisher.publish(state).wait()
    assert_version(store, 1, copy_of(state))
    with pytest.raises(UsageError, match="tensor name '' is empty"):
        publisher.publish({**state, "": torch.zeros(1)})
    with pytest.raises(UsageError, match="NUL"):
        publisher.publish({**state, "a\x00b": torch.zeros(1)})
    assert len(chain_of(store)) == 2


@pytest.mark.parametrize("first", [True, False])
def test_b038_the_reserved_name_is_refused_before_upload(
    store: FaultStore, publisher: Publisher, first: bool
) -> None:
    if not first:
        publisher.publish({"w": torch.ones(2)}).wait()
    before = objects_in(store)
    with pytest.raises(UsageError, match="'__metadata__' is reserved"):
        publisher.publish({"w": torch.ones(2), "__metadata__": torch.ones(1)})
    publisher.wait_idle()
    after = objects_in(store)
    assert {k for k in after if k not in before} <= {"stream.json"}


def test_b040_fp8_changes_and_nans(store: FaultStore, publisher: Publisher) -> None:
    four, five = torch.zeros(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    four[3], four[5], five[0] = 0x38, 0x7F, 0x7C
    state = {"four": four.view(torch.float8_e4m3fn), "five": five.view(torch.float8_e5m2)}
    publisher.publish(state).wait()
    four[3], five[0] = 0x39, 0xFC
    publisher.publish(state).wait()
    assert changed_places(store, 1) == {"four": [3], "five": [0]}
    found = read(store, 1)
    assert found["four"] == Bits("F8_E4M3", (16,), four.numpy().tobytes())
    assert found["five"] == Bits("F8_E5M2", (16,), five.numpy().tobytes())


def test_b042_what_is_not_asked_to_be_cast_keeps_its_dtype(
    store: FaultStore, publisher_at: Callable[..., Publisher]
) -> None:
    publisher = publisher_at(cast={"*.weight": "bfloat16"})
    bias = torch.linspace(6.8, 7.1, 256)
    state = {"gate.e_score_correction_bias": bias, "gate.weight": bias.clone()}
    publisher.publish(state).wait()
    found = read(store, 0)["gate.e_score_correction_bias"]
    assert (found.dtype, found.data) == ("F32", bias.numpy().tobytes())
    assert len(set(np.frombuffer(found.data, np.float32))) == 256
    assert_version(store, 0, copy_of({**state, "gate.weight": bias.bfloat16()}))


def test_b046_packed_int4_is_what_it_is(store: FaultStore, publisher: Publisher) -> None:
    packed, words32 = (
        torch.full((4, 8), 0x21, dtype=torch.uint8),
        torch.arange(16, dtype=torch.int32).reshape(8, 2),
    )
    publisher.publish({"q": packed, "w": words32}).wait()
    packed.view(-1)[5], words32[3, 1] = 0x2F, words32[3, 1] ^ (1 << 30)
    publisher.publish({"q": packed, "w": words32}).wait()
    assert changed_places(store, 1) == {"q": [5], "w": [7]}
    assert_version(store, 1, copy_of({"q": packed, "w": words32}))


def test_b047_complex64_is_exact_and_complex128_is_refused(store: FaultStore, publisher: Publisher) -> None:
    z = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    publisher.publish({"z": z}).wait()
    torch.view_as_real(z)[0, 1] = -0.0
    publisher.publish({"z": z}).wait()
    assert changed_places(store, 1) == {"z": [0]}
    assert read(store, 1)["z"] == Bits("C64", (2,), bytes.fromhex("0000803f 00000080 00000040 00000000"))
    for wide in (z.to(torch.complex128), z.numpy().astype(np.complex128)):
        with pytest.raises(UsageError, match=r"'z'.*complex128"):
            publisher.publish({"z": wide})
    assert len(chain_of(store)) == 2


def test_b056_persistent_buffers_are_published(store: FaultStore, publisher: Publisher) -> None:
    module = nn.BatchNorm1d(4)
    module.register_buffer("scratch", torch.ones(2), persistent=False)
    publisher.publish(module.state_dict()).wait()
    buffers = dict(module.named_buffers())
    buffers["num_batches_tracked"] += 1
    buffers["running_mean"][2] = 0.5
    publisher.publish(module.state_dict()).wait()
    assert changed_places(store, 1) == {"num_batches_tracked": [0], "running_mean": [2]}
    assert sorted(read(store, 1)) == ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"]


def test_every_dtype_and_layout_of_memory(store: FaultStore, publisher: Publisher) -> None:
    torch.manual_seed(1)
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    ]  # fmt: skip

    def state() -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for dtype in dtypes:
            width = torch.empty(0, dtype=dtype).element_size()
            raw = torch.randint(
                0, 2 if dtype is torch.bool else 256, (40, 30 * width), dtype=torch.uint8
            ).view(dtype)
            kind = str(dtype)
            found |= {
                kind: raw,
                f"{kind}.t": raw.t(),
                f"{kind}.strided": raw[3::2, ::3],
                f"{kind}.scalar": raw[0, 0],
            }
        z = found["torch.complex64"]
        return found | {
            "conj": z.conj(),
            "neg": z.conj().imag,
            "flipped": z.real.flip(0),
            "sliced": z[:, 5:9],
        }

    for version in range(3):
        tensors = state()
        publisher.publish(tensors).wait()
        assert_version(store, version, copy_of(tensors))


@pytest.mark.parametrize("repeat", [1, 300, 20_000])
def test_b009_casts_round_to_nearest_even(
    store: FaultStore, publisher_at: Callable[..., Publisher], repeat: int
) -> None:
    publisher = publisher_at(cast={"*": "bfloat16"})
    source = f32(
        0x402DF854, 0xBDCCCCCD, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00008000, 0x00018000, 0x80000000
    )
    wanted = [0x402E, 0xBDCD, 0x3F80, 0x3F82, 0x7F80, 0x0000, 0x0002, 0x8000]
    publisher.publish({"w": source.repeat(repeat), "n": source.repeat(repeat).numpy()}).wait()
    found = read(store, 0)
    assert words(found["w"]) == wanted * repeat
    assert words(found["n"]) == wanted * repeat


@pytest.mark.parametrize("repeat", [1, 400, 30_000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_b010_a_nan_stays_a_nan(
    store: FaultStore, publisher_at: Callable[..., Publisher], repeat: int, dtype: str
) -> None:
    source = f32(0x7F800001, 0xFF800001, 0x7FBFFFFF, 0x3F800000).repeat(repeat)
    publisher_at(cast={"*": dtype}).publish({"w": source}).wait()
    mask = 0x7F80 if dtype == "bfloat16" else 0x7C00
    found = np.frombuffer(read(store, 0)["w"].data, "<u2").reshape(-1, 4)
    assert np.all((found[:, :3] & mask) == mask)
    assert np.all((found[:, :3] & (0x7FFF ^ mask)) != 0)
    assert np.all((found[:, 3] & 0x7FFF) != 0x7FFF)


def test_b010_without_a_cast_nan_payloads_stay(store: FaultStore, publisher: Publisher) -> None:
    source = f32(0x7F800001, 0xFF800001, 0x7FBFFFFF).repeat(5000)
    publisher.publish({"w": source}).wait()
    source[7] = f32(0x7F800002)[0]
    publisher.publish({"w": source}).wait()
    assert read(store, 1)["w"].data == source.numpy().tobytes()
    assert changed_places(store, 1) == {"w": [7]}


def test_what_is_no_tensor_is_refused(store: FaultStore, publisher: Publisher) -> None:
    with pytest.raises(UsageError, match="expected a tensor under the name 'w', found list"):
        publisher.publish({"w": [1, 2]})
    with pytest.raises(UsageError, match="expected a tensor under the name"):
        publisher.publish([torch.zeros(2)])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="pairs, found int"):
        publisher.publish([3])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="sparse"):
        publisher.publish({"w": torch.zeros(3).to_sparse()})
    with pytest.raises(UsageError, match="meta"):
        publisher.publish({"w": torch.zeros(3, device="meta")})
    with pytest.raises(UsageError, match="no tensor to publish"):
        publisher.publish({})
    assert not [k for k in objects_in(store) if k.startswith("versions")]


def test_tensors_that_wrap_others_are_refused(publisher: Publisher) -> None:
    """The bits of a DTensor and its like are not where its address says."""
    wrapped = TwoTensor(torch.zeros(4), torch.ones(4))
    with pytest.raises(UsageError, match="TwoTensor, whose bits lie in other tensors"):
        publisher.publish({"w": wrapped})
    assert publisher.version is None


def test_b026_a_change_in_one_expert_is_told_by_the_fused_tensors_index(
    store: FaultStore, publisher: Publisher
) -> None:
    """Expert 1, row 2, column 1 of [2, 4, 3] is element 19; fused along another axis, C order decides as well."""
    fused = torch.zeros(2, 4, 3, dtype=torch.bfloat16)
    publisher.publish({"experts": fused, "across": fused.permute(1, 0, 2)}).wait()
    fused[1][2, 1] = 1
    publisher.publish({"experts": fused, "across": fused.permute(1, 0, 2)}).wait()
    assert changed_places(store, 1) == {"experts": [19], "across": [2 * 6 + 1 * 3 + 1]}
