"""verl's and NeMo-RL's checkpoint engines against their published interfaces, re-created in `protocols`."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from weightcast.publisher import Publisher
from weightcast.schemas.errors import StorageError, UsageError

from . import protocols
from .kit import assert_same_bits, copied, reader_at, versions
from .protocols import NemoSynchronizer, VerlManager

Weights = Callable[[int], Iterator[tuple[str, torch.Tensor]]]
NEMO = "weightcast.publisher.hooks.nemo_rl:WeightcastEngine"


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A module that can be imported under `name`, with the packages it lies in."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> str:
    """verl, as far as an engine sees it; imports the backend as `custom_backend_module` does, and gives its name."""
    install(
        monkeypatch,
        "verl.checkpoint_engine",
        CheckpointEngine=protocols.VerlEngine,
        CheckpointEngineRegistry=protocols.VerlRegistry,
    )
    monkeypatch.delitem(sys.modules, "weightcast.publisher.hooks.verl", raising=False)
    importlib.import_module("weightcast.publisher.hooks.verl")
    return "weightcast"


@pytest.fixture
def nemo(monkeypatch: pytest.MonkeyPatch) -> str:
    """NeMo-RL, as far as an engine sees it; gives the `refit_transport`."""
    install(monkeypatch, "nemo_rl.utils.checkpoint_engines.base", CheckpointEngine=protocols.NemoEngine)
    monkeypatch.delitem(sys.modules, "weightcast.publisher.hooks.nemo_rl", raising=False)
    return NEMO


class Actor:
    """A trainer on several ranks, all of which make every tensor together."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.state = {
            "embed.weight": torch.randn(64, 8).to(torch.bfloat16),
            "mlp.weight": torch.randn(8, 8),
            "mlp.bias": torch.zeros(8, dtype=torch.float16),
            "steps": torch.tensor(0),
        }
        self.made: dict[int, int] = {}

    def step(self) -> None:
        self.state["embed.weight"][int(self.state["steps"])] += 1
        self.state["steps"] += 1

    def weights(self, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        self.made[rank] = 0
        for name, tensor in self.state.items():
            self.made[rank] += 1
            yield name, tensor.clone()


def broken(actor: Actor) -> Weights:
    """Rank 0 gives something that cannot be published, before its other tensors."""

    def weights(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        if rank == 0:
            yield "mlp.mask", torch.zeros(2, device="meta")
        yield from actor.weights(rank)

    return weights


def test_verl_rollouts_load_the_actors_bits(verl: str, root: str) -> None:
    actor, manager = Actor(), VerlManager(verl, 2, 2, {"root": root, "settings": {"threads": 2}})
    for step in (10, 20, 30):
        actor.step()
        metrics = asyncio.run(manager.update_weights(actor.weights, step))
        for loaded in manager.loaded:
            assert_same_bits(loaded, actor.state)
        assert actor.made == {0: 4, 1: 4}  # the other rank walked too, or rank 0 would wait for it
    assert [v.step for v in versions(root)] == [10, 20, 30]
    assert metrics["weightcast/version"] == 2
    assert metrics["weightcast/changed"] == 8 + 1  # a row, and the count
    assert manager.rollouts[0].wire_format == "named_tensors"


def test_verl_takes_the_version_of_this_sync_though_its_step_was_there_before(verl: str, root: str) -> None:
    """A trainer that went back to an earlier step makes versions of steps that are in the stream already."""
    first = Actor()
    with Publisher(root) as publisher:
        publisher.publish(first.weights(0), step=20).wait()
    actor, manager = Actor(), VerlManager(verl, 1, 1, {"root": root})
    actor.step()
    actor.step()
    asyncio.run(manager.update_weights(actor.weights, 20))
    assert_same_bits(manager.loaded[0], actor.state)
    assert not torch.equal(first.state["embed.weight"], actor.state["embed.weight"])


def test_verl_walks_all_weights_on_an_error_and_the_next_sync_is_healthy(verl: str, root: str) -> None:
    actor, manager = Actor(), VerlManager(verl, 2, 1, {"root": root, "timeout_s": 1.0})
    asyncio.run(manager.update_weights(actor.weights, 1))
    before = copied(manager.loaded[0])
    actor.step()
    actor.made.clear()
    with pytest.raises(UsageError, match=r"mlp\.mask"):
        asyncio.run(manager.update_weights(broken(actor), 2))
    assert actor.made == {0: 4, 1: 4}
    assert_same_bits(manager.loaded[0], before)
    asyncio.run(manager.update_weights(actor.weights, 2))
    assert_same_bits(manager.loaded[0], actor.state)


def test_nemo_rollouts_load_the_policys_bits(nemo: str, root: str) -> None:
    actor = Actor()
    synchronizer = NemoSynchronizer(nemo, 2, 2, {"root": root, "release_after_refit": True})
    for _ in range(3):
        actor.step()
        asyncio.run(synchronizer.sync_weights(actor.weights))
        for loaded in synchronizer.loaded:
            assert_same_bits(loaded, actor.state)
        assert actor.made == {0: 4, 1: 4}
    # The embedding alone fills the bucket of 1 KiB; the others have 256 + 16 + 8 bytes together.
    assert sorted(synchronizer.batches) == [1] * 6 + [3] * 6


def test_nemo_after_a_worker_missed_a_refit(nemo: str, root: str) -> None:
    """The version that it missed is not taken for the next one."""
    actor = Actor()
    synchronizer = NemoSynchronizer(nemo, 1, 1, {"root": root, "release_after_refit": True, "timeout_s": 0.3})
    asyncio.run(synchronizer.sync_weights(actor.weights))
    rollouts, synchronizer.rollouts = synchronizer.rollouts, []
    actor.step()
    asyncio.run(synchronizer.sync_weights(actor.weights))
    synchronizer.rollouts = rollouts
    actor.step()
    asyncio.run(synchronizer.sync_weights(actor.weights))
    assert_same_bits(synchronizer.loaded[0], actor.state)


def test_nemo_needs_a_preparation_before_every_refit(nemo: str, root: str) -> None:
    with pytest.raises(UsageError, match="release_after_refit is not set"):
        protocols.nemo_engine(nemo, bucket_size_bytes=1 << 20, engine_kwargs={"root": root})


def test_a_rollout_whose_version_never_comes_says_so(nemo: str, root: str) -> None:
    kwargs = {"root": root, "release_after_refit": True, "timeout_s": 0.2}
    synchronizer = NemoSynchronizer(nemo, 1, 1, kwargs)
    synchronizer.policy[0].send_weights = lambda weights: asyncio.sleep(0)
    with pytest.raises(StorageError, match="has no version of sync"):
        asyncio.run(synchronizer.sync_weights(Actor().weights))


def test_the_sync_is_named_in_the_version(verl: str, root: str) -> None:
    actor, manager = Actor(), VerlManager(verl, 1, 0, {"root": root})
    for step in (1, 2):
        asyncio.run(manager.update_weights(actor.weights, step))
    tokens = [reader_at(root).manifest(version).metadata["sync"] for version in (0, 1)]
    assert len(set(tokens)) == 2
