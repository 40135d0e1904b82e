"""docs/cli.md about the two commands that pass their options on: demo and bench."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from weightcast.benchmarks.__main__ import main as bench
from weightcast.cli.status import command as status
from weightcast.demo.config import DemoConfig
from weightcast.demo.outcome import Outcome, Return, Row, SubscriberOutcome
from weightcast.demo.proof import Verdict
from weightcast.demo.run import Options, _tell, command

from ..cli.test_json import allowed, observed

TEXT: Final = (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8")


def section(name: str) -> str:
    """What is under a command's heading."""
    match = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def options_in(text: str) -> set[str]:
    """The options of a section's table."""
    return set(re.findall(r"^\| `(--[\w-]+)", text, re.MULTILINE))


def test_options_of_demo() -> None:
    own = {p.opts[0]: p for p in command.params if p.opts[0].startswith("--")}
    shared = {parameter.opts[0] for parameter in status.params}  # the store's, and --json
    assert options_in(section("demo")) == (own.keys() - shared) | {"--json"}
    assert f"| {DemoConfig().steps} |" in section("demo")


def test_options_of_bench(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench(["--help"])
    shown = set(re.findall(r"^ +(--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    assert options_in(section("bench")) == shown


def outcome() -> Outcome:
    """A run in which everything that may be there is there once, and missing once."""
    rows = [
        Row(0, 0, None, None, 100, 100, 50, 200, {"a": None, "b": 0}),
        Row(1, 1, 0.5, 1.0, 25, 100, 50, 200, {"a": 0, "b": 1}),
    ]
    lived = SubscriberOutcome("a", 1, "d", 20, 0, Verdict(3, 3, ()), None)
    killed = replace(lived, name="b", returned=Return(1, 2, 3.5, 4), verdict=Verdict(3, 2, ("w is bad",)))
    return Outcome("root", rows, "d", "d", [lived, killed], 1.0)


def test_json_of_demo(capsys: pytest.CaptureFixture[str]) -> None:
    _tell(outcome(), kept=True, options=Options(json_output=True))
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    match = re.search(r"^```json-keys demo --json\n(.*?)^```$", section("demo"), re.MULTILINE | re.DOTALL)
    assert match is not None
    keys = dict(line.split(": ", 1) for line in match[1].splitlines())
    seen = observed(document, keys)
    assert seen.keys() == keys.keys()
    for key, types in seen.items():
        assert types <= allowed(keys[key]), key
