"""Which files make a checkpoint, whether it is whole, and that what is read is of one save."""

from __future__ import annotations

import json
import logging
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from weightcast.publisher.checkpoint import check_step, open_checkpoint, step_in_name
from weightcast.schemas.errors import Corrupt, NotFound, UsageError, WeightcastError

from ..versions import copy_of
from .checkpoints import INDEX, SINGLE, Model, changed, model, save, total_size, write_index


def contents_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with open_checkpoint(folder).items() as contents:
        return {i.spec.name: (i.spec.dtype, i.spec.shape, i.array().tobytes()) for i in contents.values()}


def expected(tensors: Model) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (b.dtype, b.shape, b.data) for name, b in copy_of(tensors).items()}


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_every_bit(tmp_path: Path, shards: int) -> None:
    tensors = model(1) | {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(float("nan"), dtype=torch.float64),
        "fp8": torch.arange(250, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
        "odd": torch.tensor([-0.0, float("inf"), 1e-42], dtype=torch.float32),
    }
    save(tmp_path, tensors, shards=shards)
    assert contents_of(tmp_path) == expected(tensors)


def test_tensors_stay_valid_when_the_next_is_read(tmp_path: Path) -> None:
    tensors = model(2)
    save(tmp_path, tensors)
    with open_checkpoint(tmp_path).items() as contents:
        items = list(contents.values())
    assert {i.spec.name: i.array().tobytes() for i in items} == {
        n: b.data for n, b in copy_of(tensors).items()
    }
    assert not any(i.lasting for i in items)


def test_b134_stray_files_are_not_looked_at(tmp_path: Path) -> None:
    tensors = model(3)
    for folder, shards in ((tmp_path / "one", 1), (tmp_path / "many", 3)):
        save(folder, tensors, shards=shards)
        save_file({"stray": torch.ones(3)}, folder / "shard-9.safetensors")
        (folder / ".shard-1.safetensors.swp").write_bytes(b"b0VIM 9.0")
        (folder / "._model.safetensors").write_bytes(b"\0\5\x16\7")
        (folder / "model.safetensors.bak").write_bytes(b"old")
        (folder / "._tokenizer.model").write_bytes(b"\0\5\x16\7")
        assert contents_of(folder) == expected(tensors)
        assert open_checkpoint(folder).companions() == {}


@pytest.mark.parametrize("keep", [-1, 0.5, 8, 0])
def test_b125_cut_file_is_refused_with_its_size(tmp_path: Path, keep: float) -> None:
    save(tmp_path, model(4))
    path = tmp_path / SINGLE
    size = path.stat().st_size
    left = size - 1 if keep == -1 else int(size * keep) if keep == 0.5 else int(keep)
    os.truncate(path, left)
    with pytest.raises(Corrupt, match=str(path)) as caught:
        open_checkpoint(tmp_path)
    assert str(left) in str(caught.value)
    if left > 8:
        assert str(size) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>502 Bad Gateway</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS"),
    ],
)
def test_b228_a_file_that_is_no_weights_is_named_for_what_it_is(
    tmp_path: Path, data: bytes, word: str
) -> None:
    (tmp_path / SINGLE).write_bytes(data)
    with pytest.raises(Corrupt, match=word) as caught:
        open_checkpoint(tmp_path)
    assert str(len(data)) in str(caught.value)


def test_b174_index_and_shards_disagree(tmp_path: Path) -> None:
    tensors = model(5)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def fresh(name: str) -> tuple[Path, dict[str, str]]:
        folder = save(tmp_path / name, tensors, shards=2)
        mapping: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return folder, mapping

    folder, mapping = fresh("elsewhere")
    name = next(n for n, file in mapping.items() if file == second)
    write_index(folder, mapping | {name: first})
    with pytest.raises(Corrupt, match=f"{name}.*{second}.*{first}"):
        open_checkpoint(folder)

    folder, mapping = fresh("both")
    save_file({n: tensors[n] for n, file in mapping.items() if file == first or n == name}, folder / first)
    with pytest.raises(Corrupt, match=f"{name}.*both.*{first}.*{second}"):
        open_checkpoint(folder)

    folder, mapping = fresh("none")
    write_index(folder, mapping | {"ghost": first})
    with pytest.raises(Corrupt, match=f"'ghost' is in no file.*{first}"):
        open_checkpoint(folder)

    folder, mapping = fresh("unlisted")
    write_index(folder, {n: file for n, file in mapping.items() if n != name})
    with pytest.raises(Corrupt, match=f"{name}.*{second}.*nothing"):
        open_checkpoint(folder)


