"""The JSON output of every command against docs/cli.md: each documented key with its type, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightcast.schemas.manifest import Reader

from .. import sample
from .conftest import Outcome

DOC = Path(__file__).parents[2] / "docs" / "cli.md"
BLOCK = re.compile(r"^```json-keys (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

Cli = Callable[..., Outcome]


def contract(name: str) -> dict[str, str]:
    """Documented keys of a command, with their types."""
    blocks = dict(BLOCK.findall(DOC.read_text("utf-8")))
    return dict(line.split(": ", 1) for line in blocks[name].splitlines())


def observed(document: Any, keys: dict[str, str]) -> dict[str, set[str]]:
    """Keys of a document, with the types that occur."""
    found: dict[str, set[str]] = {}

    def walk(value: Any, path: str) -> None:
        for name, item in value.items():
            key = f"{path}{name}"
            found.setdefault(key, set()).add(type_of(item))
            if isinstance(item, dict) and any(k.startswith(f"{key}.") for k in keys):
                walk(item, f"{key}.")
            elif isinstance(item, list) and item and isinstance(item[0], dict):
                for element in item:
                    walk(element, f"{key}[].")

    walk(document, "")
    return found


def type_of(value: Any) -> str:
    """The documented name of a JSON value's type."""
    if isinstance(value, list):
        return f"array of {type_of(value[0])}" if value else "array"
    names = {
        type(None): "null",
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        dict: "object",
    }
    return names[type(value)]


def allowed(documented: str) -> set[str]:
    """Types that fit a documented one: an empty array fits any, a whole number is a number."""
    types = set(documented.split(" or "))
    if any(t.startswith("array") for t in types):
        types.add("array")
    return types | ({"integer"} if "number" in types else set())


def check(name: str, *documents: Any) -> None:
    """Together the documents have exactly the documented keys, each of a documented type."""
    keys = contract(name)
    seen: dict[str, set[str]] = {}
    for document in documents:
        for key, types in observed(document, keys).items():
            seen.setdefault(key, set()).update(types)
    assert seen.keys() == keys.keys()
    for key, types in seen.items():
        assert types <= allowed(keys[key]), key
    top = {k for k in keys if "." not in k}
    assert all(document.keys() == top for document in documents)


@pytest.fixture
def pruned(copy: Path, cli: Cli) -> Path:
    """A stream with a reader's lease, damage, and pruned data."""
    store = sample.reader_of(copy).store
    store.put(
        f"readers/{'ab' * 16}.json", Reader(reader="ab" * 16, version=4, time="2026-01-01T00:00:00Z").encode()
    )
    return copy


def test_every_command_is_documented() -> None:
    from weightcast.cli.main import COMMANDS

    text = DOC.read_text("utf-8")
    blocks = {name for name, _ in BLOCK.findall(text)}
    assert blocks == (COMMANDS.keys() - {"demo", "bench"}) | {"error", "verify_engine"}
    for name in COMMANDS:
        assert re.search(rf"^## (\w+, )?{name}\b", text, re.MULTILINE), name


def test_every_option_is_documented() -> None:
    import importlib

    from weightcast.cli.main import COMMANDS

    text = DOC.read_text("utf-8")
    for name in COMMANDS.keys() - {"demo", "bench"}:
        for parameter in importlib.import_module(f"weightcast.cli.{name}").command.params:
            for option in parameter.opts:
                if option.startswith("--"):
                    assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"{name} {option}"


def test_log(root: Path, cli: Cli) -> None:
    check("log", cli("log", root, "--json").json)


def test_show(root: Path, cli: Cli) -> None:
    documents = [cli("show", root, v, "--tensors", "--json").json for v in range(sample.VERSIONS)]
    check("show", *documents, cli("show", root, 1, "--json").json)
    assert documents[1]["metadata"] == {"loss": 0.5}


def test_diff(root: Path, cli: Cli) -> None:
    check("diff", cli("diff", root, 0, 4, "--json").json, cli("diff", root, 4, 0, "--json").json)


def test_status(pruned: Path, cli: Cli) -> None:
    check("status", cli("status", pruned, "--json").json)


def test_verify(pruned: Path, cli: Cli) -> None:
    sample.shard_path(pruned, 1).unlink()
    outcome = cli("verify", pruned, "--json")
    check("verify", outcome.json, cli("verify", pruned, "--deep", "--json").json)
    assert (outcome.code, outcome.json["ok"]) == (14, False)


def test_snapshot(copy: Path, cli: Cli) -> None:
    first, second = cli("snapshot", copy, "--json").json, cli("snapshot", copy, "--json").json
    check("snapshot", first, second)
    assert (first["version"], first["written"], second["written"]) == (4, True, False)
    assert cli("verify", copy, "--deep", "--json").json["snapshots"] == 3


def test_prune(pruned: Path, cli: Cli) -> None:
    planned = cli("prune", pruned, "--keep", 1, "--dry-run", "--json").json
    done = cli("prune", pruned, "--keep", 1, "--grace", 0, "--json").json
    check("prune", planned, done)
    assert (planned["floor"], planned["deleted"], done["floor"]) == (3, 0, 3)
    assert done["deleted"] == len(planned["deletions"]) > 0
    assert cli("status", pruned, "--json").json["floor"] == 3


def test_doctor(root: Path, tmp_path: Path, cli: Cli) -> None:
    here, elsewhere = cli("doctor", root, "--json"), cli("doctor", tmp_path / "new", "--json")
    check("doctor", here.json, elsewhere.json)
    assert (here.code, here.json["usable"], here.json["problems"]) == (0, True, [])
    assert (here.json["stream"] is None, elsewhere.json["stream"]) == (False, None)


def test_pull(root: Path, tmp_path: Path, cli: Cli) -> None:
    document = cli("pull", root, tmp_path / "out", "--json").json
    check("pull", document)
    assert sorted(document["files"]) == sorted(p.name for p in (tmp_path / "out").iterdir())


def test_subscribe(root: Path, tmp_path: Path, cli: Cli, copy: Path) -> None:
    check("subscribe", cli("subscribe", copy, "--into", tmp_path / "model", "--once", "--json").json)


def test_publish(tmp_path: Path, checkpoints: Path, cli: Cli) -> None:
    first, second = (
        cli("publish", tmp_path / "s", checkpoints / f"checkpoint-{step}", "--json").json for step in (0, 10)
    )
    check("publish", first, second)


def test_error(tmp_path: Path, cli: Cli) -> None:
    outcome = cli("log", tmp_path / "nothing", "--json")
    check("error", outcome.json)
    assert (outcome.code, outcome.json["error"]["kind"]) == (10, "not_found")
