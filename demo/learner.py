"""The trainer's side: fp32 masters under AdamW, a clipped policy gradient, and the bf16 weights to publish.

The gradient is like that of GRPO (Shao et al. 2024, arXiv:2402.03300), with a reward at each answer position:
an advantage is the reward less the mean of its group at that position, divided by their standard deviation.
Rollouts come from a bf16 policy that may be some versions old, so each token is weighted by the ratio of its
probability under the masters to that under the policy that sampled it, clipped as in PPO.

Letters in shape comments: N answers, A answer positions, T prompt and answer positions together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightcast.schemas.errors import UsageError

from .policy import Policy, PolicyConfig
from .rollout import Rollouts


@dataclass(frozen=True)
class LearnerConfig:
    """How the learner steps.

    Attributes:
        learning_rate: AdamW's, for the first half of the run.
        total_steps: length of the run; from its middle on the rate falls linearly.
        final_rate_fraction: what is left of the rate at the last step.
        betas: AdamW's decay rates of the two moments.
        weight_decay: AdamW's, decoupled.
        clip_low: a ratio below 1 - clip_low earns no further gradient where the advantage is negative.
        clip_high: a ratio above 1 + clip_high earns none where it is positive; larger than `clip_low` so that
            rare tokens can still grow (DAPO, Yu et al. 2025, arXiv:2503.14476).
        max_gradient_norm: the gradient is scaled down to this 2-norm.
    """

    learning_rate: float = 5e-4
    total_steps: int = 60
    final_rate_fraction: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_gradient_norm: float = 1.0

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        progress = min(1.0, max(0.0, 2 * step / self.total_steps - 1))
        return self.learning_rate * (1 - (1 - self.final_rate_fraction) * progress)


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step saw and did.

    Attributes:
        version: the learner's version after the step.
        reward: mean verified reward of the rollouts used, in [0, 1].
        solved: fraction of answers right at every position.
        staleness: mean age of the rollouts used, in versions.
        clipped: fraction of answer tokens whose gradient the ratio clip removed.
        gradient_norm: 2-norm before it was scaled down.
        learning_rate: AdamW's rate in this step.
        changed: elements of the bf16 weights whose bits differ from the version before.
        elements: elements of the bf16 weights.
    """

    version: int
    reward: float
    solved: float
    staleness: float
    clipped: float
    gradient_norm: float
    learning_rate: float
    changed: int
    elements: int

    @property
    def changed_fraction(self) -> float:
        """The changed part of the bf16 elements, in [0, 1]."""
        return self.changed / self.elements


class Learner:
    """Owns the masters and the optimizer; `version` counts its steps.

    Not thread-safe. Two learners with the same seed, configuration and rollouts make the same bits on one
    machine with one number of threads.
    """

    def __init__(self, policy: PolicyConfig, config: LearnerConfig | None = None, *, seed: int = 0) -> None:
        self.config = config or LearnerConfig()
        self.policy = Policy(policy, seed=seed)
        self.version = 0
        self._optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self.config.learning_rate,
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
        )
        self._published = self.bf16_state()

    def bf16_state(self) -> dict[str, Tensor]:
        """Return the weights to publish: the masters rounded to the nearest bf16, ties to even.

        The tensors are new copies, so the next step does not change them.
        """
        return {name: master.detach().to(torch.bfloat16) for name, master in self.policy.state_dict().items()}

    def step(self, rollouts: Sequence[Rollouts]) -> StepStats:
        """Take one optimizer step on all given batches together.

        Args:
            rollouts: batches of one task, at least one, none of a version after the learner's.

        Raises:
            UsageError: no batch, batches of different shapes, or one from the future.
        """
        self._check(rollouts)
        rate = self.config.rate(self.version)
        clipped = self._backward(rollouts)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_gradient_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        staleness = _mean(rollouts, [float(self.version - batch.version) for batch in rollouts])
        self.version += 1
        return StepStats(
            version=self.version,
            reward=_mean(rollouts, [batch.mean_reward for batch in rollouts]),
            solved=_mean(rollouts, [batch.solved for batch in rollouts]),
            staleness=staleness,
            clipped=clipped,
            gradient_norm=float(norm),
            learning_rate=rate,
            changed=self._count_changed(),
            elements=sum(weights.numel() for weights in self._published.values()),
        )

    def _check(self, rollouts: Sequence[Rollouts]) -> None:
        """Refuse batches that cannot be trained on together."""
        shapes = {(batch.tokens.shape[1], batch.prompt_length) for batch in rollouts}
        if len(shapes) != 1:
            raise UsageError(f"a step needs batches of one sequence and prompt length, got {sorted(shapes)}")
        newest = max(batch.version for batch in rollouts)
        if newest > self.version:
            raise UsageError(f"rollouts are of version {newest}, but the learner is at {self.version}")

    def _backward(self, rollouts: Sequence[Rollouts]) -> float:
        """Fill the gradients from the clipped objective; return the fraction of tokens that were clipped."""
        advantages_NA = torch.cat([advantages(batch.rewards, batch.group_size) for batch in rollouts])
        behaviour_NA = torch.cat([batch.logprobs for batch in rollouts])
        tokens_NT = torch.cat([batch.tokens for batch in rollouts])
        logprobs_NA = self.policy.answer_logprobs(tokens_NT, rollouts[0].prompt_length)
        ratio_NA = (logprobs_NA - behaviour_NA).exp()
        bounded_NA = ratio_NA.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        free_NA, held_NA = ratio_NA * advantages_NA, bounded_NA * advantages_NA
        self._optimizer.zero_grad()
        torch.autograd.backward(-torch.minimum(free_NA, held_NA).mean())
        return float((held_NA < free_NA).float().mean())

    def _count_changed(self) -> int:
        """Count the bf16 elements whose bits the step changed, and keep the new ones for the next count."""
        old, self._published = self._published, self.bf16_state()
        return sum(
            int((weights.view(torch.int16) != old[name].view(torch.int16)).sum())
            for name, weights in self._published.items()
        )


def advantages(rewards_NA: Tensor, group_size: int) -> Tensor:
    """Return the rewards normalised in each group of `group_size` rows, position by position, fp32 [N, A].

    Where all answers of a group earn the same, there is nothing to learn and the advantage is zero.
    """
    grouped = rewards_NA.reshape(-1, group_size, rewards_NA.shape[1])
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    spread = grouped.std(dim=1, keepdim=True, correction=0)
    return (centred / spread.clamp_min(1e-4)).reshape_as(rewards_NA)  # 1e-4: far below any spread that occurs


def _mean(rollouts: Sequence[Rollouts], values: Sequence[float]) -> float:
    """Return the mean of one value a batch, weighted by the answers in it."""
    sizes = [batch.tokens.shape[0] for batch in rollouts]
    return sum(size * value for size, value in zip(sizes, values, strict=True)) / sum(sizes)