def test_b174_a_wrong_total_size_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = model(6)
    save(tmp_path, tensors, shards=2)
    with caplog.at_level(logging.WARNING, "weightcast.publisher.checkpoint"):
        open_checkpoint(tmp_path)
        assert not caplog.records
        mapping = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        write_index(tmp_path, mapping, total=12345)
        assert contents_of(tmp_path) == expected(tensors)
    assert "12345" in caplog.text
    assert str(total_size(tensors)) in caplog.text


def test_b180_a_stale_index_or_a_stale_single_file_is_a_conflict(tmp_path: Path) -> None:
    # An index of an earlier save whose shards are gone, beside a fresh single file.
    folder = save(tmp_path / "index", model(7), shards=3)
    for path in folder.glob("model-*.safetensors"):
        path.unlink()
    save(folder, model(8))
    with pytest.raises(UsageError, match=f"{SINGLE}.*{INDEX}.*stale"):
        open_checkpoint(folder)
    (folder / INDEX).unlink()
    assert contents_of(folder) == expected(model(8))

    # The reverse: fresh shards beside an old single file.
    folder = save(tmp_path / "single", model(7))
    save(folder, model(8), shards=3)
    with pytest.raises(UsageError, match=f"{SINGLE}.*{INDEX}.*stale"):
        open_checkpoint(folder)
    (folder / SINGLE).unlink()
    assert contents_of(folder) == expected(model(8))


def test_an_index_that_names_the_single_file_is_fine(tmp_path: Path) -> None:
    tensors = model(9)
    save(tmp_path, tensors)
    write_index(tmp_path, dict.fromkeys(tensors, SINGLE), total=total_size(tensors))
    assert contents_of(tmp_path) == expected(tensors)


def test_a_missing_shard_is_not_found(tmp_path: Path) -> None:
    save(tmp_path, model(10), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(NotFound, match=r"model-00002-of-00003.*1 of 3"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"[" * 100_000]
)
def test_a_broken_index_is_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(Corrupt, match=INDEX):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", ".x.safetensors", "a\\x.safetensors", "x.bin"]
)
def test_an_index_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, {"w": name})
    with pytest.raises(UsageError, match="not a safetensors file beside it"):
        open_checkpoint(tmp_path)


def test_b170_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    witness = tmp_path / "witness"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(witness),)

    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    torch.save(Bomb(), folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin.*only safetensors is read"):
        open_checkpoint(folder)
    assert not witness.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert witness.exists(), "the pickle does nothing, so this test proves nothing"


def test_what_trainers_keep_beside_the_weights_is_no_refusal(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "config.json"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(NotFound, match="neither") as refused:
        open_checkpoint(tmp_path)
    assert refused.value.hint == "pass the stream first, then the folder of a checkpoint that is written"


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "'__metadata__' is reserved"),
        ({"format": "pt", "epoch": 3}, "__metadata__"),
    ],
)
def test_b038_reserved_tensor_name_is_refused(
    tmp_path: Path, metadata: dict[str, object], words: str
) -> None:
    tensor = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    raw = json.dumps({"__metadata__": metadata} | ({} if "dtype" in metadata else {"w": tensor})).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0")
    with pytest.raises(WeightcastError, match=words):
        open_checkpoint(tmp_path)


def test_a_file_without_tensors_is_corrupt(tmp_path: Path) -> None:
    save_file({}, tmp_path / SINGLE)
    with pytest.raises(Corrupt, match="no tensors"):
        open_checkpoint(tmp_path)


