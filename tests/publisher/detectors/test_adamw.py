"""`adamw`: old bits from the last step alone, exact or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from weightcast.publisher import Publisher
from weightcast.publisher.detectors.adamw import AdamW
from weightcast.publisher.detectors.steps import Rates
from weightcast.schemas.errors import StorageError, UsageError

from ...faultstore import FaultStore
from ...versions import objects_in, state_at
from .training import IMPLEMENTATIONS, Reader, Training, has_no_copy, published

Make = Callable[..., Publisher]


def adamw(lr: float = 1e-5, **options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda groups: torch.optim.AdamW(groups, lr=lr, **options)


@pytest.fixture
def begun(publisher_at: Make, reader: Reader) -> tuple[Publisher, Training]:
    """A run of which versions 0 and 1 are published, without a copy by now."""
    training = Training(adamw())
    publisher = publisher_at(detector="adamw", cast={"*": "BF16"})
    publisher.watch(training.optimizer, training.parameters())
    published(publisher, reader, training)
    training.step()
    published(publisher, reader, training)
    assert has_no_copy(publisher)
    return publisher, training


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_hundred_steps(publisher_at: Make, reader: Reader, implementation: str) -> None:
    training = Training(adamw(**IMPLEMENTATIONS[implementation]))
    publisher = publisher_at(detector="adamw", cast={"*": "BF16"})
    publisher.watch(training.optimizer, training.parameters())
    published(publisher, reader, training)
    changed = 0
    for k in range(100):
        training.step()
        if k % 10 == 0:
            training.router += 0.01
        changed += published(publisher, reader, training).totals.changed
        assert has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])
    assert changed > 300_000
    detector = publisher.detector
    assert isinstance(detector, AdamW)
    assert (
        detector.nbytes < 32 + 2 * 250_000 / 500
    )  # the router's copy, and two thousandths of a snapshot: `zeros` has most of it


def fall_back_and_recover(publisher: Publisher, training: Training, reader: Reader) -> str:
    """Publish what is there now, which must become a whole version; then go on until no copy is kept again. Why it was."""
    manifest = published(publisher, reader, training)
    assert manifest.reset
    assert reader.resets == [0, manifest.version]
    assert publisher.detection is not None
    assert publisher.detection.fallbacks == 1
    for _ in range(4):
        training.step()
        published(publisher, reader, training)
    assert has_no_copy(publisher)
    assert reader.wrong == 0
    assert reader.resets == [0, manifest.version]
    return publisher.detection.reason


def test_a_learning_rate_taken_down_one_percent_off(
    begun: tuple[Publisher, Training], reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, training = begun
    exact = Rates.step
    with monkeypatch.context() as patch:
        patch.setattr(
            Rates, "step", lambda rates, *at: replace(exact(rates, *at), size=exact(rates, *at).size * 1.01)
        )
        training.step()
    assert "are open" in fall_back_and_recover(publisher, training, reader)


def test_two_steps_at_once(begun: tuple[Publisher, Training], reader: Reader) -> None:
    publisher, training = begun
    training.step()
    training.step()
    assert (
        fall_back_and_recover(publisher, training, reader)
        == "there was more than one step since the last version"
    )


@pytest.mark.parametrize("placeholder", [False, True])
def test_a_version_made_whole_must_cover_the_one_before(
    begun: tuple[Publisher, Training], reader: Reader, placeholder: bool
) -> None:
    publisher, training = begun
    training.step()
    training.step()
    less = training.tensors()
    del less["norm"]
    if placeholder:
        less["norm"] = torch.empty(0)
    with pytest.raises(UsageError, match="'norm'"):
        publisher.publish(less)
    manifest = published(publisher, reader, training)
    assert manifest.reset
    with pytest.raises(UsageError, match="'norm'"):
        publisher.publish(less)


def test_steps_published_in_pairs_keep_a_copy(publisher_at: Make, reader: Reader) -> None:
    training = Training(adamw())
    publisher = publisher_at(detector="adamw", cast={"*": "BF16"})
    publisher.watch(training.optimizer, training.parameters())
    published(publisher, reader, training)
    for _ in range(5):
        training.step()
        training.step()
        published(publisher, reader, training)
        assert not has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])


@pytest.mark.parametrize("name", ["embed", "frozen", "norm"])
def test_a_parameter_edited_by_hand(begun: tuple[Publisher, Training], reader: Reader, name: str) -> None:
    publisher, training = begun
    training.step()
    with torch.no_grad():
        training.parameters()[name].view(-1)[7] *= 1.5
    assert "the changes found lead" in fall_back_and_recover(publisher, training, reader)


def test_weights_and_state_reloaded(begun: tuple[Publisher, Training], reader: Reader) -> None:
    publisher, training = begun
    weights = {n: p.detach().clone() for n, p in training.parameters().items()}
    state = copy.deepcopy(training.optimizer.state_dict())
    training.step()
    published(publisher, reader, training)
    training.optimizer.load_state_dict(state)
    with torch.no_grad():
        for name, parameter in training.parameters().items():
            parameter.copy_(weights[name])
    training.step()
    assert "are open" in fall_back_and_recover(publisher, training, reader)


def test_moments_reloaded_before_a_step_do_no_harm(begun: tuple[Publisher, Training], reader: Reader) -> None:
    publisher, training = begun
    state = copy.deepcopy(training.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].mul_(3)
    training.optimizer.load_state_dict(state)
    for _ in range(3):
        training.step()
        published(publisher, reader, training)
    assert (reader.wrong, reader.resets) == (0, [0])
    assert has_no_copy(publisher)


def test_a_rate_that_leaps_leaves_open_elements(begun: tuple[Publisher, Training], reader: Reader) -> None:
    publisher, training = begun
    for group in training.optimizer.param_groups:
        group["lr"] = 0.05  # of 1e-5
    training.gradients()
    training.optimizer.step()
    assert "are open" in fall_back_and_recover(publisher, training, reader)


def test_a_step_that_an_overflow_skips(begun: tuple[Publisher, Training], reader: Reader) -> None:
    publisher, training = begun
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for k in range(6):
        training.gradients()
        assert training.embed.grad is not None
        for parameter in training.parameters().values():
            if parameter.grad is not None:
                parameter.grad *= scaler.get_scale()
        if k % 2:
            training.embed.grad[0, 0] = torch.inf
        scaler.scale(torch.zeros(()))
        scaler.step(training.optimizer)
        scaler.update()
        changed = published(publisher, reader, training).totals.changed
        assert (changed == 0) == bool(k % 2)
    assert (reader.wrong, reader.resets) == (0, [0])
    assert has_no_copy(publisher)


def test_an_overflow_that_the_fused_step_skips_itself(publisher_at: Make, reader: Reader) -> None:
    training = Training(adamw(fused=True))
    publisher = publisher_at(detector="adamw", cast={"*": "BF16"})
    publisher.watch(training.optimizer, training.parameters())
    published(publisher, reader, training)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for k in range(6):
        training.gradients()
        assert training.embed.grad is not None
        if k % 2:
            training.embed.grad[0, 0] = torch.inf
        scaler.scale(torch.zeros(()))
        scaler.step(training.optimizer)
        scaler.update()
        changed = published(publisher, reader, training).totals.changed
        assert (changed == 0) == bool(k % 2)
    assert (reader.wrong, reader.resets) == (0, [0])
    assert has_no_copy(publisher)


def test_nothing_stepped_is_an_empty_version(begun: tuple[Publisher, Training], reader: Reader) -> None:
    publisher, training = begun
    assert published(publisher, reader, training).totals.changed == 0
    training.step()
    published(publisher, reader, training)
    assert (reader.wrong, reader.resets) == (0, [0])


def test_a_version_that_is_not_committed(
    begun: tuple[Publisher, Training], reader: Reader, store: FaultStore
) -> None:
    publisher, training = begun
    training.step()
    store.on("put", "data/*", forbidden)
    with pytest.raises(StorageError):
        publisher.publish(training.tensors()).wait(60)
    store.heal()
    training.step()
    assert "not committed" in fall_back_and_recover(publisher, training, reader)


def forbidden(key: str) -> None:
    raise StorageError(f"cannot write {key}: 403")


def test_a_stream_taken_up_again(
    begun: tuple[Publisher, Training], reader: Reader, publisher_at: Make
) -> None:
    publisher, training = begun
    publisher.close()
    training.step()
    again = publisher_at(detector="adamw", cast={"*": "BF16"}, fence=False)
    again.watch(training.optimizer, training.parameters())
    published(again, reader, training)
    assert not has_no_copy(again)  # what the store gave is compared with once
    training.step()
    published(again, reader, training)
    assert has_no_copy(again)
    assert (reader.wrong, reader.resets) == (0, [0])


def test_a_snapshot_is_read_from_the_store(
    begun: tuple[Publisher, Training], reader: Reader, store: FaultStore
) -> None:
    publisher, training = begun
    training.step()
    bits = training.bits()
    manifest = publisher.publish(training.tensors()).wait(60)
    publisher.snapshot()
    assert "snapshots/000000000002/manifest.json" in objects_in(store)
    read = state_at(store, manifest.version)
    assert all((read.memory.tensor(s.name) == bits[s.name]).all() for s in read.layout.stored)


def test_tensors_that_are_missing_or_new(begun: tuple[Publisher, Training], reader: Reader) -> None:
    publisher, training = begun
    training.step()
    less = training.tensors()
    del less["norm"]
    with pytest.raises(UsageError, match="'norm'"):
        publisher.publish(less)
    published(publisher, reader, training)
    assert reader.resets == [0]
    more = training.tensors() | {"value_head": torch.ones(9)}
    manifest = publisher.publish(more).wait(60)
    assert manifest.reset
    reader.check(
        manifest, training.bits() | {"value_head": torch.ones(9).bfloat16().view(torch.uint16).numpy()}
    )
    assert reader.wrong == 0


def test_an_iterable_is_published_whole(begun: tuple[Publisher, Training], reader: Reader) -> None:
    publisher, training = begun
    bits = training.bits()
    manifest = publisher.publish(iter(training.tensors().items())).wait(60)
    reader.check(manifest, bits)
    assert (manifest.reset, reader.wrong) == (True, 0)


@pytest.mark.parametrize("first", ["watch", "hook"])
def test_a_version_published_from_within_a_step(publisher_at: Make, reader: Reader, first: str) -> None:
    """Whichever hook of the optimizer comes first."""
    training = Training(adamw())
    publisher = publisher_at(detector="adamw", cast={"*": "BF16"})
    if first == "watch":
        publisher.watch(training.optimizer, training.parameters())
    training.optimizer.register_step_post_hook(lambda *_: void(published(publisher, reader, training)))
    if first == "hook":
        publisher.watch(training.optimizer, training.parameters())
    for _ in range(5):
        training.step()
    assert (reader.wrong, reader.resets) == (0, [0])
    assert has_no_copy(publisher)


def void(_: object) -> None:
    """A hook of an optimizer returns nothing."""


REFUSED: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "amsgrad": (adamw(amsgrad=True), "amsgrad=True"),
    "L2": (lambda groups: torch.optim.Adam(groups, lr=1e-4), "L2"),
    "SGD": (lambda groups: torch.optim.SGD(groups, lr=1e-2), "torch.optim.sgd.SGD is not torch.optim.AdamW"),
    "Adafactor": (lambda groups: torch.optim.Adafactor(groups, lr=1e-2), "Adafactor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(publisher_at: Make, reader: Reader, name: str) -> None:
    make, reason = REFUSED[name]
    training = Training(make)
    publisher = publisher_at(detector="adamw", cast={"*": "BF16"})
    publisher.watch(training.optimizer, training.parameters())
    assert publisher.detection is not None
    assert reason in publisher.detection.reason
    published(publisher, reader, training)
    for _ in range(3):
        training.step()
        published(publisher, reader, training)
        assert not has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])


def test_adam_without_weight_decay_and_maximize(publisher_at: Make, reader: Reader) -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam([g | {"weight_decay": 0.0} for g in groups], lr=1e-4, maximize=True)

    training = Training(make)
    publisher = publisher_at(detector="adamw", cast={"*": "BF16"})
    publisher.watch(training.optimizer, training.parameters())
    published(publisher, reader, training)
    for _ in range(5):
        training.step()
        published(publisher, reader, training)
    assert has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])


def test_bf16_parameters_and_moments_are_copied(publisher_at: Make, reader: Reader) -> None:
    weight = torch.nn.Parameter(torch.randn(300, 300).bfloat16())
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    publisher = publisher_at(detector="adamw")
    publisher.watch(optimizer, {"weight": weight})
    for _ in range(4):
        bits = {"weight": weight.detach().clone().view(torch.uint16).numpy()}
        reader.check(publisher.publish({"weight": weight}).wait(60), bits)
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    assert publisher.wait_idle(60)
    assert publisher.detector is not None
    assert publisher.detector.nbytes == 2 * weight.numel()
    assert (reader.wrong, reader.resets) == (0, [0])


def test_fp32_masters_of_bf16_parameters(publisher_at: Make, reader: Reader) -> None:
    training = Training(adamw(), half=True)
    publisher = publisher_at(detector="adamw", cast={"router": "BF16"})
    publisher.watch(training.optimizer, training.parameters())
    published(publisher, reader, training)
    for _ in range(5):
        training.step()
        for name, master in training.parameters().items():
            training.half[name].copy_(master.detach())
        published(publisher, reader, training)
    assert has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])


def test_a_learning_rate_that_is_a_tensor(publisher_at: Make, reader: Reader) -> None:
    weight = torch.nn.Parameter(torch.randn(300, 300))
    lr = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.3)
    publisher = publisher_at(detector="adamw", cast={"*": "BF16"})
    publisher.watch(optimizer, {"weight": weight})
    for _ in range(8):
        bits = {"weight": weight.detach().bfloat16().view(torch.uint16).numpy().copy()}
        reader.check(publisher.publish({"weight": weight}).wait(60), bits)
        lr.mul_(0.9)
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    assert has_no_copy(publisher)
    assert (reader.wrong, reader.resets) == (0, [0])
