"""`cast`: old bits as they are overwritten, over any number of steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weightcast.publisher import Publisher
from weightcast.publisher.detectors import stepping
from weightcast.publisher.detectors.cast import Cast
from weightcast.schemas.errors import StorageError

from ...faultstore import FaultStore
from .training import IMPLEMENTATIONS, Reader, Training, has_no_copy, published

Make = Callable[..., Publisher]


def adamw(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda groups: torch.optim.AdamW(groups, lr=1e-5, **options)


def detector_of(publisher: Publisher) -> Cast:
    detector = publisher.detector
    assert isinstance(detector, Cast)
    return detector


def with_masters(publisher_at: Make, reader: Reader) -> tuple[Publisher, Training]:
    """A run that keeps bf16 parameters and fp32 masters, with version 0 published and no copy by now."""
    training = Training(adamw(), half=True)
    publisher = publisher_at(detector="cast", cast={"router": "BF16"})
    publisher.watch(None, training.half)
    for _ in range(2):
        published(publisher, reader, training)
    assert has_no_copy(publisher)
    return publisher, training


def stepped(publisher_at: Make, reader: Reader, make: Callable[..., Any]) -> tuple[Publisher, Training]:
    """A run that keeps fp32 parameters alone."""
    training = Training(make)
    publisher = publisher_at(detector="cast", cast={"*": "BF16"})
    publisher.watch(training.optimizer, training.parameters())
    for _ in range(2):
        published(publisher, reader, training)
    assert has_no_copy(publisher)
    return publisher, training


def cast_all(training: Training) -> None:
    """As trainers do it; `half` is what they publish."""
    pairs = [(training.half[n], p.detach()) for n, p in training.parameters().items()]
    torch._foreach_copy_([t for t, _ in pairs[:3]], [p for _, p in pairs[:3]])
    for target, source in pairs[3:]:
        target.copy_(source)


def test_a_hundred_steps_of_casts(publisher_at: Make, reader: Reader) -> None:
    publisher, training = with_masters(publisher_at, reader)
    changed = 0
    for k in range(100):
        training.step()
        with detector_of(publisher).casting():
            cast_all(training)
        if k % 10 == 0:
            training.router += 0.01
        if k % 3 != 1:  # two steps in one version, now and then
            noted = detector_of(publisher).nbytes
            manifest = published(publisher, reader, training)
            changed += manifest.totals.changed
            assert (
                noted <= 10 * manifest.totals.changed + 10_000
            )  # what changed back, and copies of small tensors
            assert has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])
    assert changed > 300_000


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp32_parameters_alone(
    publisher_at: Make, reader: Reader, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stepped in three parts; the weights are those of a run without a detector."""
    monkeypatch.setattr(stepping, "PART_ELEMENTS", 80_000)
    publisher, training = stepped(publisher_at, reader, adamw(**IMPLEMENTATIONS[implementation]))
    alone = Training(adamw(**IMPLEMENTATIONS[implementation]))
    for _ in range(12):
        for _ in range(2):
            training.step()
            alone.step()
        published(publisher, reader, training)
        assert has_no_copy(publisher)
    for name, parameter in alone.parameters().items():
        assert torch.equal(parameter.view(torch.int32), training.parameters()[name].view(torch.int32))
    assert training.up.grad is not None
    assert training.idle.grad is None
    assert (reader.wrong, reader.resets) == (0, [0])


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
        lambda groups: torch.optim.Adam(groups, lr=1e-4, amsgrad=True),
        lambda groups: torch.optim.Adafactor(groups, lr=1e-3),
    ],
    ids=["SGD", "amsgrad and L2", "Adafactor"],
)
def test_whatever_optimizer_of_torch(publisher_at: Make, reader: Reader, make: Callable[..., Any]) -> None:
    publisher, training = stepped(publisher_at, reader, make)
    for _ in range(5):
        training.step()
        published(publisher, reader, training)
    assert has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])


def test_bf16_parameters_that_an_optimizer_steps(publisher_at: Make, reader: Reader) -> None:
    weight = torch.nn.Parameter(torch.randn(300, 300).bfloat16())
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    publisher = publisher_at(detector="cast")
    publisher.watch(optimizer, {"weight": weight})
    for _ in range(5):
        bits = {"weight": weight.detach().clone().view(torch.uint16).numpy()}
        reader.check(publisher.publish({"weight": weight}).wait(60), bits)
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    assert has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])


def test_casts_through_a_flat_buffer(publisher_at: Make, reader: Reader) -> None:
    """Megatron keeps parameters as views of one buffer, and casts slices of it that cut across them."""
    flat = torch.randn(3 * 70_000).bfloat16()
    tensors = {f"p{i}": flat[70_000 * i + 100 : 70_000 * (i + 1)] for i in range(3)}
    publisher = publisher_at(detector="cast")
    publisher.watch(None, tensors)
    detector = detector_of(publisher)

    def check() -> None:
        bits = {n: t.clone().view(torch.uint16).numpy() for n, t in tensors.items()}
        reader.check(publisher.publish(tensors).wait(60), bits)

    for _ in range(4):
        check()
        masters = torch.randn(len(flat))
        with detector.casting():
            flat[: 70_000 + 50].copy_(masters[: 70_000 + 50])
            flat[70_000 + 50 : 150_000].copy_(masters[70_000 + 50 : 150_000])
        detector.copy_(flat[150_000:], masters[150_000:])
        assert torch.equal(flat.view(torch.int16), masters.bfloat16().view(torch.int16))
    check()
    assert has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])