def test_companions_are_config_and_tokenizer(tmp_path: Path) -> None:
    save(tmp_path, model(11))
    wanted = {
        "config.json": b"{}",
        "tokenizer.json": b"[1]",
        "merges.txt": b"a b",
        "spiece.model": b"\1",
        "x.jinja": b"{{x}}",
    }
    other = {
        "trainer_state.json": b"{}",
        "optimizer.pt": b"1",
        "README.md": b"#",
        "model.safetensors.bak": b"",
    }
    for name, data in (wanted | other).items():
        (tmp_path / name).write_bytes(data)
    assert open_checkpoint(tmp_path).companions() == wanted


def test_a_companion_that_changes_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, model(12))
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.is_unchanged()
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert not checkpoint.is_unchanged()
    with pytest.raises(Corrupt, match="config or tokenizer"):
        checkpoint.companions()


@pytest.mark.parametrize("how", ["flip", "cut", "append", "replace", "rewrite"])
def test_b098_a_source_that_changes_while_it_is_read_is_noticed(tmp_path: Path, how: str) -> None:
    """Even a cut, which would kill a process that reads a mapping of the file."""
    before = model(13, tensors=4, elements=1 << 16)
    save(tmp_path, before)
    path = tmp_path / SINGLE
    checkpoint = open_checkpoint(tmp_path)

    def go_through() -> None:
        with checkpoint.items() as contents:
            values = iter(contents.values())
            next(values)
            if how == "flip":
                with path.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(b"\x55")
            elif how == "cut":
                os.truncate(path, 4096)
            elif how == "append":
                with path.open("ab") as file:
                    file.write(b"\0")
            elif how == "replace":
                save_file(changed(before, 3), tmp_path / "new")
                (tmp_path / "new").replace(path)
            else:
                path.write_bytes(path.read_bytes())
            list(values)

    if how == "replace":  # the file that is held open is still the old save, whole
        go_through()
    else:
        with pytest.raises(Corrupt, match="while it was read"):
            go_through()
    assert not checkpoint.is_unchanged()


def test_b098_a_file_that_was_replaced_before_it_is_opened_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, model(14))
    checkpoint = open_checkpoint(tmp_path)
    save(tmp_path / "new", model(15))
    (tmp_path / "new" / SINGLE).replace(tmp_path / SINGLE)
    with pytest.raises(Corrupt, match="written to"), checkpoint.items():
        pass


def test_b177_files_that_are_held_open_outlive_their_deletion(tmp_path: Path) -> None:
    tensors = model(16)
    save(tmp_path, tensors, shards=3)
    checkpoint = open_checkpoint(tmp_path)
    with checkpoint.items() as contents:
        for path in tmp_path.iterdir():
            path.unlink()
        found = {i.spec.name: i.array().tobytes() for i in contents.values()}
    assert found == {n: b.data for n, b in copy_of(tensors).items()}
    with pytest.raises(NotFound, match="rotated"), checkpoint.items():
        pass


def test_memory_is_one_tensor_at_a_time(tmp_path: Path) -> None:
    save(tmp_path, model(17, tensors=8, elements=1 << 20))
    with open_checkpoint(tmp_path).items() as contents:
        addresses = []
        for item in contents.values():
            addresses.append(np.asarray(item.owner).nbytes)
            assert item.owner is not None
        assert addresses == [2 << 20] * 8


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-30", 30),
        ("checkpoint_30", 30),
        ("step_7", 7),
        ("step-7", 7),
        ("global_step_100", 100),
        ("iter_0000012", 12),
        ("checkpoint-", None),
        ("checkpoint-30.tmp", None),
        ("my-checkpoint-30", None),
        ("checkpoint--3", None),
        ("step_1e3", None),
        ("step_٣", None),
        ("latest", None),
    ],
)
def test_step_in_name(name: str, step: int | None) -> None:
    assert step_in_name(Path("/x") / name) == step


def test_b183_a_trainer_state_of_another_step_is_refused(tmp_path: Path) -> None:
    check_step(tmp_path, 10)
    state = tmp_path / "trainer_state.json"
    state.write_text('{"global_step": 10}')
    check_step(tmp_path, 10)
    state.write_text('{"global_step": 20}')
    with pytest.raises(UsageError, match=r"step 10.*step 20"):
        check_step(tmp_path, 10)
    state.write_text('{"global_step": 2')  # being written
    check_step(tmp_path, 10)
