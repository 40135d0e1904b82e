"""The project's own files agree with each other."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pinned}


def test_constraints_pin_every_dependency_within_its_range(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["gcs"], *extras["azure"], *extras["dev"]]
    pinned = pins()
    for requirement in map(Requirement, wanted):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_constraints_hold_on_every_platform() -> None:
    pinned = pins()
    assert {name: version for name, version in pinned.items() if version.local} == {}
    assert [name for name in pinned if re.match(r"nvidia|cuda|triton|weightcast", name)] == []


def test_every_package_folder_is_listed(project: dict[str, Any], packages: dict[str, str]) -> None:
    assert sorted(packages) == sorted(project["tool"]["setuptools"]["packages"])
    # Not through out/, which may be changing meanwhile.
    ours = [path for path in ROOT.iterdir() if path.is_dir() and _is_ours(path)]
    with_code = {path.parent for folder in ours for path in folder.glob("**/__init__.py")}
    assert {str(path.relative_to(ROOT)) for path in with_code} == set(packages.values())


def _is_ours(path: Path) -> bool:
    top = path.relative_to(ROOT).parts[0]
    return not top.startswith(".") and top not in {"tests", "build", "out", "dist", "examples", "docs"}


def test_make_installs_and_tests_what_pyproject_lists(packages: dict[str, str]) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (line,) = re.findall(r"^PACKAGES := (.*)$", makefile, re.MULTILINE)
    assert set(line.split()) == {folder.split("/")[0] for folder in packages.values()}


def test_make_help_names_the_targets() -> None:
    # Without the flags of a `make test` around us.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make", "help"], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    targets = re.findall(r"^  make ([a-z]+)", done.stdout, re.MULTILINE)
    assert {"demo", "test", "lint", "bench", "dev", "format", "clean"} <= set(targets)
