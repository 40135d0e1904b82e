"""Sees copies into watched tensors, whoever makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from .cast import Cast


class Casting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands copies into tensors that a detector watches to it; all else goes its way."""

    def __init__(self, cast: Cast) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cast = cast

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `TorchDispatchMode`."""
        if func is torch.ops.aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        if func is torch.ops.aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._copy(target, source)
            return None
        return func(*args, **(kwargs or {}))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._cast.sees(target):
            self._cast.copy_(target, source)
        else:
            target.copy_(source)
