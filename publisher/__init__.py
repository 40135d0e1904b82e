"""From a trainer's tensors to a committed version."""

from weightcast.manifest.store import StoreSettings, open_store
from weightcast.schemas.settings import PublisherSettings

from .job import PendingVersion
from .publisher import Publisher

__all__ = ["PendingVersion", "Publisher", "PublisherSettings", "StoreSettings", "open_store"]
