"""Rollouts: what a rollout process generates, and the bytes in which it hands them to the trainer.

The encoding is safetensors: flat tensors under fixed names, so nothing is ever unpickled.
Letters in shape comments: N answers, A answer positions, T prompt and answer positions together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from weightcast.schemas.errors import Corrupt, UsageError

from .policy import Policy
from .task import ReverseTask

HINT: Final = "drop the file; the rollout process writes the next one"
_DTYPES: Final = {
    "tokens": torch.int16,
    "logprobs": torch.float32,
    "rewards": torch.float32,
    "group_size": torch.int64,
    "version": torch.int64,
}


@dataclass(frozen=True, eq=False)
class Rollouts:
    """A batch of sampled answers; the answers to one prompt lie next to each other.

    Attributes:
        tokens: int64 [N, T], prompt and answer.
        logprobs: fp32 [N, A], of the answer tokens, under the bf16 policy that sampled them.
        rewards: fp32 [N, A], the verified reward of each answer position, in [0, 1].
        group_size: answers to each prompt; divides N.
        version: the learner's version whose weights sampled the batch.
    """

    tokens: Tensor
    logprobs: Tensor
    rewards: Tensor
    group_size: int
    version: int

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise UsageError(f"rollouts of version {self.version}: {problem}")

    @property
    def prompt_length(self) -> int:
        """Tokens in each prompt."""
        return int(self.tokens.shape[1] - self.rewards.shape[1])

    @property
    def mean_reward(self) -> float:
        """The mean over all answers and positions, in [0, 1]."""
        return float(self.rewards.mean())

    @property
    def solved(self) -> float:
        """The fraction of answers that are right at every position."""
        return float((self.rewards == 1).all(dim=1).float().mean())

    def _problem(self) -> str:
        """Say in what way the parts do not fit each other, or return ""."""
        if self.tokens.dim() != 2 or self.rewards.dim() != 2 or self.rewards.shape != self.logprobs.shape:
            return (
                f"tokens {list(self.tokens.shape)}, log-probabilities {list(self.logprobs.shape)} and "
                f"rewards {list(self.rewards.shape)} do not have the shapes [N, T], [N, A] and [N, A]"
            )
        if self.tokens.shape[0] != self.rewards.shape[0]:
            return f"{self.tokens.shape[0]} token rows, but {self.rewards.shape[0]} reward rows"
        if not 0 < self.rewards.shape[1] < self.tokens.shape[1]:
            return f"{self.rewards.shape[1]} answer tokens in sequences of {self.tokens.shape[1]}"
        if self.group_size < 2 or self.tokens.shape[0] == 0 or self.tokens.shape[0] % self.group_size:
            return f"{self.tokens.shape[0]} answers do not split into groups of {self.group_size}"
        if self.version < 0:
            return "the version is negative"
        return self._value_problem()

    def _value_problem(self) -> str:
        """Say which values are outside their range, or return ""."""
        if not bool(((self.tokens >= 0) & (self.tokens <= torch.iinfo(torch.int16).max)).all()):
            return "a token id is outside 0 … 32767"
        if not bool((torch.isfinite(self.logprobs) & (self.logprobs <= 0)).all()):
            return "a log-probability is positive or not finite"
        if not bool(((self.rewards >= 0) & (self.rewards <= 1)).all()):
            return "a reward is outside [0, 1]"
        return ""


def rollout(
    policy: Policy,
    task: ReverseTask,
    rng: torch.Generator,
    version: int,
    *,
    prompts: int = 64,
    group_size: int = 8,
) -> Rollouts:
    """Sample and score `group_size` answers to each of `prompts` random prompts.

    Args:
        policy: the process's own copy, at the weights of `version`; only read.
        task: gives the prompts and checks the answers.
        rng: source of all randomness; advanced by the call.
        version: the learner's version of the policy's weights.
        prompts: number of different draws of a prompt.
        group_size: answers to each; at least 2, or no answer has one to be compared with.
    """
    asked = task.prompts(prompts, rng).repeat_interleave(group_size, dim=0)
    answer = policy.generate(asked, task.answer_length, rng=rng)
    return Rollouts(
        tokens=torch.cat([asked, answer.tokens], dim=1),
        logprobs=answer.logprobs,
        rewards=task.score(asked, answer.tokens),
        group_size=group_size,
        version=version,
    )


def encode(rollouts: Rollouts) -> bytes:
    """Return the safetensors bytes of `rollouts`; token ids take two bytes each."""
    parts = {
        "tokens": rollouts.tokens.to(torch.int16),
        "logprobs": rollouts.logprobs,
        "rewards": rollouts.rewards,
        "group_size": torch.tensor([rollouts.group_size]),
        "version": torch.tensor([rollouts.version]),
    }
    return bytes(save({name: part.contiguous() for name, part in parts.items()}))


def decode(data: bytes) -> Rollouts:
    """Return the rollouts that `encode` wrote, bit for bit.

    Raises:
        Corrupt: the bytes are no safetensors file, or hold tensors, dtypes, shapes or values that do not fit.
    """
    try:
        parts = load(data)
    except SafetensorError as error:
        raise Corrupt(f"rollouts of {len(data)} bytes are no safetensors file: {error}", hint=HINT) from error
    found = {name: part.dtype for name, part in parts.items()}
    if found != _DTYPES:
        raise Corrupt(f"rollouts hold {found}, expected {_DTYPES}", hint=HINT)
    if parts["group_size"].numel() != 1 or parts["version"].numel() != 1:
        raise Corrupt("rollouts hold a group size or a version that is not one number", hint=HINT)
    try:
        return Rollouts(
            tokens=parts["tokens"].long(),
            logprobs=parts["logprobs"],
            rewards=parts["rewards"],
            group_size=int(parts["group_size"].item()),
            version=int(parts["version"].item()),
        )
    except UsageError as error:
        raise Corrupt(error.message, hint=HINT) from error
