"""Fixtures for all tests: stores of every kind, real servers, a proxy that fails on demand."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weightcast.manifest.store import Store, StoreSettings, open_store

from .faultproxy import FaultProxy
from .servers import S3Server, shared_seaweedfs
from .servers import moto_server as run_moto

collect_ignore = ["vllm"]
"""Needs an environment of its own: `make test-vllm`."""


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with one bucket. Shared by all workers: use a random prefix."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with shared_seaweedfs(shared / "seaweedfs") as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """The S3 emulator with one bucket. Not atomic: never a witness for create-only."""
    with run_moto() as server:
        yield server


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Server], None]:
    """Points the AWS environment of this test, and of its child processes, to a server."""

    def point(server: S3Server) -> None:
        for name in [n for n in os.environ if n.startswith(("AWS_", "FSSPEC_"))]:
            monkeypatch.delenv(name)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)

    return point


@pytest.fixture
def s3_url(request: pytest.FixtureRequest, aws: Callable[[S3Server], None]) -> str:
    """A fresh root on the real S3 server; the environment leads there."""
    server: S3Server = request.getfixturevalue("seaweedfs")
    aws(server)
    return f"s3://{server.bucket}/{uuid.uuid4().hex}"


@pytest.fixture(params=["memory", "local", "moto", "seaweedfs"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path, aws: Callable[[S3Server], None]) -> str:
    """A fresh root on each kind of store."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    if request.param == "local":
        return f"file://{tmp_path}/store"
    if request.param == "seaweedfs":
        return str(request.getfixturevalue("s3_url"))
    server: S3Server = request.getfixturevalue("moto_server")
    aws(server)
    return f"s3://{server.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def make_store(store_url: str) -> Callable[..., Store]:
    """Opens a store: by default at `store_url`, with settings given by name, or with everything `open_store`
    takes.
    """

    def make(url: str | None = None, *, pacing: Any = None, filesystem: Any = None, **settings: Any) -> Store:
        root = store_url if url is None else url
        return open_store(root, settings=StoreSettings(**settings), pacing=pacing, filesystem=filesystem)

    return make


@pytest.fixture
def fault_proxy(seaweedfs: S3Server) -> Iterator[FaultProxy]:
    """A proxy in front of the real S3 server. Give its `endpoint_url` to a store's settings."""
    with FaultProxy("127.0.0.1", seaweedfs.port) as proxy:
        yield proxy
