"""The distributions, built once, and environments to install them into. Nothing here asks a package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(*argv: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in argv],
        cwd=cwd,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=100,
    )
    if done.returncode:
        pytest.fail(f"{argv} exited with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees this one's dependencies, but has a weightcast of its own or none."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def purelib(self) -> Path:
        return self.folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"

    def install(self, *what: str | Path) -> None:
        """`pip install WHAT`, offline."""
        pip: list[str | Path] = [
            sys.executable,
            "-P",
            "-m",
            "pip",
            "--python",
            self.python,
            "install",
            "--quiet",
        ]
        run(
            *pip,
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--ignore-installed",
            *what,
            cwd=self.folder,
        )

    def eval(self, code: str) -> str:
        """What `code` prints, run in a folder that holds nothing of ours."""
        return run(self.python, "-P", "-c", code, cwd=self.folder).strip()


@pytest.fixture(scope="session")
def project() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="session")
def packages(project: dict[str, Any]) -> dict[str, str]:
    """Import name to folder, e.g. `weightcast.codec` to `codec`."""
    folders: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
    return folders


@pytest.fixture
def checkout(tmp_path: Path, packages: dict[str, str]) -> Path:
    """A copy of the sources and tests, as a clone would have them."""
    return copy_checkout(tmp_path / "checkout", packages.values())


def copy_checkout(target: Path, folders: Iterable[str]) -> Path:
    target.mkdir()
    junk = shutil.ignore_patterns("__pycache__", ".*")
    for folder in {*(f.split("/")[0] for f in folders), "tests", "docs", "deploy", "examples"}:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, target / folder, ignore=junk)
    for file in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / file, target / file)
    return target


@dataclass(frozen=True)
class Distributions:
    sdist: Path
    wheel: Path


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory, packages: dict[str, str]) -> Distributions:
    """An sdist of the checkout, and a wheel built from nothing but that sdist."""
    base = tmp_path_factory.mktemp("distributions")
    source = copy_checkout(base / "checkout", packages.values())
    run(sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", base / "dist", source, cwd=base)
    (sdist,) = (base / "dist").glob("*.tar.gz")
    (wheel,) = (base / "dist").glob("*.whl")
    return Distributions(sdist, wheel)


def new_environment(folder: Path) -> Environment:
    """An empty environment on top of this one's dependencies."""
    environment = Environment(folder)
    run(sys.executable, "-P", "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    # A folder that a .pth file names is searched; .pth files in it (editable installs) are not followed.
    found = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    dependencies = [str(folder) for folder in found if not (folder / "weightcast").exists()]
    (environment.purelib / "deps.pth").write_text("\n".join(dependencies), "utf-8")
    return environment


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An empty one."""
    return new_environment(tmp_path / "environment")


@pytest.fixture(scope="session")
def installed(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """One with the wheel; not to be changed."""
    found = new_environment(tmp_path_factory.mktemp("installed") / "environment")
    found.install(distributions.wheel)
    return found
