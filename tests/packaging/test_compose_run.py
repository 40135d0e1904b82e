"""The services of docker-compose.yml, run as plain processes.

No container engine is needed: commands, environments, health checks and the order of the start are taken from
the file; host names, ports and mounted folders are mapped to this machine.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from botocore.exceptions import ClientError
from botocore.session import Session
from safetensors import SafetensorError

ROOT = Path(__file__).parents[2]
# Ports of the server's other parts: in the file each container has them for itself.
INNER_PORTS = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port"]
INNER_PORTS += ["filer.port.grpc", "s3.port.grpc"]


def free_ports() -> Iterator[int]:
    """Ports below those that the kernel gives to connections; each test process begins elsewhere."""
    first, count, block = 12_000, 8_000, 20
    for offset in range(count):
        port = first + (os.getpid() * block + offset) % count
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                yield port


class Stack:
    """Starts services of the compose file on this machine, each after what it depends on."""

    def __init__(self, base: Path) -> None:
        document = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
        self.base = base
        self.services: dict[str, dict[str, Any]] = document["services"]
        self.secrets = {
            f"{who}_SECRET": secrets.token_hex(16) for who in ("ADMIN", "PUBLISHER", "SUBSCRIBER")
        }
        ports = free_ports()
        self.ports = {name: next(ports) for name in self.services}
        self.inner_ports = {name: next(ports) for name in INNER_PORTS}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def folder(self, service: str, target: str) -> Path:
        """The local folder that stands for `target` in the service's container."""
        for mount in self.services[service].get("volumes", []):
            source, inner = self._interpolate(mount).split(":")[:2]
            if inner == target:
                name = source.removeprefix("./")
                found = ROOT / name if name == "deploy" else self.base / name
                found.mkdir(parents=True, exist_ok=True)
                return found
        raise KeyError(f"{service} mounts nothing at {target}")

    def log(self, service: str) -> str:
        """The end of what the service wrote."""
        return (self.base / f"{service}.log").read_text("utf-8", "replace")[-6000:]

    def url(self, service: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[service]}{path}"

    def start(self, service: str) -> None:
        """Starts a service and all that it depends on; returns once its health check, if any, passes."""
        if service in self.running:
            return
        for other, rule in self.services[service].get("depends_on", {}).items():
            self.start(other)
            if rule["condition"] == "service_completed_successfully":
                assert self.running[other].wait(60) == 0, self.log(other)
        with (self.base / f"{service}.log").open("wb") as log:
            self.running[service] = subprocess.Popen(
                self._argv(service), env=self._env(service), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if "healthcheck" in self.services[service]:
            self.wait_until(lambda: self.is_healthy(service), 60, f"{service} is healthy")

    def is_healthy(self, service: str) -> bool:
        kind, *check = self.services[service]["healthcheck"]["test"]
        local = [self._local(service, part) for part in check]
        argv = ["/bin/sh", "-c", *local] if kind == "CMD-SHELL" else local
        done = subprocess.run(self._program(argv), env=self._env(service), capture_output=True, timeout=30)
        return done.returncode == 0

    def wait_until(self, happened: Callable[[], bool], limit_s: float, what: str) -> None:
        """Fails, with logs, if it does not happen in time or if a service ends with an error meanwhile."""
        end = time.monotonic() + limit_s
        while not happened():
            for name, process in self.running.items():
                assert process.poll() in (None, 0), f"{name} exited: {self.log(name)}"
            logs = "\n".join(f"--- {name}\n{self.log(name)[-2000:]}" for name in self.running)
            assert time.monotonic() < end, f"not within {limit_s} s: {what}\n{logs}"
            time.sleep(0.5)  # a health check is a process

    def stop(self, service: str, limit_s: float) -> int:
        """Exit code after SIGTERM, as `docker compose stop` would see it."""
        self.running[service].terminate()
        return self.running[service].wait(limit_s)

    def kill(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        for file in Path("/tmp").glob("seaweedfs-*.sock"):
            if {int(n) for n in re.findall(r"\d+", file.name)} & {
                *self.inner_ports.values(),
                *self.ports.values(),
            }:
                file.unlink(missing_ok=True)

    def client(self, user: str) -> Any:
        """An S3 client with the user's credentials."""
        session = Session()
        session.set_credentials(user, self.secrets[f"{user.upper()}_SECRET"])
        return session.create_client("s3", endpoint_url=self.url("storage", ""), region_name="us-east-1")

    def _argv(self, service: str) -> list[str]:
        definition = self.services[service]
        entrypoint = definition.get("entrypoint") or image_entrypoint()
        argv = [self._local(service, str(part)) for part in [*entrypoint, *definition["command"]]]
        if service == "storage":
            argv += [f"-{name}={port}" for name, port in self.inner_ports.items()]
        return self._program(argv)

    def _program(self, argv: list[str]) -> list[str]:
        """The local program for the first word: this Python, or what is installed beside it."""
        if argv[0] == "python":
            return [sys.executable, *argv[1:]]
        found = shutil.which(argv[0], path=search_path())
        assert found, f"{argv[0]} is not installed"
        return [found, *argv[1:]]

    def _env(self, service: str) -> dict[str, str]:
        own = self.services[service].get("environment", {})
        values = {name: self._local(service, str(value)) for name, value in own.items()}
        return {"PATH": search_path(), "HOME": str(self.base), "TMPDIR": str(self.base), **values}

    def _interpolate(self, text: str) -> str:
        """Fills `${NAME:?message}` and `${NAME:-default}` in, as compose does."""
        return re.sub(
            r"\$\{([A-Z_]+)(?::[?]|:-)([^}]*)\}",
            lambda match: self.secrets.get(match[1], match[2]),
            text,
        )

    def _local(self, service: str, text: str) -> str:
        """One pass, so that what was put in is not replaced again."""
        mounts = [mount.split(":")[-2 if mount.endswith(":ro") else -1] for mount in self._mounts(service)]
        table = {
            "storage:8333": f"127.0.0.1:{self.ports['storage']}",
            "127.0.0.1:8333": f"127.0.0.1:{self.ports['storage']}",
            "-s3.port=8333": f"-s3.port={self.ports['storage']}",
            "-ip=storage": "-ip=127.0.0.1",
            "-ip.bind=0.0.0.0": "-ip.bind=127.0.0.1",
            "0.0.0.0:9400": f"127.0.0.1:{self.ports[service]}",
            "127.0.0.1:9400": f"127.0.0.1:{self.ports[service]}",
            **{target: str(self.folder(service, target)) for target in mounts},
        }
        pattern = "|".join(re.escape(word) for word in sorted(table, key=len, reverse=True))
        return re.sub(pattern, lambda match: table[match[0]], self._interpolate(text))

    def _mounts(self, service: str) -> list[str]:
        return [self._interpolate(mount) for mount in self.services[service].get("volumes", [])]


def image_entrypoint() -> list[str]:
    """What the Dockerfile's image runs where the compose file names nothing else."""
    (found,) = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    argv: list[str] = json.loads(found)
    return argv


def search_path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The S3 server and its bucket run; the sidecars are for the test to start."""
    stack = Stack(tmp_path_factory.mktemp("compose"))
    try:
        stack.start("bucket")
        assert stack.running["bucket"].wait(60) == 0, stack.log("bucket")
        yield stack
    finally:
        stack.kill()


def policy(seed: int) -> dict[str, torch.Tensor]:
    """A small model with a bit pattern that a comparison by value would lose, and three dtypes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(64, 96, generator=generator).to(torch.bfloat16)
    weight.view(torch.int16)[0, :3] = torch.tensor([-0x8000, 0x7FC1, 0x7F80 - seed], dtype=torch.int16)
    return {
        "model.embed_tokens.weight": weight,
        "model.norm.weight": torch.linspace(0.5, 1.5 + seed, 96),
        "model.steps": torch.tensor(seed),
    }


def drop_checkpoint(folder: Path, step: int, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a Hugging Face checkpoint the way trainers do: aside, then renamed."""
    aside = folder / f"tmp-checkpoint-{step}"
    aside.mkdir()
    safetensors.torch.save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
    (aside / "config.json").write_text(json.dumps({"model_type": "test"}), "utf-8")
    aside.rename(folder / f"checkpoint-{step}")


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder; nothing while it is being made."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.rglob("*.safetensors"):
        try:
            tensors.update(safetensors.torch.load(file.read_bytes()))
        except (SafetensorError, FileNotFoundError):
            return {}
    return tensors


def refusal(call: Callable[..., Any], **arguments: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    code: str = caught.value.response["Error"]["Code"]
    return code


def test_users_can_do_what_they_need_and_no_more(stack: Stack) -> None:
    publisher, subscriber = stack.client("publisher"), stack.client("subscriber")
    publisher.put_object(Bucket="weights", Key="probe", Body=b"1", IfNoneMatch="*")
    assert subscriber.get_object(Bucket="weights", Key="probe")["Body"].read() == b"1"
    assert [
        entry["Key"] for entry in subscriber.list_objects_v2(Bucket="weights", Prefix="probe")["Contents"]
    ] == ["probe"]
    for key in ("other", "policy/head.json", "policy/versions/000000000001.json", "policy/readers.json"):
        assert refusal(subscriber.put_object, Bucket="weights", Key=key, Body=b"2") == "AccessDenied"
        assert refusal(subscriber.delete_object, Bucket="weights", Key=key) == "AccessDenied"
    subscriber.put_object(Bucket="weights", Key="policy/readers/a.json", Body=b"{}")
    subscriber.delete_object(Bucket="weights", Key="policy/readers/a.json")
    assert refusal(publisher.create_bucket, Bucket="more") == "AccessDenied"
    assert refusal(stack.client("admin").create_bucket, Bucket="more") == "AccessDenied"
    publisher.delete_object(Bucket="weights", Key="probe")
    assert refusal(subscriber.get_object, Bucket="weights", Key="probe") == "NoSuchKey"


def test_bucket_job_can_run_again_and_fails_for_others(stack: Stack) -> None:
    argv, env = stack._argv("bucket"), stack._env("bucket")
    assert subprocess.run(argv, env=env, timeout=60).returncode == 0
    wrong = {**env, "AWS_ACCESS_KEY_ID": "subscriber", "AWS_SECRET_ACCESS_KEY": "wrong"}
    assert subprocess.run(argv, env=wrong, capture_output=True, timeout=60).returncode == 15


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_checkpoints_reach_both_subscribers_bit_for_bit(stack: Stack) -> None:
    watched = stack.folder("publisher", "/checkpoints")
    models = [stack.folder(name, "/model") for name in ("subscriber-a", "subscriber-b")]
    drop_checkpoint(watched, 1, policy(1))
    for name in ("publisher", "subscriber-a", "subscriber-b"):
        stack.start(name)

    first = bits(policy(1))
    stack.wait_until(lambda: all(bits(read_folder(m)) == first for m in models), 60, "both have step 1")
    drop_checkpoint(watched, 2, policy(2))
    second = bits(policy(2))
    stack.wait_until(lambda: all(bits(read_folder(m)) == second for m in models), 60, "both have step 2")

    for name in ("publisher", "subscriber-a", "subscriber-b"):
        assert stack.is_healthy(name)
        assert stack.stop(name, 30) in (0, 130, 143), stack.log(name)
    assert models[0] != models[1]
