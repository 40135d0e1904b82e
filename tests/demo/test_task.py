"""The task's checker gives each answer position its due."""

from __future__ import annotations

import pytest
import torch

from weightcast.demo.task import ReverseTask
from weightcast.schemas.errors import UsageError


def test_prompts_are_digits_and_an_equals_sign() -> None:
    task = ReverseTask(digits=4, base=5)
    prompts = task.prompts(200, torch.Generator().manual_seed(1))
    assert prompts.shape == (200, task.prompt_length) == (200, 5)
    assert set(prompts[:, :4].flatten().tolist()) == {0, 1, 2, 3, 4}
    assert set(prompts[:, 4].tolist()) == {5} == {task.vocab_size - 1}


def test_prompts_follow_the_generator() -> None:
    task = ReverseTask()
    first, second = (task.prompts(8, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)


def test_the_solution_is_the_prompt_backwards() -> None:
    assert ReverseTask().solutions(torch.tensor([[3, 1, 7, 10]])).tolist() == [[7, 1, 3]]


@pytest.mark.parametrize(
    ("answer", "score"),
    [([7, 1, 3], [1, 1, 1]), ([3, 1, 7], [0, 1, 0]), ([7, 7, 7], [1, 0, 0]), ([10, 10, 10], [0, 0, 0])],
)
def test_score_judges_each_position(answer: list[int], score: list[int]) -> None:
    got = ReverseTask().score(torch.tensor([[3, 1, 7, 10]]), torch.tensor([answer]))
    assert got.dtype == torch.float32
    assert got.tolist() == [score]


def test_an_answer_of_another_length_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\[1, 2\], expected \[1, 3\]"):
        ReverseTask().score(torch.tensor([[3, 1, 7, 10]]), torch.tensor([[7, 1]]))


@pytest.mark.parametrize(("digits", "base"), [(0, 10), (3, 1)])
def test_a_task_with_nothing_to_learn_is_refused(digits: int, base: int) -> None:
    with pytest.raises(UsageError, match="nothing to learn"):
        ReverseTask(digits=digits, base=base)
