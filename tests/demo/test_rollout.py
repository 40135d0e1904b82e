"""Rollouts keep every bit on their way to the trainer, and nothing else passes for rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from weightcast.demo.policy import PolicyConfig, inference_copy
from weightcast.demo.rollout import Rollouts, decode, encode, rollout
from weightcast.demo.spool import MAX_FILE_BYTES, Spool
from weightcast.demo.task import ReverseTask
from weightcast.schemas.errors import Corrupt, UsageError


@pytest.fixture
def batch(config: PolicyConfig, task: ReverseTask) -> Rollouts:
    rng = torch.Generator().manual_seed(5)
    return rollout(inference_copy(config), task, rng, version=17, prompts=6, group_size=4)


def assert_same(got: Rollouts, expected: Rollouts) -> None:
    assert got.tokens.dtype == expected.tokens.dtype == torch.int64
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.equal(got.logprobs.view(torch.int32), expected.logprobs.view(torch.int32))
    assert torch.equal(got.rewards.view(torch.int32), expected.rewards.view(torch.int32))
    assert (got.group_size, got.version) == (expected.group_size, expected.version)


def test_a_batch_has_groups_of_one_prompt_and_checked_rewards(batch: Rollouts, task: ReverseTask) -> None:
    prompts, answers = batch.tokens[:, : task.prompt_length], batch.tokens[:, task.prompt_length :]
    assert batch.tokens.shape == (24, 5)
    assert batch.prompt_length == task.prompt_length
    assert torch.equal(prompts, prompts[::4].repeat_interleave(4, dim=0))
    assert torch.equal(batch.rewards, (answers == prompts[:, :2].flip(1)).float())


def test_mean_reward_and_solved_count_positions_and_answers() -> None:
    rewards = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    tokens = torch.zeros(4, 5, dtype=torch.int64)
    batch = Rollouts(tokens, torch.zeros(4, 2), rewards, group_size=2, version=0)
    assert (batch.mean_reward, batch.solved) == (0.625, 0.5)


def test_encoding_round_trip_is_bit_for_bit(batch: Rollouts) -> None:
    assert_same(decode(encode(batch)), batch)
    assert encode(decode(encode(batch))) == encode(batch)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_corrupt(batch: Rollouts, keep: int) -> None:
    with pytest.raises(Corrupt, match="no safetensors file"):
        decode(encode(batch)[:keep])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", torch.zeros(24, 5), "expected"),
        ("extra", torch.zeros(1), "expected"),
        ("tokens", torch.full((24, 5), -1, dtype=torch.int16), "token id"),
        ("tokens", torch.zeros(24, 2, dtype=torch.int16), "answer tokens"),
        ("tokens", torch.zeros(23, 5, dtype=torch.int16), "token rows"),
        ("rewards", torch.full((24, 2), 1.5), "reward is outside"),
        ("rewards", torch.zeros(24, 3), "shapes"),
        ("logprobs", torch.full((24, 2), float("nan")), "log-probability"),
        ("logprobs", torch.full((24, 2), 0.5), "log-probability"),
        ("group_size", torch.tensor([5]), "groups of 5"),
        ("version", torch.tensor([-1]), "negative"),
        ("version", torch.tensor([1, 2]), "not one number"),
    ],
)
def test_what_does_not_fit_is_corrupt(batch: Rollouts, name: str, value: torch.Tensor, message: str) -> None:
    parts = load(encode(batch)) | {name: value}
    with pytest.raises(Corrupt, match=message):
        decode(save(parts))


def test_the_spool_hands_over_each_batch_once_in_order(batch: Rollouts, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    spool.put(batch, worker="b", sequence=10)
    spool.put(batch, worker="a-b", sequence=9)
    assert [spool.waiting(worker) for worker in ("a", "b", "a-b")] == [0, 1, 1]
    first = spool.take()
    assert first is not None
    assert_same(first, batch)
    assert [spool.waiting("b"), spool.waiting("a-b")] == [1, 0]
    assert spool.take() is not None
    assert spool.take() is None
    assert list(spool.folder.iterdir()) == []


def test_the_spool_does_not_see_a_half_written_batch(batch: Rollouts, tmp_path: Path) -> None:
    whole = Spool(tmp_path).put(batch, worker="a", sequence=0)
    whole.rename(tmp_path / f".{whole.name}.tmp")
    assert Spool(tmp_path).take() is None
    assert Spool(tmp_path).waiting("a") == 0


@pytest.mark.parametrize("size", [10, MAX_FILE_BYTES + 1])
def test_the_spool_removes_what_it_cannot_use(tmp_path: Path, size: int) -> None:
    bad = tmp_path / "000000000000-a.safetensors"
    with bad.open("wb") as file:
        file.truncate(size)
    with pytest.raises(Corrupt):
        Spool(tmp_path).take()
    assert not bad.exists()


@pytest.mark.parametrize(("worker", "sequence"), [("../a", 0), ("", 0), ("a", -1)])
def test_the_spool_refuses_names_that_lead_elsewhere(
    batch: Rollouts, tmp_path: Path, worker: str, sequence: int
) -> None:
    with pytest.raises(UsageError, match="expected a name and a count"):
        Spool(tmp_path).put(batch, worker=worker, sequence=sequence)
    assert list(tmp_path.iterdir()) == []
