"""Servers for tests: a real S3 server (SeaweedFS) shared by all workers of a run, and the moto emulator."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weightcast.benchmarks.lab.seaweed import answers, free_ports, remove_sockets, start

KEY, SECRET, BUCKET = "testkey", "testsecret", "weightcast"
START_SECONDS = 60


@dataclass(frozen=True)
class S3Server:
    """Where a server is and how to get in."""

    port: int
    key: str = KEY
    secret: str = SECRET
    bucket: str = BUCKET

    @property
    def endpoint_url(self) -> str:
        """On the loopback interface."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The AWS variables that lead a client here and nowhere else."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str) -> None:
        """Create a bucket if it is missing."""
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )
        there = client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou
        with contextlib.suppress(*there):
            client.create_bucket(Bucket=name)


@contextmanager
def shared_seaweedfs(folder: Path) -> Iterator[S3Server]:
    """The run's one SeaweedFS, started by whoever comes first.

    Each user holds a shared lock on `users`; a supervisor process stops the server as soon as nobody does,
    however the users ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "start", "w") as start, open(folder / "users", "w") as users:
        fcntl.flock(start, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_SH)
        state = folder / "server.json"
        if not state.exists():
            with open(folder / "supervisor.log", "wb") as log:
                subprocess.Popen(
                    [sys.executable, __file__, str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            _wait(state.exists, f"SeaweedFS, see {folder}")
        fcntl.flock(start, fcntl.LOCK_UN)
        yield S3Server(int(json.loads(state.read_text())["port"]))


def _wait(ready: object, what: str) -> None:
    end = time.monotonic() + START_SECONDS
    while not ready():  # type: ignore[operator]
        if time.monotonic() > end:
            raise RuntimeError(f"{what} did not start in {START_SECONDS} s")
        time.sleep(0.05)


def _can_store(server: S3Server) -> bool:
    """Whether the bucket can be made and written to; volumes come up a moment after the gateway."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )
    try:
        server.make_bucket(BUCKET)
        client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
    except (BotoCoreError, ClientError):
        return False
    return True


def _supervise(folder: Path) -> None:
    """Run SeaweedFS until nobody holds the lock `users`."""
    ports = free_ports("127.0.0.1")
    server = S3Server(ports[-1])
    shutil.rmtree(folder / "data", ignore_errors=True)  # of one that was stopped before another user came
    weed = start(folder, "127.0.0.1", ports, KEY, SECRET)
    state = folder / "server.json"
    try:
        _wait(lambda: answers(server.endpoint_url), "SeaweedFS")
        _wait(lambda: _can_store(server), "SeaweedFS")
        part = folder / "server.json.part"
        part.write_text(json.dumps({"port": server.port, "pid": weed.pid}))
        part.rename(state)
        with open(folder / "users") as users:
            while weed.poll() is None:
                time.sleep(0.25)
                try:
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                state.unlink()
                break
    finally:
        weed.send_signal(signal.SIGKILL)
        weed.wait()
        remove_sockets(ports)


@contextmanager
def moto_server() -> Iterator[S3Server]:
    """The emulator, in this process, on a free port."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        found = S3Server(port)
        found.make_bucket(BUCKET)
        yield found
    finally:
        server.stop()


if __name__ == "__main__":
    _supervise(Path(sys.argv[1]))
