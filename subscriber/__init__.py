"""From a committed version to changed weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from weightcast.manifest.store import StoreSettings, open_store
    from weightcast.schemas.settings import SubscriberSettings

    from .engines.sglang import SglangServer
    from .engines.vllm_server import VllmServer
    from .folder import CheckpointFolder
    from .folder_locks import reading
    from .progress import Status
    from .subscriber import Subscriber
    from .target import Mark, Target
    from .tensors import Tensors

__all__ = [
    "CheckpointFolder",
    "Mark",
    "SglangServer",
    "Status",
    "StoreSettings",
    "Subscriber",
    "SubscriberSettings",
    "Target",
    "Tensors",
    "VllmServer",
    "open_store",
    "reading",
]

_WHERE: Final = {
    "CheckpointFolder": ".folder",
    "Mark": ".target",
    "SglangServer": ".engines.sglang",
    "Status": ".progress",
    "StoreSettings": "weightcast.manifest.store",
    "Subscriber": ".subscriber",
    "SubscriberSettings": "weightcast.schemas.settings",
    "Target": ".target",
    "Tensors": ".tensors",
    "VllmServer": ".engines.vllm_server",
    "open_store": "weightcast.manifest.store",
    "reading": ".folder_locks",
}


def __getattr__(name: str) -> object:
    """Import on first use: a rollout server needs neither stores nor folders of this package, a folder no torch."""
    if name in _WHERE:
        return getattr(import_module(_WHERE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
