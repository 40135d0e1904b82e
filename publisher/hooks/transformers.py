"""Hugging Face `Trainer`, and TRL's trainers, which are made from it: a callback that publishes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback

from weightcast.manifest.staleness import Stamp
from weightcast.publisher.checkpoint import is_companion
from weightcast.publisher.group import GroupPublisher
from weightcast.publisher.publisher import Publisher
from weightcast.publisher.sources import Tensors
from weightcast.schemas.errors import UsageError
from weightcast.schemas.settings import PublisherSettings

from .outlet import GroupOutlet, Outlet, outlet_of
from .whole import check_sharding

MAX_TEXT: Final = 256
"""Characters of one logged text that go into a version's metadata, which has room for 64 KiB."""


def checkpoint_tensors(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """The tensors that `model.save_pretrained` would write, under the names that it gives them, second names included.

    Where a model holds weights in another form than its checkpoints (stacked experts), they are converted: that takes
    memory for those. Of a sharded model they would have to be gathered.

    Raises:
        UsageError: the model is sharded, and some of its weights would have to be converted.
    """
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    if not isinstance(model, PreTrainedModel):
        return state
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 a model held what its checkpoints hold
        return state
    held = {id(tensor) for tensor in state.values()}
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    for name, tensor in converted.items():
        if isinstance(tensor, DTensor) and id(tensor) not in held:
            raise UsageError(
                f"the checkpoint's {name!r} is another form of what this sharded model holds, and would be gathered",
                hint="give tensors=lambda model: model.state_dict() for the trainer's own names, or publish the "
                "checkpoints that the trainer saves (weightcast publish --watch)",
            )
    return converted


class WeightcastCallback(TrainerCallback):  # type: ignore[misc]  # the library is not seen by type checks
    """Publishes the model at the start of training, after every so many steps, and at the end.

    One process publishes, the trainer's main one; of a model that is sharded as DTensors (FSDP2) each rank its own,
    and nothing is gathered. A version carries the trainer's global step, and as metadata the epoch and what was logged
    last; the first one config and tokenizer too.

    Args:
        stream: URL or path of the stream; or an open publisher, which stays the caller's: a `GroupPublisher` where the
            model is sharded, else a `Publisher`.
        every: steps between two versions.
        files: whether to send config and tokenizer along.
        tensors: what to publish of the model.
        settings: how to publish; from the environment and defaults if not given.

    Raises:
        UsageError: at the start of training, in all processes: the model is sharded otherwise (FSDP1, ZeRO-3, tensor
            parallel without DTensors), or is an adapter on another.
    """

    def __init__(
        self,
        stream: str | Publisher | GroupPublisher,
        *,
        every: int = 1,
        files: bool = True,
        tensors: Callable[[torch.nn.Module], Tensors] = checkpoint_tensors,
        settings: PublisherSettings | None = None,
    ) -> None:
        if every < 1:
            raise UsageError(f"every is {every}, expected at least 1 step")
        self._every = every
        self._files = files
        self._tensors = tensors
        self._stream = stream
        self._settings = settings
        self._outlet: Outlet | GroupOutlet | None = None
        self._published: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Refuse what cannot be published, and publish what training starts from."""
        self._check(found["model"])
        files = None
        if self._files and state.is_world_process_zero:
            files = companions(found["model"], found.get("processing_class")) or None
        self._publish(state, found["model"], files)

    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Publish, if it is time to."""
        if state.global_step % self._every == 0:
            self._publish(state, found["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Publish the outcome, unless it is published, and wait until it is committed."""
        if self._published != state.global_step:
            self._publish(state, found["model"])
        if self._outlet is not None:
            self._outlet.close()

    def stamp(self, timeout_s: float | None = None) -> Stamp | None:
        """The stamp of the last version, once it is committed; None if this process published none."""
        return self._outlet.stamp(timeout_s) if self._outlet is not None else None

    def _check(self, model: torch.nn.Module) -> None:
        check_sharding(model)
        if self._tensors is checkpoint_tensors and hasattr(model, "peft_config"):
            raise UsageError(
                "the model is an adapter on another, and engines load merged weights",
                hint="give tensors=, a function that merges; TRL's weight_transfer merges by itself",
            )

    def _publish(self, state: Any, model: torch.nn.Module, files: Mapping[str, bytes] | None = None) -> None:
        sharded = check_sharding(model)
        self._published = state.global_step
        if self._outlet is None:  # on all ranks: they refuse an open publisher of the other kind together
            self._outlet = outlet_of(self._stream, self._settings, group=sharded)
        if not sharded and not state.is_world_process_zero:
            return
        self._outlet.publish(
            self._tensors(model), step=state.global_step, metadata=metadata_of(state), files=files
        )


def metadata_of(state: Any) -> dict[str, Any]:
    """Epoch and last log of a trainer's state, as far as they are plain finite values."""
    log = state.log_history[-1] if state.log_history else {}
    known = {"epoch": state.epoch, **{str(name): value for name, value in log.items()}}
    return {"trainer": {name: _plain(value) for name, value in known.items() if _is_plain(value)}}


def _is_plain(value: object) -> bool:
    return isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value))


def _plain(value: Any) -> Any:
    return value[:MAX_TEXT] if isinstance(value, str) else value


def companions(model: torch.nn.Module, processing_class: Any = None) -> dict[str, bytes]:
    """Config, generation config and tokenizer files, by name, as they would be saved."""
    with TemporaryDirectory(prefix="weightcast-") as folder:
        parts = (getattr(model, "config", None), getattr(model, "generation_config", None), processing_class)
        for part in parts:
            if part is not None and hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        return {p.name: p.read_bytes() for p in Path(folder).iterdir() if is_companion(p.name)}
