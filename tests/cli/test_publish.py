"""`publish`: one checkpoint as the next version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weightcast.manifest.chain import Position
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.publisher.upload import Uploader
from weightcast.schemas.manifest import SnapshotManifest, VersionManifest, decode

from .. import sample
from .conftest import Outcome, finish, spawn, write_checkpoint

Cli = Callable[..., Outcome]


def _bytes_under(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str, float], Path]:
    """Writes a checkpoint folder of one tensor [4] that is filled with a value."""

    def write(name: str, value: float) -> Path:
        return write_checkpoint(tmp_path / name, {"w": torch.full((4,), value)})

    return write


def test_a_checkpoint_after_the_other(tmp_path: Path, checkpoints: Path, cli: Cli) -> None:
    root = tmp_path / "s"
    first = finish(spawn("publish", root, checkpoints / "checkpoint-0", "--json")).json
    # A checkpoint's two names for one tensor are two tensors: safetensors knows no ties.
    elements = sample.ELEMENTS_0 + sample.EMBED
    assert (first["version"], first["kind"], first["step"]) == (0, "snapshot", 0)
    assert (first["changed"], first["elements"]) == (elements, elements)
    snapshot = _bytes_under(root / "snapshots")
    assert first["wire_bytes"] == snapshot + sample.manifest_path(root, 0).stat().st_size

    second = cli("publish", root, checkpoints / "checkpoint-10", "--json").json
    assert (second["version"], second["kind"], second["step"]) == (1, "delta", 10)
    assert (second["changed"], second["elements"]) == (54 + 50, elements)
    shard, manifest = sample.shard_path(root, 1), sample.manifest_path(root, 1)
    assert second["wire_bytes"] == shard.stat().st_size + manifest.stat().st_size

    third = cli("publish", root, checkpoints / "checkpoint-20", "--json").json
    assert (third["version"], third["changed"], third["shards"]) == (2, 0, 0)


def test_published_bits_come_back(tmp_path: Path, checkpoints: Path, cli: Cli) -> None:
    for step in (0, 10):
        assert cli("publish", tmp_path / "s", checkpoints / f"checkpoint-{step}").code == 0
    for version in (0, 1):
        assert cli("pull", tmp_path / "s", tmp_path / f"out{version}", "--version", version).code == 0
        found = load_file(tmp_path / f"out{version}" / "model-00001-of-00001.safetensors")
        expected = sample.states()[version]
        assert found.keys() == expected.keys()
        assert all(sample.bits(found[n]) == sample.bits(expected[n]) for n in expected)
        assert (tmp_path / f"out{version}" / "config.json").read_bytes() == b'{"a": 1}'
        assert (tmp_path / f"out{version}" / "tokenizer.json").read_bytes() == b"{}"


def test_a_missing_tensor_must_be_named(tmp_path: Path, checkpoints: Path, cli: Cli) -> None:
    root = tmp_path / "s"
    cli("publish", root, checkpoints / "checkpoint-20")
    refused = cli("publish", root, checkpoints / "checkpoint-30")
    assert refused.code == 2
    assert "small.9.weight" in refused.err
    outcome = cli("publish", root, checkpoints / "checkpoint-30", "--drop", "small.9.weight", "--json")
    assert outcome.json["version"] == 1
    assert cli("show", root, 1, "--json").json["relaid"] is True


def test_reset_starts_afresh(tmp_path: Path, model: Callable[[str, float], Path], cli: Cli) -> None:
    root = tmp_path / "s"
    cli("publish", root, model("a", 1.0))
    assert cli("publish", root, model("b", 2.0), "--reset", "--json").json["kind"] == "snapshot"
    assert cli("publish", root, model("c", 3.0), "--json").json["kind"] == "delta"
    manifest = cli("show", root, 1, "--json").json
    assert (manifest["kind"], manifest["changed"]) == ("snapshot", 4)
    assert cli("verify", root, "--deep", "--json").json["rebuilt"] == 3
    stored = root / manifest["snapshot"] / "manifest.json"
    assert decode(SnapshotManifest, stored.read_bytes(), "it").version == 1


def test_reset_mends_a_stream_that_cannot_be_continued(copy: Path, checkpoints: Path, cli: Cli) -> None:
    for folder in (copy / "snapshots").iterdir():
        shutil.rmtree(folder)
    assert cli("publish", copy, checkpoints / "checkpoint-40").code == 14
    assert cli("publish", copy, checkpoints / "checkpoint-40", "--reset", "--json").json["version"] == 5


def test_metadata_writer_and_cast(tmp_path: Path, model: Callable[[str, float], Path], cli: Cli) -> None:
    options = ["--metadata", "run=7", "--metadata", "note=a=b", "--writer", "me", "--cast", "w*=bf16"]
    document = cli("publish", tmp_path / "s", model("m", 1.0), *options, "--json").json
    assert (document["writer"], document["dense_bytes"], document["step"]) == ("me", 8, None)
    details = cli("show", tmp_path / "s", 0, "--tensors", "--json").json
    assert details["metadata"] == {"run": "7", "note": "a=b"}
    assert details["tensors"][0]["dtype"] == "BF16"


def test_settings_come_from_a_file(tmp_path: Path, model: Callable[[str, float], Path], cli: Cli) -> None:
    config = tmp_path / "w.toml"
    config.write_text('[publisher]\nwriter = "from-file"\n')
    document = cli("publish", tmp_path / "s", model("m", 1.0), "--config", config, "--json").json
    assert document["writer"] == "from-file"
    config.write_text('[publisher]\nwritter = "x"\n')
    outcome = cli("publish", tmp_path / "s", model("n", 1.0), "--config", config)
    assert outcome.code == 2
    assert "writter" in outcome.err


def test_the_baseline_is_kept_in_a_file(
    tmp_path: Path, model: Callable[[str, float], Path], cli: Cli
) -> None:
    root, baseline = tmp_path / "s", tmp_path / "baseline"
    cli("publish", root, model("a", 1.0), "--baseline", baseline)
    for folder in (root / "snapshots").iterdir():  # nothing in the store leads to the head any more
        shutil.rmtree(folder)
    assert cli("publish", root, model("b", 2.0), "--baseline", baseline, "--json").json["changed"] == 4


@pytest.mark.parametrize(
    ("name", "global_step", "options", "step"),
    [
        ("checkpoint-20", 20, [], 20),
        ("step_7", None, [], 7),
        ("global_step_5", None, [], 5),
        ("final", 30, [], 30),
        ("final", None, [], None),
        ("checkpoint-20", 10, ["--step", "10"], 10),
        ("final", 30, ["--step", "31"], 31),
    ],
)
def test_where_the_step_comes_from(
    name: str,
    global_step: int | None,
    options: list[str],
    step: int | None,
    tmp_path: Path,
    model: Callable[[str, float], Path],
    cli: Cli,
) -> None:
    folder = model(name, 1.0)
    if global_step is not None:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": global_step}))
    assert cli("publish", tmp_path / "s", folder, *options, "--json").json["step"] == step


def test_b183_a_step_that_is_contradicted_is_refused(
    tmp_path: Path, model: Callable[[str, float], Path], cli: Cli
) -> None:
    folder = model("checkpoint-10", 1.0)
    (folder / "trainer_state.json").write_text('{"global_step": 20}')
    outcome = cli("publish", tmp_path / "s", folder)
    assert outcome.code == 2
    assert "step 10" in outcome.err
    assert "step 20" in outcome.err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty (0 bytes)"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "is a Git LFS pointer"),
        (None, "its header promises"),
    ],
)
def test_b228_broken_checkpoints_are_named_for_what_they_are(
    content: bytes | None, said: str, tmp_path: Path, model: Callable[[str, float], Path], cli: Cli
) -> None:
    path = model("m", 1.0) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3] if content is None else content)
    outcome = cli("publish", tmp_path / "s", path.parent)
    assert outcome.code == 13
    assert str(path) in outcome.err
    assert said in outcome.err
    assert "bytes" in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "s").exists()


def test_b228_verify_names_damaged_snapshot_files(copy: Path, cli: Cli) -> None:
    path = copy / "snapshots" / "000000000003" / "model-00001-of-00001.safetensors"
    path.write_bytes(b"")
    outcome = cli("verify", copy)
    assert outcome.code == 13
    assert str(path.relative_to(copy)) in outcome.out
    assert "Traceback" not in outcome.err


def test_b170_pickles_are_not_read(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(
        b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "ran").encode()
    )
    outcome = cli("publish", tmp_path / "s", folder)
    assert outcome.code == 2
    assert "only safetensors is read" in outcome.err
    assert not (tmp_path / "ran").exists()


def test_b038_a_reserved_name_is_refused_before_anything_is_written(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    header = b'{"__metadata__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    assert cli("publish", tmp_path / "s", folder).code in (2, 13)
    assert not (tmp_path / "s").exists()


def test_a_store_that_is_down_is_exit_code_15(
    checkpoints: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim")
    options = ["--endpoint-url", "http://127.0.0.1:9", "--max-attempts", "1", "--deadline", "5"]
    outcome = cli("publish", "s3://bucket/s", checkpoints / "checkpoint-0", *options)
    assert outcome.code == 15
    assert "geheim" not in outcome.err
    assert outcome.err.splitlines()[0].startswith("weightcast: error: ")


def test_a_file_that_changes_while_it_is_read_is_not_published(
    tmp_path: Path, model: Callable[[str, float], Path], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightcast.publisher import contents

    folder = model("checkpoint-1", 1.0)
    read = contents._read

    def read_and_save_again(*arguments: object) -> None:
        read(*arguments)  # type: ignore[arg-type]
        save_file({"w": torch.full((4,), 9.0)}, folder / "other")
        (folder / "model.safetensors").write_bytes((folder / "other").read_bytes())

    monkeypatch.setattr(contents, "_read", read_and_save_again)
    assert cli("publish", tmp_path / "s", folder).code == 13
    assert cli("log", tmp_path / "s", "--json").json["versions"] == []


def test_b082_the_loser_of_a_race_exits_11_and_names_the_winner(
    tmp_path: Path, model: Callable[[str, float], Path], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another publisher commits version 1 in the moment before this one's create."""
    root = tmp_path / "s"
    assert cli("publish", root, model("a", 1.0)).code == 0
    commit = Uploader.commit

    def late(uploader: Uploader, manifest: VersionManifest) -> Position:
        monkeypatch.setattr(Uploader, "commit", commit)
        with Publisher(str(root), PublisherSettings(writer="winner"), fence=False) as winner:
            winner.publish({"w": torch.full((4,), 2.0)}).wait()
        return commit(uploader, manifest)

    monkeypatch.setattr(Uploader, "commit", late)
    lost = cli("publish", root, model("b", 3.0), "--json")
    assert lost.code == 11
    assert lost.json["error"]["kind"] == "conflict"
    assert "version 1 was committed by 'winner'" in lost.json["error"]["message"]
    assert cli("log", root, "--json").json["versions"][0]["writer"] == "winner"
    assert cli("verify", root, "--deep").code == 0
