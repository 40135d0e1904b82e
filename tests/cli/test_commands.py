"""What the other commands do and say."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .. import sample
from .conftest import Outcome, finish, spawn, write_checkpoint

Cli = Callable[..., Outcome]


def test_log_in_a_pipe_is_tab_separated(root: Path, cli: Cli) -> None:
    lines = [line.split("\t") for line in cli("log", root, "-n", 3).out.splitlines()]
    assert lines[0] == ["version", "step", "time", "kind", "changed", "bytes", "shards", "writer"]
    assert [line[0] for line in lines[1:]] == ["4", "3", "2"]
    assert {len(line) for line in lines} == {8}


def test_log_of_an_empty_stream_says_so_on_stderr(tmp_path: Path, cli: Cli) -> None:
    from weightcast.manifest.commit import create_stream
    from weightcast.manifest.store import open_store

    create_stream(open_store(str(tmp_path / "s")))
    outcome = cli("log", tmp_path / "s")
    assert (outcome.code, outcome.out) == (0, "")
    assert "no version" in outcome.err
    assert cli("status", tmp_path / "s", "--json").json["head"] is None
    assert cli("verify", tmp_path / "s", "--json").json["version"] is None
    assert cli("pull", tmp_path / "s", tmp_path / "out").code == 10
    assert cli("snapshot", tmp_path / "s").code == 10


def test_show_for_people(root: Path, cli: Cli) -> None:
    out = cli("show", root, 1, "--tensors").out
    assert "changed   54 of 76859 elements (0.0703 %)\n" in out
    assert "embed.weight\tBF16\t[300, 256]\t50\t76800\t0.0651 %\t\n" in out
    assert "lm_head.weight\tBF16\t[300, 256]\t50\t76800\t0.0651 %\tembed.weight\n" in out


def test_diff_for_people(root: Path, cli: Cli) -> None:
    out = cli("diff", root, 4, 0).out
    assert "small.0.weight\treshaped\tF32\t[6] -> [5]\t5\t5\t100 %\n" in out
    assert "extra.bias\tremoved\tBF16\t[7]\t7\t7\t100 %\n" in out
    assert "embed.weight" not in out
    assert "1 and 2 are identical" in cli("diff", root, 1, 2).out


def test_b135_verify_lists_each_damage_with_version_and_object(copy: Path, cli: Cli) -> None:
    missing, flipped = sample.shard_path(copy, 1), sample.shard_path(copy, 3)
    missing.unlink()
    sample.flip(flipped)
    outcome = cli("verify", copy)
    assert outcome.code == 13
    for version, path in ((1, missing), (3, flipped)):
        assert any(
            line.startswith(f"{version}\t") and str(path.relative_to(copy)) in line
            for line in outcome.out.splitlines()
        )
    assert "not checked" in outcome.out


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda root: sample.shard_path(root, 1).unlink(), 14),
        (lambda root: sample.flip(sample.shard_path(root, 1)), 13),
        (lambda root: sample.manifest_path(root, 4).write_bytes(b"{"), 12),
        (lambda root: None, 0),
    ],
)
def test_verify_exits_with_the_gravest_kind(
    damage: Callable[[Path], object], code: int, copy: Path, cli: Cli
) -> None:
    sample.shard_path(copy, 3).touch()
    damage(copy)
    assert cli("verify", copy).code == code


def test_pull_refuses_a_folder_that_is_taken(root: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out"
    assert cli("pull", root, out).code == 0
    before = {p.name: p.stat().st_ino for p in out.iterdir()}
    assert cli("pull", root, out, "--version", 0).code == 2
    assert {p.name: p.stat().st_ino for p in out.iterdir()} == before
    assert cli("pull", root, out, "--version", 0, "--force", "--json").json["version"] == 0
    assert cli("pull", root, tmp_path, "--force").code == 2
    assert cli("pull", root, tmp_path / "new", "--version", 77).code == 10
    assert not (tmp_path / "new").exists()


def test_subscribe_once_brings_a_folder_to_the_head(tmp_path: Path, checkpoints: Path, cli: Cli) -> None:
    root, model = tmp_path / "s", tmp_path / "model"
    for version, step in enumerate((0, 10)):
        cli("publish", root, checkpoints / f"checkpoint-{step}")
        document = cli("subscribe", root, "--into", model, "--once", "--no-lease", "--json").json
        assert (document["version"], document["step"]) == (version, step)
        cli("pull", root, tmp_path / "pulled", "--force")
        assert document["digest"] == cli("show", root, version, "--json").json["digest"]
    assert not (root / "readers").exists()
    assert cli("subscribe", tmp_path / "nothing", "--into", model, "--once").code == 10


def test_snapshot_and_prune(copy: Path, cli: Cli) -> None:
    assert "snapshots/000000000004" in cli("snapshot", copy).out
    assert "was there already" in cli("snapshot", copy).out
    dry = cli("prune", copy, "--keep", 1, "--dry-run")
    assert (dry.code, "0 -> 4" in dry.out) == (0, True)
    assert str(sample.shard_path(copy, 3).relative_to(copy)) in dry.out
    assert sample.shard_path(copy, 3).exists()
    assert "0 -> 4" in cli("prune", copy, "--keep", 1, "--grace", 0).out
    assert not list((copy / "data").rglob("*.arrow"))
    assert cli("verify", copy, "--deep").code == 0
    assert cli("diff", copy, 1, 4).code == 14


def test_status_for_people(copy: Path, cli: Cli) -> None:
    out = cli("status", copy).out
    assert "head        version 4, " in out
    assert "start from  version 3, then 1 deltas of " in out


def test_both_sidecars(tmp_path: Path) -> None:
    """What the trainer writes into one folder appears in the other, and the figures say so."""
    root, watched, model = tmp_path / "s", tmp_path / "checkpoints", tmp_path / "model"
    watched.mkdir()
    port = _free_port()
    publisher = spawn("publish", root, "--watch", watched, "--settle", 0.1, "--poll", 0.05)
    subscriber = spawn(
        "subscribe", root, "--into", model, "--poll", 0.05, "--json", "--http", f"127.0.0.1:{port}"
    )
    try:
        assert subscriber.stdout is not None
        for version, value in enumerate((1.0, 2.0)):
            write_checkpoint(tmp_path / "new", {"w": torch.full((4,), value)}).rename(
                watched / f"checkpoint-{version}"
            )
            applied = json.loads(subscriber.stdout.readline())
            assert (applied["version"], applied["step"]) == (version, version)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            assert answer.read() == b"ok\n"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            metrics = answer.read().decode()
        assert "\nweightcast_subscriber_version 1.0\n" in metrics
        assert "\nweightcast_subscriber_lag_versions 0.0\n" in metrics
        assert "\nweightcast_subscriber_step 1.0\n" in metrics
    finally:
        for process in (subscriber, publisher):
            process.terminate()
        outcomes = [finish(process) for process in (subscriber, publisher)]
    assert [o.code for o in outcomes] == [0, 0]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
