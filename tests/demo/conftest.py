"""A task and a policy small enough for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weightcast.demo.policy import PolicyConfig
from weightcast.demo.task import ReverseTask


@pytest.fixture
def task() -> ReverseTask:
    return ReverseTask(digits=2, base=4)


@pytest.fixture
def config(task: ReverseTask) -> PolicyConfig:
    return PolicyConfig(
        vocab_size=task.vocab_size,
        max_positions=task.prompt_length + task.answer_length,
        width=64,
        mlp_width=128,
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, so that results do not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