def test_copies_past_what_is_watched_cost_a_look_at_addresses_alone(
    publisher_at: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no bf16 tensor is watched at all: the list is made once for a block of casts."""
    looks: list[int] = []
    find = Cast._find_places
    monkeypatch.setattr(Cast, "_find_places", lambda detector: looks.append(1) or find(detector))
    publisher = publisher_at(detector="cast", cast={"*": "BF16"})
    publisher.watch(None, {"w": torch.zeros(70_000)})
    others = [torch.zeros(8, dtype=torch.bfloat16) for _ in range(20)]
    with detector_of(publisher).casting():
        for other in others:
            other.copy_(torch.ones(8))
    assert len(looks) == 1
    assert all(bool((other == 1).all()) for other in others)


def test_a_copy_over_some_of_many_neighbours(publisher_at: Make) -> None:
    flat = torch.zeros(40 * 66_000, dtype=torch.bfloat16)
    tensors = {f"p{i}": flat[66_000 * i : 66_000 * (i + 1)] for i in range(40)}
    publisher = publisher_at(detector="cast")
    publisher.watch(None, tensors)
    detector = detector_of(publisher)
    for first, count in ((0, 1), (3, 2), (39, 1), (0, 40)):
        start = flat.data_ptr() + 2 * 66_000 * first
        found = detector._overlapping(start, start + 2 * 66_000 * count)
        assert [tensor.data_ptr() for _, tensor in found] == [start + 2 * 66_000 * i for i in range(count)]
    assert detector._overlapping(flat.data_ptr() - 8, flat.data_ptr()) == []
    past = flat.data_ptr() + 2 * flat.numel()
    assert detector._overlapping(past, past + 8) == []


def test_a_version_that_is_not_committed_loses_nothing(
    publisher_at: Make, reader: Reader, store: FaultStore
) -> None:
    publisher, training = with_masters(publisher_at, reader)
    for attempt in range(3):
        training.step()
        with detector_of(publisher).casting():
            cast_all(training)
        if attempt < 2:
            store.on("put", "data/*", forbidden)
            with pytest.raises(StorageError):
                publisher.publish(training.tensors()).wait(60)
            store.heal()
    published(publisher, reader, training)
    assert has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])


def forbidden(key: str) -> None:
    raise StorageError(f"cannot write {key}: 403")


def test_a_cast_that_nobody_sees(publisher_at: Make, reader: Reader) -> None:
    publisher, training = with_masters(publisher_at, reader)
    training.step()
    cast_all(training)
    manifest = published(publisher, reader, training)
    assert manifest.reset
    assert publisher.detection is not None
    assert "the changes found lead" in publisher.detection.reason
    for _ in range(4):
        training.step()
        with detector_of(publisher).casting():
            cast_all(training)
        published(publisher, reader, training)
    assert has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0, manifest.version])


def test_a_step_with_a_closure_is_not_seen(publisher_at: Make, reader: Reader) -> None:
    publisher, training = stepped(publisher_at, reader, adamw())
    training.gradients()
    training.optimizer.step(lambda: 0.0)
    manifest = published(publisher, reader, training)
    assert manifest.reset
    assert publisher.detection is not None
    assert "closure" in publisher.detection.reason
    assert reader.wrong == 0


def test_refused_with_a_reason(publisher_at: Make, reader: Reader) -> None:
    class Odd(torch.optim.AdamW):
        pass

    training = Training(lambda groups: Odd(groups, lr=1e-4))
    publisher = publisher_at(detector="cast", cast={"*": "BF16"})
    publisher.watch(training.optimizer, training.parameters())
    for _ in range(3):
        published(publisher, reader, training)
        training.step()
    assert publisher.detection is not None
    assert "may not treat each parameter by itself" in publisher.detection.reason
    assert not has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])


def test_a_step_that_fails_leaves_the_gradients(publisher_at: Make, reader: Reader) -> None:
    _, training = stepped(publisher_at, reader, adamw())
    training.gradients()
    gradient = training.embed.grad
    training.optimizer.param_groups[2]["eps"] = None
    with pytest.raises(TypeError):
        training.optimizer.step()
    assert training.embed.grad is gradient


def test_numbers_are_rounded_as_torch_rounds_them(publisher_at: Make) -> None:
    values = torch.cat(
        [torch.randint(-(2**31), 2**31 - 1, (70_000,)).int().view(torch.float32), torch.zeros(1)]
    )
    values[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4e38, 1e-45])
    target = torch.zeros(len(values), dtype=torch.bfloat16)
    publisher = publisher_at(detector="cast")
    publisher.watch(None, {"w": target})
    detector_of(publisher).copy_(target, values)
    expected = values.bfloat16()
    assert torch.equal(target.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(target.view(torch.int16)[kept], expected.view(torch.int16)[kept])
    assert set(target.view(torch.int16)[~kept].tolist()) == {0x7FC0}
