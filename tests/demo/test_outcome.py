"""Proofs tell every difference, and the outcome says what was not proved."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace

import pytest
import torch

from weightcast.demo.config import DemoConfig
from weightcast.demo.display import board
from weightcast.demo.outcome import Outcome, Row, SubscriberOutcome
from weightcast.demo.proof import Verdict, compare, prove


def row(version: int, reward: float | None) -> Row:
    return Row(version, version, reward, 1.0, 25, 100, 50, 200, {"a": 0, "b": None})


def outcome(first: float, last: float) -> Outcome:
    rows = [row(0, None), *(row(v, first if v <= 10 else last) for v in range(1, 21))]
    subscriber = SubscriberOutcome("a", 20, "d", 20, 0, Verdict(3, 3, ()), None)
    return Outcome("root", rows, "d", "d", [subscriber], 1.0)


def test_a_proof_is_of_the_bytes_and_not_of_the_values() -> None:
    weights = {"w": torch.tensor([0.0, 1.0], dtype=torch.bfloat16), "n": torch.ones(2, dtype=torch.bfloat16)}
    trainer = prove(3, weights)
    assert trainer.sha256["w"] == hashlib.sha256(bytes([0, 0, 0x80, 0x3F])).hexdigest()
    assert compare(trainer, prove(3, {k: t.clone() for k, t in weights.items()})) == Verdict(2, 2, ())
    negative_zero = weights | {"w": torch.tensor([-0.0, 1.0], dtype=torch.bfloat16)}
    verdict = compare(trainer, prove(3, negative_zero))
    assert (verdict.equal, verdict.tensors) == (1, 2)
    assert verdict.problems[0] == "tensor w does not have the trainer's bytes"
    assert verdict.problems[1].startswith("its state digest is ")


def test_a_proof_tells_missing_tensors_and_another_version() -> None:
    weights = {"w": torch.ones(2, dtype=torch.bfloat16)}
    verdict = compare(prove(3, weights), prove(2, weights | {"extra": torch.zeros(2, dtype=torch.bfloat16)}))
    assert (verdict.equal, verdict.tensors) == (1, 2)
    assert verdict.problems == (
        "tensor extra does not have the trainer's bytes",
        "it holds version 2, the trainer published 3",
    )


def test_what_is_proved_and_what_is_not() -> None:
    good = outcome(0.1, 0.9)
    assert (good.problems, good.rewards, good.wire_bytes, good.dense_bytes) == ([], (0.1, 0.9), 1000, 4000)
    assert "from 0.50 to 0.55" in outcome(0.5, 0.55).problems[0]
    assert "the last manifest says e" in replace(good, committed="e").problems[0]
    bad = replace(good.subscribers[0], verdict=Verdict(2, 3, ("tensor w is bad",)))
    assert replace(good, subscribers=[bad]).problems == ["subscriber a: tensor w is bad"]


@pytest.mark.parametrize(
    ("steps", "script"), [(64, (19, 22, 54)), (24, (7, 10, 20)), (6, (2, 5, 5)), (2, (1, 1, 1))]
)
def test_the_script_ends_before_the_last_step(steps: int, script: tuple[int, int, int]) -> None:
    config = DemoConfig(steps=steps)
    assert (config.kill_step, config.restart_step, config.rejoin_step) == script


def test_lines_for_a_pipe_and_a_table_for_a_terminal() -> None:
    pipe = io.StringIO()
    with board(pipe) as plain:
        plain.add(row(7, 0.5))
        plain.note("hello")
    line = "version 7  step 7  reward 0.500  changed 25.0 %  wire 0 KiB  x less 4.0  lag a 0  lag b -"
    assert pipe.getvalue() == f"{line}\nhello\n"
    terminal = Terminal()
    with board(terminal) as live:
        for version in range(30):
            live.add(row(version, 0.5))
        live.note("hello")
    last = terminal.getvalue().rpartition("version")[2]
    assert "25.0 %" in last
    assert "hello" in last
    assert [n for n in range(30) if f"\n{n:7} " in last.replace("\r", "")] == list(range(15, 30))


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True
