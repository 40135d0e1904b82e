"""What a run of the demo is made of; both sides of a stream are built from the same values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:  # torch takes seconds to import, in which the rollout processes can start
    from .learner import LearnerConfig
    from .policy import PolicyConfig
    from .task import ReverseTask

WORKERS: Final = ("a", "b")
"""Names of the two subscribers."""

TRAINER_THREADS: Final = 1
"""Threads that the trainer computes with. The subscribers generate meanwhile, on one each, and what a publish leaves to
be done after it returned runs beside the next step."""

VICTIM: Final = "b"
"""The subscriber that is killed and started again on the way."""

Positive = Annotated[int, Field(gt=0)]


class DemoConfig(BaseModel):
    """Sizes, rates and the script of a run.

    Attributes:
        steps: optimizer steps; each is published as a version of its own.
        seed: of the masters and of all sampling.
        digits, base: of the task.
        width, layers, heads, mlp_width: of the policy.
        learning_rate: AdamW's; the learner lowers it in the second half of the run.
        prompts, group_size: of the batch that each subscriber makes of each version.
        max_staleness: versions that a batch may be behind when it is trained on. It is mostly 1, see
            `lead`; 2 leaves room for delays.
        lead: batches that a subscriber may make beyond one for each step. With 1 it generates from the newest
            version while the trainer makes the next; with 0 both would wait for each other.
        poll_s: seconds between a subscriber's polls.
        kill_at: the fraction of the steps after which one subscriber is killed.
        down: versions that pass before it is started again.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    steps: Positive = 60
    seed: int = 0
    digits: Positive = 3
    base: Positive = 10
    width: Positive = 192
    layers: Positive = 2
    heads: Positive = 4
    mlp_width: Positive = 384
    learning_rate: float = 8e-4
    prompts: Positive = 32
    group_size: Positive = 8
    max_staleness: int = 2
    lead: int = 1
    poll_s: float = 0.1
    kill_at: float = 0.3
    down: Positive = 3

    @property
    def task(self) -> ReverseTask:
        """The task that prompts are drawn from."""
        from .task import ReverseTask

        return ReverseTask(digits=self.digits, base=self.base)

    @property
    def policy(self) -> PolicyConfig:
        """The policy's sizes."""
        from .policy import PolicyConfig

        task = self.task
        return PolicyConfig(
            vocab_size=task.vocab_size,
            max_positions=task.prompt_length + task.answer_length,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            mlp_width=self.mlp_width,
        )

    @property
    def learner(self) -> LearnerConfig:
        """How the learner steps."""
        from .learner import LearnerConfig

        return LearnerConfig(learning_rate=self.learning_rate, total_steps=self.steps)

    @property
    def kill_step(self) -> int:
        """The learner's version at which the victim is killed."""
        return max(1, round(self.kill_at * self.steps))

    @property
    def restart_step(self) -> int:
        """The learner's version at which it is started again."""
        return min(self.kill_step + self.down, self.rejoin_step)

    @property
    def rejoin_step(self) -> int:
        """The learner's version that waits for the victim's return, so that every run shows it."""
        return max(self.kill_step, self.steps - max(1, self.steps // 6))
