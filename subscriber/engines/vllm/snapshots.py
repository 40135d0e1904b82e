"""A layer as it is, kernel state included, to be put back."""

from __future__ import annotations

from typing import Any

import torch


class Snapshot:
    """Everything that a layer and its quantisation method refer to, and its tensors' contents.

    What a kernel packed is referred to by the layer and never written by a reload, which packs anew; parameters and
    buffers are written, so these are copied.

    Args:
        layer: a module without modules below it that hold tensors of their own.
        contents: False if nothing will be written into the tensors that are there: no copy is made of them.
    """

    def __init__(self, layer: Any, *, contents: bool = True) -> None:
        self._layer = layer
        self._owners = [layer, getattr(layer, "quant_method", None)]
        self._states = [_state(owner) for owner in self._owners]
        tensors = [*layer._parameters.values(), *layer._buffers.values()]
        self._tensors = [
            (t, t.detach().clone() if contents else None, dict(vars(t))) for t in tensors if t is not None
        ]

    def restore(self) -> None:
        """Put everything back. May be called again after another change."""
        from vllm.model_executor.model_loader.reload.layerwise import (  # type: ignore[import-not-found,unused-ignore]
            get_layerwise_info,
        )

        get_layerwise_info(self._layer).reset()
        for owner, state in zip(self._owners, self._states, strict=True):
            if owner is not None:
                vars(owner).clear()
                vars(owner).update(_copied(state))
        with torch.no_grad():
            for tensor, content, attributes in self._tensors:
                vars(tensor).clear()
                vars(tensor).update(attributes)
                if content is not None:
                    tensor.data.copy_(content)


def _state(owner: Any) -> dict[str, Any]:
    return {} if owner is None else _copied(vars(owner))


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Its containers too, since registering a parameter changes them in place."""
    return {key: value.copy() if isinstance(value, dict | set) else value for key, value in state.items()}
