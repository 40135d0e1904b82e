"""A server over a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcast.subscriber.engines.vllm import endpoint, plan, versions
from weightcast.subscriber.engines.vllm.copies import Copies

from .fake import TOKEN, Client, Server, served


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a server; and the folder for files."""
    folder = tmp_path / "stage"
    monkeypatch.setenv("WEIGHTCAST_STAGE", str(folder))
    monkeypatch.setenv("WEIGHTCAST_TOKEN", TOKEN)
    monkeypatch.delenv("WEIGHTCAST_VLLM_REMOTE", raising=False)
    monkeypatch.setattr(endpoint, "current", lambda: versions.supported("0.32.0"))
    monkeypatch.setattr(endpoint, "engine_version", lambda: "0.32.0")
    monkeypatch.setattr(plan, "find_copies", lambda model: Copies((), {}))  # tries layers that are vLLM's
    return folder


@pytest.fixture
def server(stage: Path) -> Iterator[Server]:
    """Two tensor-parallel ranks that hold version 0, and no plan yet."""
    with served(stage, Client(tp=2)) as found:
        yield found
