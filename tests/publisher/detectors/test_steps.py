"""What is taken down of an optimizer's steps."""

from __future__ import annotations

import math

import pytest
import torch

from weightcast.publisher.detectors.steps import Rates, Steps, reach, unseen


def optimizer_of(*parameters: torch.nn.Parameter, **options: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **options)  # type: ignore[arg-type]


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(5))
    made.grad = torch.ones(5)
    return made


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.9, 0.95), (0.95, 0.95), (0.0, 0.9)])
def test_no_gradients_move_further_than_the_reach(beta1: float, beta2: float) -> None:
    group = {"lr": 0.1, "betas": (beta1, beta2)}
    for growth in (1.0, beta2 / max(beta1, 0.1), 3.0, 0.5, 1e9):
        mean = square = 0.0
        for t in range(1, 60):
            gradient = growth ** (t if growth < 1e9 else float(t == 59))
            mean = beta1 * mean + (1 - beta1) * gradient
            square = beta2 * square + (1 - beta2) * gradient**2
            moved = 0.1 * mean / (1 - beta1**t) / math.sqrt(square / (1 - beta2**t))
            assert moved <= reach(group) * 1.0001


def test_a_scheduler_says_how_far_the_rate_will_go() -> None:
    optimizer = optimizer_of(parameter(), lr=1e-3)
    constant = reach(optimizer.param_groups[0])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: k / 10)  # begins at 0
    assert optimizer.param_groups[0]["lr"] == 0
    assert reach(optimizer.param_groups[0]) == pytest.approx(constant / 1.25)


def test_parameters_that_step_and_those_that_do_not() -> None:
    first, second = parameter(), parameter()
    optimizer = optimizer_of(first, second, lr=0.1, weight_decay=0.5)
    steps = Steps(optimizer)
    second.grad = None
    optimizer.step()
    step = steps.step_of(first)
    assert step is not None
    assert step.size == pytest.approx(0.1 / (1 - 0.9))
    assert step.root == pytest.approx(math.sqrt(1 - 0.999))
    assert step.decay == float(torch.tensor(1 - 0.1 * 0.5))
    assert steps.step_of(second) is None
    assert steps.most == 1
    steps.forget()
    assert (steps.step_of(first), steps.most) == (None, 0)
    optimizer.step()
    optimizer.step()
    assert steps.most == 2
    steps.close()
    steps.forget()
    optimizer.step()
    assert steps.most == 0


def test_settings_changed_within_a_step_are_a_fault() -> None:
    optimizer = optimizer_of(parameter(), lr=0.1)
    steps = Steps(optimizer)

    def closure() -> float:
        optimizer.param_groups[0]["lr"] = 0.2
        return 0.0

    optimizer.step(closure)
    assert "while it stepped" in steps.fault


def test_the_rates_are_those_of_the_step_and_not_of_later() -> None:
    optimizer = optimizer_of(one := parameter(), lr=0.1)
    steps = Steps(optimizer)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 7.0
    step = steps.step_of(one)
    assert step is not None
    assert step.size == pytest.approx(0.1 / (1 - 0.9))


def test_rates_of_a_tensor() -> None:
    group = {"lr": torch.tensor(0.1), "weight_decay": 0.3, "betas": (0.9, 0.99), "eps": 1e-8}
    rates = Rates.of(group)
    assert rates.decay == float(1 - group["lr"] * 0.3)  # type: ignore[operator]
    assert Rates.of(group | {"fused": True}).decay == float(torch.tensor(1 - float(group["lr"]) * 0.3))  # type: ignore[arg-type]


def test_what_cannot_be_seen() -> None:
    assert unseen(torch.zeros(3)) == ""
    assert unseen(torch.zeros(3, dtype=torch.bfloat16)) == "is bfloat16"
    assert unseen(torch.zeros(3, device="meta")) == "is on meta"
    assert unseen(torch.zeros(4, 4).T) == "is not contiguous"
    assert unseen(torch.zeros(3, dtype=torch.bfloat16), torch.float32, torch.bfloat16) == ""
