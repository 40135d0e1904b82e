"""What users install: the wheel, the sdist, a checkout, an editable checkout."""

from __future__ import annotations

import email
import json
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .conftest import Distributions, Environment

ROOT = Path(__file__).parents[2]
WHERE = "import importlib, json; print(json.dumps({n: importlib.import_module(n).__file__ for n in %r}))"


def sources(packages: dict[str, str]) -> set[str]:
    """Paths in a wheel that the checkout's package folders call for."""
    return {
        f"weightcast/{path.relative_to(ROOT).as_posix()}"
        for folder in packages.values()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and (path.suffix == ".py" or path.name == "py.typed")
    }


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_source_file_and_nothing_else(
    distributions: Distributions, packages: dict[str, str]
) -> None:
    ours = {name for name in wheel_names(distributions.wheel) if ".dist-info/" not in name}
    assert ours == sources(packages)


def test_every_package_is_typed_and_the_namespace_stays_open(
    distributions: Distributions, packages: dict[str, str]
) -> None:
    names = wheel_names(distributions.wheel)
    assert {f"{name.replace('.', '/')}/py.typed" for name in packages} <= names
    assert "weightcast/__init__.py" not in names


def test_metadata(distributions: Distributions, project: dict[str, Any]) -> None:
    with zipfile.ZipFile(distributions.wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(path))
        licence = archive.read(path.replace("METADATA", "licenses/LICENSE")).decode()
    assert metadata["Name"] == "weightcast"
    assert metadata["Version"] == project["project"]["version"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "END OF TERMS AND CONDITIONS" in licence
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(required) == sorted(project["project"]["dependencies"])


def test_sdist_holds_the_sources_but_not_the_tests(
    distributions: Distributions, packages: dict[str, str]
) -> None:
    with tarfile.open(distributions.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.removeprefix("weightcast/") for name in sources(packages)} <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith(("tests", "out", "build", ".venv"))]


def test_wheel_imports_from_another_folder(packages: dict[str, str], installed: Environment) -> None:
    found = json.loads(installed.eval(WHERE % sorted(packages)))
    assert found == {
        name: str(installed.purelib / name.replace(".", "/") / "__init__.py") for name in packages
    }


def test_wheel_installs_the_command(installed: Environment) -> None:
    assert (installed.folder / "bin" / "weightcast").stat().st_mode & 0o111
    code = (
        "from importlib.metadata import entry_points as e; print(e(name='weightcast')['weightcast'].load())"
    )
    assert "main" in installed.eval(code)


@pytest.mark.parametrize("package", ["schemas"])
def test_pure_packages_do_not_import_torch(installed: Environment, package: str) -> None:
    modules = [f"weightcast.{package}.{path.stem}" for path in (ROOT / package).glob("[!_]*.py")]
    assert modules
    code = (
        f"import importlib, sys; list(map(importlib.import_module, {modules})); print('torch' in sys.modules)"
    )
    assert installed.eval(code) == "False"


def test_checkout_installs(checkout: Path, packages: dict[str, str], environment: Environment) -> None:
    environment.install(checkout)
    found = json.loads(environment.eval(WHERE % sorted(packages)))
    assert all(Path(file).is_relative_to(environment.purelib) for file in found.values())


def test_strict_editable_install_follows_edits(
    checkout: Path, packages: dict[str, str], environment: Environment
) -> None:
    environment.install("--editable", checkout, "--config-settings", "editable_mode=strict")
    found = json.loads(environment.eval(WHERE % sorted(packages)))
    assert {name: Path(file).resolve() for name, file in found.items()} == {
        name: checkout / folder / "__init__.py" for name, folder in packages.items()
    }
    with (checkout / "codec" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write("\nEDITED = 7\n")
    assert environment.eval("import weightcast.codec; print(weightcast.codec.EDITED)") == "7"
