"""From a committed version to changed weights."""

from typing import TYPE_CHECKING

from weightcast.manifest.store import StoreSettings, open_store
from weightcast.schemas.settings import SubscriberSettings

from .folder import CheckpointFolder
from .folder_locks import reading
from .progress import Status
from .subscriber import Subscriber
from .target import Mark, Target

if TYPE_CHECKING:
    from .tensors import Tensors

__all__ = [
    "CheckpointFolder",
    "Mark",
    "Status",
    "StoreSettings",
    "Subscriber",
    "SubscriberSettings",
    "Target",
    "Tensors",
    "open_store",
    "reading",
]


def __getattr__(name: str) -> object:
    if name == "Tensors":  # needs torch, which a folder's subscriber does not
        from .tensors import Tensors

        return Tensors
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
