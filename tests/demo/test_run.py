"""The demo with real processes: it proves what it says, says so when it cannot, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weightcast.demo.config import DemoConfig
from weightcast.demo.learner import Learner
from weightcast.demo.run import Options, demo, main
from weightcast.manifest.rebuild import rebuild
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher
from weightcast.schemas.errors import WeightcastError

HERE = Path(__file__).parent
TINY = DemoConfig(
    steps=24, digits=2, base=4, width=64, mlp_width=128, learning_rate=2e-3, prompts=16, poll_s=0.02, down=2
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo and its processes put what is temporary; its processes are told by it, too."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_orphans(temporary: Path) -> Iterator[None]:
    """Whatever a test does, no process of its demo outlives it by more than a moment."""
    yield
    assert wait_until(lambda: not processes(temporary)), processes(temporary)


def processes(temporary: Path) -> list[int]:
    """Rollout processes that inherited this test's TMPDIR."""
    mark, found = f"TMPDIR={temporary}\0".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"worker" in (folder / "cmdline").read_bytes() and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has just ended
            continue
    return found


def leftovers(temporary: Path) -> list[Path]:
    """What the demo left there; torch keeps a folder of its own beside it."""
    return list(temporary.glob("weightcast-demo-*"))


def wait_until(what: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    end = time.monotonic() + timeout_s
    while not what() and time.monotonic() < end:
        time.sleep(0.02)
    return what()


def ran(capsys: pytest.CaptureFixture[str], root: str | None, **options: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON document of a tiny run."""
    code = demo(root, TINY, Options(json_output=True, **options))
    return code, json.loads(capsys.readouterr().out)


def check_proofs(root: str, document: dict[str, Any]) -> None:
    """The document says that all was proved, and the store holds what it says."""
    assert (document["proved"], document["problems"]) == (True, [])
    assert document["reward_last"] - document["reward_first"] >= 0.1
    assert [row["step"] for row in document["versions"]] == list(range(TINY.steps + 1))
    reader = StreamReader.open(open_store(root))
    head = reader.head()
    assert head == document["version"]
    with ThreadPoolExecutor(2) as pool:
        state = rebuild(reader, head, pool)
    assert str(state.position.digest) == document["digest"]
    assert state.position.manifest.step == TINY.steps
    for name, subscriber in zip("ab", document["subscribers"], strict=True):
        assert (subscriber["name"], subscriber["version"], subscriber["digest"]) == (
            name,
            head,
            document["digest"],
        )
        assert subscriber["tensors_equal"] == subscriber["tensors"] == len(state.layout)
        assert subscriber["batches"] > 0


def check_return(document: dict[str, Any]) -> None:
    """The killed subscriber came back, caught up, and took part again."""
    survivor, victim = document["subscribers"]
    killed = victim["killed"]
    assert survivor["killed"] is None
    assert killed["killed_at"] <= killed["restarted_at"] < document["version"]
    assert killed["batches"] > 0
    assert survivor["batches"] == TINY.steps > victim["batches"]
    ages = [row["staleness"] for row in document["versions"][1:]]
    assert ages[0] == 0.0  # nothing is older than the first version
    assert max(ages) <= TINY.max_staleness
    assert sum(ages) / len(ages) >= 0.5  # else the trainer and its subscribers wait for each other


def test_a_run_proves_both_subscribers_and_the_store_rebuilds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], temporary: Path
) -> None:
    root = str(tmp_path / "store")
    code, document = ran(capsys, root)
    assert code == 0
    check_proofs(root, document)
    check_return(document)
    wire = [row["wire_bytes"] for row in document["versions"][1:]]
    assert document["wire_bytes"] == sum(wire) < document["dense_bytes"]
    assert leftovers(temporary) == []


def test_the_same_on_s3_after_another_run(s3_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Publisher(s3_url) as publisher:  # a run that had come far ahead of where this one starts
        publisher.publish(Learner(TINY.policy, seed=9).bf16_state(), step=1000).wait()
    code, document = ran(capsys, s3_url)
    assert code == 0
    check_proofs(s3_url, document)
    check_return(document)
    assert document["versions"][0]["version"] == 2  # version 1 is the fence of this run's publisher


def test_one_flipped_bit_in_a_subscriber_fails_the_proof(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = ran(capsys, None, worker=(sys.executable, str(HERE / "bitflip_worker.py")))
    assert code == 1
    assert not document["proved"]
    for name, subscriber in zip("ab", document["subscribers"], strict=True):
        assert subscriber["tensors_equal"] == subscriber["tensors"] - 1
        assert (
            f"subscriber {name}: tensor model.norm.weight does not have the trainer's bytes"
            in document["problems"]
        )
        assert subscriber["digest"] != document["digest"]
    assert len(document["problems"]) == 4  # for each subscriber a tensor and the state digest


def test_a_subscriber_that_dies_of_a_bug_ends_the_run_and_is_told(temporary: Path) -> None:
    with pytest.raises(
        WeightcastError, match=r"subscriber [ab] \(process \d+\) has ended: RuntimeError: this is the bug"
    ):
        demo(None, TINY, Options(worker=(sys.executable, str(HERE / "broken_worker.py"))))
    assert leftovers(temporary) == []


def test_the_summary_of_a_run_without_learning_says_what_is_not_proved(
    capsys: pytest.CaptureFixture[str], temporary: Path
) -> None:
    code = demo(None, TINY.model_copy(update={"learning_rate": 1e-9, "steps": 6}), Options(keep=True))
    out, err = capsys.readouterr()
    assert code == 1
    assert re.search(
        r"^NOT PROVED +the reward went from 0\.\d\d to 0\.\d\d, expected a rise of 0\.1", out, re.MULTILINE
    )
    assert "byte for byte" not in out
    (kept,) = leftovers(temporary)
    assert re.search(rf"^store +{re.escape(str(kept))}$", out, re.MULTILINE)
    assert StreamReader.open(open_store(str(kept))).head() == 6
    assert len(re.findall(r"^version \d+  step \d+  reward ", err, re.MULTILINE)) == 7
    assert re.search(r"^subscriber b \(process \d+\) killed at step 2$", err, re.MULTILINE)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_when_the_trainer_goes_its_processes_go(temporary: Path, number: signal.Signals, code: int) -> None:
    config = TINY.model_copy(update={"steps": 10_000}).model_dump_json()
    script = (
        "import sys; from weightcast.demo.run import *; sys.exit(demo(None, DemoConfig(**eval(sys.argv[1]))))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, config], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as trainer:
        lines = iter(trainer.stderr or ())
        assert any(line.startswith(b"version 1 ") for line in lines)
        assert len(processes(temporary)) == 2
        trainer.send_signal(number)
        rest = b"".join(lines)
        assert trainer.wait(30) == code
    assert wait_until(lambda: not processes(temporary))
    assert b"Traceback" not in rest
    if number is signal.SIGINT:
        assert leftovers(temporary) == []


def test_the_arguments_are_checked() -> None:
    import click

    with pytest.raises(click.BadParameter, match="1 is not in the range"):
        main(["--steps", "1"])
