"""Documents name files that exist, architecture.md names every module, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = (
    "benchmarks",
    "cli",
    "codec",
    "demo",
    "manifest",
    "mapping",
    "publisher",
    "schemas",
    "subscriber",
)
FOLDERS: Final = (*PACKAGES, "tests", "docs", "deploy", ".ci")
BY_FOLDER: Final = ("benchmarks", "benchmarks/lab", "benchmarks/parts", "demo", "manifest/inspect")
"""Packages that architecture.md may name as a whole."""

DOCUMENTS: Final = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
BLOCK: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE: Final = re.compile(r"`([^`\n]+)`")
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """A document without its code blocks."""
    return BLOCK.sub("", text)


def named_files(text: str) -> set[str]:
    """What the prose names, in backquotes, as files or folders of this repository."""
    found = CODE.findall(prose(text))
    starts = tuple(f"{folder}/" for folder in FOLDERS)
    return {name for name in found if re.fullmatch(r"[\w./-]+", name) and name.startswith(starts)} | {
        name for name in found if re.fullmatch(r"[\w./-]+\.py", name)
    }


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_counts_as_a_named_file() -> None:
    text = "`cli/main.py` and `tests/docs/`, `gone.py`, `files/{sha256}`, `a b`\n```\n`cli/none.py`\n```\n"
    assert named_files(text) == {"cli/main.py", "tests/docs/", "gone.py"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_files_exist(path: Path) -> None:
    named = named_files(path.read_text("utf-8"))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_module_is_in_architecture() -> None:
    named = named_files((ROOT / "docs" / "architecture.md").read_text("utf-8"))
    assert {f"{folder}/" for folder in BY_FOLDER} <= named
    modules = {
        str(path.relative_to(ROOT)): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if str(path.parent.relative_to(ROOT)) not in BY_FOLDER
    }
    assert len(modules) > 80
    # A package's __init__ that only says what its folder is for needs no line.
    missing = [name for name in modules if name not in named and not name.endswith("/__init__.py")]
    assert sorted(missing) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    broken = []
    for link in LINK.findall(prose(path.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        found = target.exists() and (not anchor or anchor in anchors(target.read_text("utf-8")))
        broken += [] if found else [link]
    assert broken == []
