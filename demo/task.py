"""The task: write a short string of digits backwards. A few lines of code can check an answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightcast.schemas.errors import UsageError


@dataclass(frozen=True)
class ReverseTask:
    """Prompt `d1 d2 … dn =`, answer `dn … d2 d1`.

    Token ids below `base` are the digits, and id `base` is the equals sign. At 3 digits to base 10 there are
    1000 prompts, and a random policy is right at about one position in eleven.

    Attributes:
        digits: length of the string, in tokens; at least 1.
        base: number of different digits; at least 2.
    """

    digits: int = 3
    base: int = 10

    def __post_init__(self) -> None:
        if self.digits < 1 or self.base < 2:
            raise UsageError(f"a task of {self.digits} digits to base {self.base} has nothing to learn")

    @property
    def vocab_size(self) -> int:
        """Number of token ids: the digits and the equals sign."""
        return self.base + 1

    @property
    def prompt_length(self) -> int:
        """Tokens in a prompt."""
        return self.digits + 1

    @property
    def answer_length(self) -> int:
        """Tokens in an answer."""
        return self.digits

    def prompts(self, count: int, rng: torch.Generator) -> Tensor:
        """Return `count` random prompts, int64 [count, prompt_length]; advances `rng`."""
        digits = torch.randint(0, self.base, (count, self.digits), generator=rng)
        return torch.cat([digits, torch.full((count, 1), self.base)], dim=1)

    def solutions(self, prompts: Tensor) -> Tensor:
        """Return the right answers, int64 [B, answer_length]."""
        return prompts[:, : self.digits].flip(1)

    def score(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """Return the verified reward of each answer position, fp32 [B, answer_length]: 1 where right, else 0.

        The reward of an answer is the mean over its positions, so it lies in [0, 1].

        Raises:
            UsageError: the answers do not have the shape that the prompts ask for.
        """
        solutions = self.solutions(prompts)
        if answers.shape != solutions.shape:
            raise UsageError(f"answers have shape {list(answers.shape)}, expected {list(solutions.shape)}")
        return (answers == solutions).float()
