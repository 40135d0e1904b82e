"""An optimizer's step in parts, so that old bits are at hand for the parameters of one part at a time.

A trainer that keeps fp32 parameters alone has no moment at which old and new bits of all of them exist. Optimizers pass
over parameters without a gradient, and torch's treat each by itself: so the step is made for a few parameters at once,
with the gradients of all others out of sight, and these few are compared. What comes out is bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from .kernels import Bits

if TYPE_CHECKING:
    from .cast import Cast

PART_ELEMENTS: Final = 1 << 23
"""Elements stepped at once: 16 MiB of old bits. A larger tensor is a part of its own."""

Gradients = list[tuple[torch.Tensor, torch.Tensor]]


def refusal(optimizer: torch.optim.Optimizer) -> str:
    """Why steps of `optimizer` cannot be made in parts; empty if they can."""
    kind = type(optimizer)
    if kind.__module__.split(".")[:2] != ["torch", "optim"] or isinstance(optimizer, torch.optim.LBFGS):
        return f"{kind.__module__}.{kind.__qualname__} may not treat each parameter by itself"
    return ""


class Stepping:
    """Makes the steps of one optimizer in parts, from its own hooks: the step itself then finds nothing left to do."""

    def __init__(self, optimizer: torch.optim.Optimizer, cast: Cast, watched: set[int]) -> None:
        self._cast = cast
        self._watched = watched
        self._hidden: Gradients = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Leave the optimizer alone."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        step: Callable[[torch.optim.Optimizer], object] | None = getattr(
            type(optimizer).step, "__wrapped__", None
        )
        if refusal(optimizer) or step is None or len(args) > 1 or kwargs:
            self._cast.fault = refusal(optimizer) or "an optimizer's step was given a closure"
            return
        self._hidden = [
            (p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        try:
            for parameter, _ in self._hidden:
                parameter.grad = None
            for part in _parts(self._hidden):
                self._step(lambda: step(optimizer), part)
        except BaseException:
            self._after(optimizer)
            raise

    def _step(self, step: Callable[[], object], part: Gradients) -> None:
        olds: list[tuple[torch.Tensor, Bits]] = []
        for parameter, gradient in part:
            if id(parameter) in self._watched:
                olds.append((parameter, self._cast.bits(parameter)))
            parameter.grad = gradient
        step()
        for parameter, _ in part:
            parameter.grad = None
        for parameter, before in olds:
            self._cast.compare(parameter, before)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            parameter.grad = gradient


def _parts(gradients: Gradients) -> Iterator[Gradients]:
    """Cut into parts of at most `PART_ELEMENTS`, or of one parameter."""
    part: Gradients = []
    size = 0
    for parameter, gradient in gradients:
        if part and size + parameter.numel() > PART_ELEMENTS:
            yield part
            part, size = [], 0
        part.append((parameter, gradient))
        size += parameter.numel()
    if part:
        yield part
