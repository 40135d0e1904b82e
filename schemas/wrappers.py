"""From a trainer's parameter names to checkpoint names.

The rule: parts that wrappers add are removed. `_orig_mod`, `_fsdp_wrapped_module` and `_checkpoint_wrapped_module` are
removed wherever they stand, since no model uses such names itself; `module` only at the front (before or between
those), since a model may well have a submodule of that name. Two names that become one are an error.
"""

from __future__ import annotations

from typing import Final

from .errors import UsageError

_ANYWHERE: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_IN_FRONT: Final = "module"


def checkpoint_name(name: str) -> str:
    """`name` without the parts that wrappers added.

    >>> checkpoint_name("module._orig_mod.layers.0._fsdp_wrapped_module.mlp.weight")
    'layers.0.mlp.weight'
    """
    if "module" not in name and "_orig_mod" not in name:
        return name
    parts = [p for p in name.split(".") if p not in _ANYWHERE]
    while len(parts) > 1 and parts[0] == _IN_FRONT:
        parts = parts[1:]
    return ".".join(parts)


class NameMap:
    """Maps names one by one and refuses the second that lands on a taken one."""

    def __init__(self) -> None:
        self._origin: dict[str, str] = {}

    def __call__(self, original: str) -> str:
        """The checkpoint name of `original`.

        Raises:
            UsageError: another original has the same checkpoint name; names all three.
        """
        name = checkpoint_name(original)
        taken = self._origin.setdefault(name, original)
        if taken != original:
            raise UsageError(
                f"tensors {taken!r} and {original!r} would both be published as {name!r}",
                hint="publish only one of them",
            )
        return name
