"""Streams for hooks, and frameworks that stay offline."""

from __future__ import annotations

import os
import uuid

import pytest

os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"})


@pytest.fixture
def root() -> str:
    """A fresh stream in memory."""
    return f"memory://{uuid.uuid4().hex}"
