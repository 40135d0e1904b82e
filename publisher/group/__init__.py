"""Many writers of one version: every rank publishes its own slices, one commits; no weights pass between ranks."""

from .group import GroupPublisher
from .messenger import Messenger
from .parts import PartWriter, commit_parts
from .torch_messenger import TorchMessenger

__all__ = ["GroupPublisher", "Messenger", "PartWriter", "TorchMessenger", "commit_parts"]
