"""What each step of an optimizer really was: watched from its hooks, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

LR_GROWTH: Final = 1.25
"""How much larger the learning rate of the next step may be, unless a scheduler has said what it starts from.

One that grows more leaves open elements that were not noted, and so one whole version."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one parameter, in the words of `kernels`."""

    mean: torch.Tensor
    square: torch.Tensor
    decay: float
    size: float
    root: float
    eps: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What a group has set: copied, since schedulers change it between steps."""

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Rates:
        """Those of `group`, with the decay factor as its step computes it."""
        lr, decay = group["lr"], 1.0
        if group["weight_decay"] != 0:
            # A learning rate that is a tensor has the loops compute in fp32; the fused kernel takes its value.
            exact = lr if isinstance(lr, torch.Tensor) and not group.get("fused") else float(lr)
            decay = float(np.float32(float(1 - exact * group["weight_decay"])))
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return cls(float(lr), decay, (beta1, beta2), float(group["eps"]))

    def step(self, number: float, state: Mapping[str, Any]) -> Step:
        """The step that led to `state` and had this number."""
        beta1, beta2 = self.betas
        size, root = self.lr / (1 - beta1**number), (1 - beta2**number) ** 0.5
        return Step(state["exp_avg"], state["exp_avg_sq"], self.decay, size, root, self.eps)


def reach(group: Mapping[str, Any]) -> float:
    """What the next step may move an element by, besides decay.

    The quotient of bias-corrected moments is largest for gradients that grow by beta2 / beta1 a step; by the
    Cauchy-Schwarz inequality it is at most (1 - beta1) / sqrt(1 - beta2) / sqrt(1 - beta1^2 / beta2).
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr = max(float(group["lr"]) * LR_GROWTH, float(group.get("initial_lr", 0.0)))
    if not beta1**2 < beta2 < 1:
        return lr * 2 / math.sqrt(max(1 - beta2, 1e-8))
    return lr * max(1.0, (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)))


def refusal(optimizer: torch.optim.Optimizer) -> str:
    """Why steps of `optimizer` cannot be undone; empty if they can."""
    kind = type(optimizer)
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) or kind.step not in (
        torch.optim.Adam.step,
        torch.optim.AdamW.step,
    ):
        return f"{kind.__module__}.{kind.__qualname__} is not torch.optim.AdamW"
    for number, group in enumerate(optimizer.param_groups):
        for flag in ("amsgrad", "capturable", "differentiable"):
            if group.get(flag):
                return f"group {number} of {kind.__name__} has {flag}=True"
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        if group["weight_decay"] != 0 and not decoupled:
            return f"group {number} of {kind.__name__} adds its weight decay to the gradients (L2)"
    return ""


def unseen(tensor: torch.Tensor, *dtypes: torch.dtype) -> str:
    """Why the values of a tensor of these dtypes (default: fp32) cannot be read where they are; empty if they can."""
    if bool(is_traceable_wrapper_subclass(tensor)):
        return f"is a {type(tensor).__name__}"
    if tensor.dtype not in (dtypes or (torch.float32,)):
        return f"is {str(tensor.dtype).removeprefix('torch.')}"
    if not tensor.is_cpu or tensor.is_meta:
        return f"is on {tensor.device}"
    return "" if tensor.is_contiguous() else "is not contiguous"


class Steps:
    """The steps of one optimizer since `forget`.

    Attributes:
        most: the largest number of steps of one parameter.
        fault: why a step cannot be told, if one cannot.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.fault = ""
        self.most = 0
        self._steps: dict[int, Step] = {}
        self._begun: list[Rates] | None = None
        self._numbers: dict[int, float] = {}
        self._groups = self._by_parameter()
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def step_of(self, parameter: torch.Tensor) -> Step | None:
        """The step that `parameter` has made; None if none."""
        return self._steps.get(id(parameter))

    def group_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """The group that `parameter` is in; None if it is in none."""
        return self._groups.get(id(parameter))

    def forget(self) -> None:
        """What was stepped so far is published."""
        self._steps, self.most, self.fault = {}, 0, ""

    def complete(self) -> None:
        """See a step whose own hook has not been called yet: another of its hooks may be who publishes."""
        if self._begun is not None:
            self._after(self.optimizer)
        self._groups = self._by_parameter()  # loading a state replaces them

    def _by_parameter(self) -> dict[int, dict[str, Any]]:
        return {id(p): group for group in self.optimizer.param_groups for p in group["params"]}

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.fault = self.fault or refusal(optimizer)
        if not self.fault:
            self._begun = [Rates.of(group) for group in optimizer.param_groups]
            self._numbers = {id(p): self._number(p) for g in optimizer.param_groups for p in g["params"]}

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        begun, self._begun = self._begun, None
        for group, rates in zip(optimizer.param_groups, begun or [], strict=False):
            if Rates.of(group) != rates:
                self.fault = "a group's settings were changed while it stepped"
            for parameter in group["params"]:
                before, number = self._numbers.get(id(parameter), 0.0), self._number(parameter)
                if number != before:  # a parameter without gradient, or a skipped step, stays where it is
                    self._add(parameter, number - before, rates.step(number, optimizer.state[parameter]))

    def _add(self, parameter: torch.Tensor, steps: float, step: Step) -> None:
        again = id(parameter) in self._steps
        self.most = max(self.most, 2 if again or steps != 1 else 1)
        for moment in (step.mean, step.square):
            if unseen(moment) or moment.numel() != parameter.numel():
                self.fault = (
                    self.fault or f"a moment of the optimizer {unseen(moment) or 'has another shape'}"
                )
        self._steps[id(parameter)] = step

    def _number(self, parameter: torch.Tensor) -> float:
        state = self.optimizer.state.get(parameter)
        return float(state["step"]) if state and "step" in state else 0.0
