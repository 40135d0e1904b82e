"""Layers are reloaded only if they follow, and are left as they were by the trial."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.subscriber.engines.vllm.copies import find_copies, refresh
from weightcast.subscriber.engines.vllm.dense import judge, reload

from . import fake_layers as fake
from .fake_layers import (
    CONFIG,
    Model,
    Packed,
    PackedBeside,
    PackedOnce,
    PackedOnceBeside,
    UnquantizedLinearMethod,
)

REPACKED = "the kernel packed it"


@pytest.fixture(autouse=True)
def layers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fake.install(patch)
        yield


def packed(out: UnquantizedLinearMethod | None = None) -> Model:
    return fake.started(Model(Packed(), out or Packed(), PackedBeside()), fake.weights(0))


def refused(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, REPACKED)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_b200_packed_layers_are_reloaded_whole_again_and_again() -> None:
    model = packed()
    before = model.outputs()
    found = judge(model, CONFIG, refused("qkv.0", "qkv.1", "out"), fake.weights(0).__getitem__)
    assert (found.dense, found.refused, found.differing) == (refused("qkv.0", "qkv.1", "out"), {}, ())
    assert equal(model.outputs(), before)
    for version in (1, 2, 1):
        reload(model, CONFIG, found.dense, fake.weights(version).__getitem__)
        fresh = fake.started(Model(Packed(), Packed(), PackedBeside()), fake.weights(version))
        assert equal(model.outputs()[:, :14], fresh.outputs()[:, :14])  # qkv and out
        assert equal(model.outputs()[:, 14:], before[:, 14:])  # the head and the experts were not named


def test_b203_buffers_of_other_layers_are_not_touched() -> None:
    model = packed()
    for layer in (model, model.head):
        layer.register_buffer("scale", torch.tensor([0.0188]), persistent=False)
    judge(model, CONFIG, refused("qkv.0", "qkv.1", "out"), fake.weights(0).__getitem__)
    reload(model, CONFIG, ["qkv.0", "qkv.1", "out"], fake.weights(1).__getitem__)
    assert [buffer.item() for buffer in model.buffers()] == [torch.tensor(0.0188).item()] * 2


def test_a_trial_with_another_version_says_so_and_changes_nothing() -> None:
    model = packed()
    before = model.outputs()
    source = fake.weights(0) | {"out": fake.weights(1)["out"]}
    found = judge(model, CONFIG, refused("qkv.0", "qkv.1", "out"), source.__getitem__)
    assert found.dense == refused("qkv.0", "qkv.1", "out")
    assert found.differing == ("out",)
    assert equal(model.outputs(), before)


def test_b198_a_layer_that_the_reload_leaves_stale_is_refused_by_name() -> None:
    model = packed(out=PackedOnce())
    before = model.outputs()
    found = judge(model, CONFIG, refused("qkv.0", "qkv.1", "out"), fake.weights(0).__getitem__)
    assert found.dense == refused("qkv.0", "qkv.1")
    assert found.refused == {
        "out": f"{REPACKED}; out: the engine's reload leaves its kernel with other weights"
    }
    assert equal(model.outputs(), before)


def test_part_of_a_fused_layer_is_refused() -> None:
    model = packed()
    before = model.outputs()
    found = judge(model, CONFIG, refused("qkv.1", "out"), fake.weights(0).__getitem__)
    assert found.dense == refused("out")
    assert found.refused["qkv.1"].endswith(
        "qkv: the engine's reload failed: qkv: 24 of 48 elements were loaded"
    )
    assert equal(model.outputs(), before)
    with pytest.raises(Corrupt, match="24 of 48 elements were loaded"):
        reload(model, CONFIG, ["qkv.1"], fake.weights(1).__getitem__)
    assert equal(model.outputs(), before)


def test_experts_have_no_layer_that_can_be_tried() -> None:
    model = packed()
    before = model.outputs()
    found = judge(model, CONFIG, refused("experts"), fake.weights(1).__getitem__)
    assert found.refused == {"experts": f"{REPACKED}; no layer that can be reloaded alone takes it"}
    assert equal(model.outputs(), before)  # the loader wrote nothing, although it could have
    with pytest.raises(UsageError, match="experts"):
        reload(model, CONFIG, ["experts"], fake.weights(1).__getitem__)


def test_tied_layers_are_not_tried() -> None:
    model = packed()
    model.head.weight = model.experts
    found = judge(model, CONFIG, refused("head"), fake.weights(0).__getitem__)
    assert found.refused == {"head": f"{REPACKED}; head: its weights are tied to another layer's"}


def test_a_reload_that_left_a_kernel_stale_is_noticed() -> None:
    model = packed(out=PackedOnce())
    with pytest.raises(Corrupt, match="out: the engine's reload left its kernel with other weights"):
        reload(model, CONFIG, ["out"], fake.weights(1).__getitem__)


def test_values_that_say_nothing_do_not_hide_a_sound_layer() -> None:
    source = fake.weights(0)
    source["out"][2, 3], source["out"][4, 1] = float("nan"), -0.0
    model = fake.started(Model(Packed(), Packed(), PackedBeside()), source)
    assert judge(model, CONFIG, refused("out"), source.__getitem__).dense == refused("out")


def test_copies_beside_a_parameter_are_found_and_packed_again() -> None:
    model = fake.started(
        Model(UnquantizedLinearMethod(), UnquantizedLinearMethod(), PackedBeside()), fake.weights(0)
    )
    before = model.outputs()
    found = find_copies(model)
    assert (found.refresh, found.refused) == (("head",), {})
    assert equal(model.outputs(), before)
    model.head.weight.data.copy_(fake.weights(1)["head"])
    assert equal(model.outputs(), before)  # the write alone does not reach the kernel
    refresh(model, found.refresh)
    x = torch.eye(6, dtype=torch.bfloat16)
    assert torch.equal(model.head(x).t(), fake.weights(1)["head"])


def test_copies_that_cannot_be_packed_again_are_refused_by_all_their_names() -> None:
    model = fake.started(Model(UnquantizedLinearMethod(), Packed(), PackedOnceBeside()), fake.weights(0))
    vars(model.head)["kernel"] = lambda x, bias: x @ fake.weights(0)["head"].t()
    model.register_parameter("tied", model.head.weight)
    found = find_copies(model)
    reason = "the kernel of head computes with a copy of it"
    assert (found.refresh, found.refused) == ((), {"head.weight": reason, "tied": reason})


def test_a_copy_that_did_not_follow_is_noticed() -> None:
    model = fake.started(Model(UnquantizedLinearMethod(), Packed(), PackedOnceBeside()), fake.weights(0))
    model.head.weight.data.copy_(fake.weights(1)["head"])
    with pytest.raises(Corrupt, match="head: the kernel's copy is not what was written"):
        refresh(model, ["head"])


def test_weights_that_others_were_computed_from_are_refused() -> None:
    model = fake.started(
        Model(UnquantizedLinearMethod(), UnquantizedLinearMethod(), UnquantizedLinearMethod()),
        fake.weights(0),
    )
    latent = torch.nn.Module()
    latent.add_module("up", model.qkv)
    vars(latent)["W_UV"] = torch.zeros(2, 2)
    vars(latent)["process_weights_after_loading"] = print
    model.add_module("latent", latent)
    reason = "latent computed W_UV from its weights at load time"
    assert find_copies(model).refused == {"qkv.weight": reason, "latent.up.weight": reason}
