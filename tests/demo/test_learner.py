"""The learner publishes exactly rounded weights, and its reward rises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightcast.demo.learner import Learner, LearnerConfig, StepStats, advantages
from weightcast.demo.policy import PolicyConfig, inference_copy
from weightcast.demo.rollout import rollout
from weightcast.demo.task import ReverseTask
from weightcast.schemas.errors import UsageError


def train(learner: Learner, task: ReverseTask, steps: int, *, staleness: int = 0) -> list[StepStats]:
    """Take `steps` steps, each on 512 answers of the weights `staleness` versions ago."""
    actor, rng = inference_copy(learner.policy.config), torch.Generator().manual_seed(11)
    history, stats = [learner.bf16_state()], []
    for _ in range(steps):
        version = max(0, learner.version - staleness)
        actor.load_state_dict(history[version])
        stats.append(learner.step([rollout(actor, task, rng, version)]))
        history.append(learner.bf16_state())
    return stats


def nearest_even(bits: np.ndarray) -> np.ndarray:
    """Round finite fp32 bit patterns to bf16 ones, ties to an even last bit."""
    wide = bits.astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def test_bf16_state_is_the_masters_rounded_to_nearest_even(config: PolicyConfig, task: ReverseTask) -> None:
    learner = Learner(config)
    train(learner, task, 2)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, -0x80000000, 0x00008000, 0x00018000])
    norm = learner.policy.state_dict()["model.norm.weight"]
    norm[: len(ties)] = ties.to(torch.int32).view(torch.float32)
    state = learner.bf16_state()
    assert state.keys() == learner.policy.state_dict().keys()
    for name, master in learner.policy.state_dict().items():
        expected = nearest_even(master.numpy().view(np.uint32))
        assert state[name].dtype == torch.bfloat16
        assert np.array_equal(state[name].view(torch.int16).numpy().view(np.uint16), expected), name
    rounded = state["model.norm.weight"][: len(ties)].view(torch.int16).numpy().view(np.uint16)
    assert rounded.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x8000, 0x0000, 0x0002]


def test_bf16_state_is_a_copy_that_a_step_leaves_alone(config: PolicyConfig, task: ReverseTask) -> None:
    learner = Learner(config)
    state = learner.bf16_state()
    before = {name: weights.clone() for name, weights in state.items()}
    (stats,) = train(learner, task, 1)
    now = learner.bf16_state()
    assert all(torch.equal(state[name].view(torch.int16), before[name].view(torch.int16)) for name in state)
    changed = sum(int((now[name].view(torch.int16) != state[name].view(torch.int16)).sum()) for name in now)
    assert (stats.changed, stats.elements) == (changed, sum(weights.numel() for weights in now.values()))
    assert 0 < stats.changed < stats.elements


def test_reward_rises_on_stale_rollouts(config: PolicyConfig, task: ReverseTask) -> None:
    learner = Learner(config, LearnerConfig(learning_rate=2e-3, total_steps=50), seed=3)
    stats = train(learner, task, 50, staleness=2)
    assert stats[0].reward < 0.35
    assert stats[-1].reward > 0.8
    assert [one.staleness for one in stats[:4]] == [0.0, 1.0, 2.0, 2.0]
    assert [one.version for one in stats] == list(range(1, 51))


def test_the_same_seed_makes_the_same_bits(config: PolicyConfig, task: ReverseTask) -> None:
    states = []
    for _ in range(2):
        learner = Learner(config, seed=4)
        train(learner, task, 2, staleness=1)
        states.append(learner.bf16_state())
    assert all(torch.equal(states[0][k].view(torch.int16), states[1][k].view(torch.int16)) for k in states[0])


def test_advantages_compare_within_group_and_position() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    expected = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [-1.0, 1.0], [1.0, -1.0]])
    assert torch.equal(advantages(rewards, group_size=2), expected)


def test_the_rate_holds_and_then_falls_to_its_fraction() -> None:
    config = LearnerConfig(learning_rate=1.0, total_steps=100, final_rate_fraction=0.1)
    assert [config.rate(step) for step in (0, 50, 75, 100, 200)] == pytest.approx([1.0, 1.0, 0.55, 0.1, 0.1])


def test_a_step_refuses_no_rollouts_and_future_ones(config: PolicyConfig, task: ReverseTask) -> None:
    learner = Learner(config)
    ahead = rollout(inference_copy(config), task, torch.Generator(), version=1)
    with pytest.raises(UsageError, match="needs batches"):
        learner.step([])
    with pytest.raises(UsageError, match="version 1, but the learner is at 0"):
        learner.step([ahead])
