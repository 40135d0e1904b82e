"""A version as a Hugging Face checkpoint on disk."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

from weightcast.manifest.export import check_free, export, fetch_files
from weightcast.manifest.rebuild import State, rebuild
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import StorageError, UsageError

from .. import sample


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> StreamReader:
    folder = tmp_path_factory.mktemp("export") / "stream"
    sample.publish_sample(folder)
    return sample.reader_of(folder)


@pytest.fixture
def state(reader: StreamReader) -> State:
    return _state(reader, 4)


def _state(reader: StreamReader, version: int) -> State:
    with ThreadPoolExecutor(2) as pool:
        return rebuild(reader, version, pool)


@pytest.mark.parametrize("version", range(sample.VERSIONS))
def test_every_tensor_has_its_bits_tied_ones_too(reader: StreamReader, tmp_path: Path, version: int) -> None:
    export(_state(reader, version), {}, tmp_path / "out", file_bytes=60_000)
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(path)
    expected = sample.states()[version]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert sample.bits(found[name]) == sample.bits(tensor), name


def test_files_are_split_and_indexed(state: State, tmp_path: Path) -> None:
    names = export(state, {"config.json": b"{}"}, tmp_path / "out", file_bytes=160_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(names)
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) == 2  # each with one of two tensors of 153,600 bytes
    assert index["weight_map"].keys() == sample.states()[4].keys()
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"


def test_companion_files_come_from_the_version(reader: StreamReader) -> None:
    files = fetch_files(reader, reader.manifest(4).files)
    assert files == {"config.json": b'{"a": 1}', "tokenizer.json": b"{}"}


def test_a_folder_that_holds_something_is_left_alone(state: State, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        export(state, {}, tmp_path)
    with pytest.raises(UsageError, match="holds no safetensors checkpoint"):
        export(state, {}, tmp_path, replace=True)
    with pytest.raises(UsageError, match="is not a folder"):
        check_free(tmp_path / "note.txt", replace=True)
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]


def test_a_checkpoint_is_replaced_whole(state: State, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(state, {"old.json": b"1"}, out)
    names = export(state, {}, out, replace=True)
    assert sorted(p.name for p in out.iterdir()) == sorted(names)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_and_a_link_to_it_are_fine(state: State, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    export(state, {}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "model.safetensors.index.json").is_file()


def test_nothing_is_left_of_a_failure(state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        export(state, {}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_companion_file_cannot_take_a_weight_files_name(state: State, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.safetensors\.index\.json"):
        export(state, {"model.safetensors.index.json": b"{}"}, tmp_path / "out")


def test_permissions_follow_the_umask(state: State, tmp_path: Path) -> None:
    export(state, {}, tmp_path / "out")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask
