"""slime's hook, and prime-rl's broadcast folders with the watcher: both against what they write, re-created."""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightcast.publisher import Publisher
from weightcast.publisher.hooks import slime
from weightcast.publisher.watch import Outcome, Watcher, WatchSettings
from weightcast.schemas.errors import NotFound, UsageError

from .kit import assert_same_bits, followed, reader_at, versions


def weights(k: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    return {
        f"layers.{n}.weight": torch.randn(16, 8, generator=generator).to(torch.bfloat16) for n in range(3)
    }


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A file a tensor under a temporary name, then the final names, then the index: as prime-rl's ranks do."""
    folder.mkdir(parents=True)
    names = {}
    for n, (name, tensor) in enumerate(tensors.items(), start=1):
        names[name] = f"model-{n:05d}-of-{len(tensors):05d}.safetensors"
        save_file({name: tensor}, folder / f"tmp-rank{n}.safetensors", metadata={"format": "pt"})
        (folder / f"tmp-rank{n}.safetensors").rename(folder / names[name])
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@pytest.fixture
def args(root: str, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """slime's arguments, and the stream in the environment."""
    monkeypatch.setenv("WEIGHTCAST_ROOT", root)
    return Namespace(update_weight_mode="full", update_weight_transport="disk")


def test_slime_versions_are_what_it_wrote(args: Namespace, root: str, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        folder = tmp_path / f"weight_v{number:06d}"
        write_shards(folder, weights(number))
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
        slime.publish_version(args, str(folder), [])
        assert_same_bits(followed(root, weights(0)), weights(number))
    reader = reader_at(root)
    assert [v.version for v in versions(root)] == [0, 1, 2]  # one publisher for all of them
    assert reader.manifest(2).metadata == {"weight_version": "weight_v000003"}
    assert [f.name for f in reader.files(reader.manifest(2).files).files] == ["config.json"]
    slime.outlet_for(root).close()


def test_slime_deltas_are_refused(args: Namespace, tmp_path: Path) -> None:
    args.update_weight_mode = "delta"
    with pytest.raises(UsageError, match="mode 'delta'"):
        slime.publish_version(args, str(tmp_path), [])


def test_slime_without_a_stream(args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTCAST_ROOT")
    with pytest.raises(UsageError, match="WEIGHTCAST_ROOT is not set"):
        slime.publish_version(args, str(tmp_path), [])


def test_slime_half_a_checkpoint(args: Namespace, root: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "weight_v000001", weights(1))
    (tmp_path / "weight_v000001" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(NotFound, match="model-00002-of-00003"):
        slime.publish_version(args, str(tmp_path / "weight_v000001"), [])


def test_slime_on_another_rank_does_nothing(
    args: Namespace, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slime, "is_main", lambda: False)
    slime.publish_version(args, str(tmp_path / "not there"), [])
    with pytest.raises(NotFound):
        reader_at(root)


def test_prime_rl_broadcasts_are_followed_by_the_watcher(root: str, tmp_path: Path) -> None:
    """`weightcast publish ROOT --watch OUTPUT/broadcasts --marker STABLE`, on folders as prime-rl writes them."""
    broadcasts, stop, done = tmp_path / "broadcasts", threading.Event(), threading.Semaphore(0)

    def report(outcome: Outcome) -> None:
        if outcome.published is not None:
            done.release()

    with Publisher(root) as publisher:
        watcher = Watcher(broadcasts, publisher, WatchSettings(settle_s=0.2, poll_s=0.05, marker="STABLE"))
        thread = threading.Thread(target=watcher.run, args=(stop, report))
        thread.start()
        try:
            for step in (0, 1, 2):
                write_shards(broadcasts / f"step_{step}", weights(step))
                assert not done.acquire(timeout=0.5)  # whole, but not said to be
                (broadcasts / f"step_{step}" / "STABLE").touch()
                assert done.acquire(timeout=20)
                assert_same_bits(followed(root, weights(9)), weights(step))
        finally:
            stop.set()
            thread.join()
    assert [v.step for v in versions(root)] == [0, 1, 2]
