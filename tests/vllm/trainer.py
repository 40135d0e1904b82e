"""TRL's asynchronous GRPO on a CPU, in a process and an environment of its own: MODEL SERVER ROOT FOLDER STEPS.

It publishes before the first step and after each. Rollouts are TRL's own, which ask the vLLM server at SERVER; each is
written to FOLDER/rollouts.jsonl with its stamps. At every version that a subscriber holds, the trainer leaves what it has itself
in FOLDER/VERSION.safetensors, then waits for the file FOLDER/VERSION.go.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_rollout_worker, packing
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from tests.publisher.hooks.attention import Attention
from weightcast.manifest.staleness import Stamp
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.publisher.hooks.transformers import companions
from weightcast.publisher.hooks.trl import WeightTransfer

HELD_S = 400.0
"""For the server to start and a sidecar to bring it to a version, on a busy machine; and for the test to look at it."""


def reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """The share of digits in what was said."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts]


class StampedLoop(_AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's rollouts, through the one route of vLLM's that says which weights made each token."""

    def __init__(self, *, root: str, record: str, **known: Any) -> None:
        super().__init__(**known)
        self._root = root
        self._record = Path(record)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        live = [self.model_version]
        sampling = {"max_tokens": self.max_tokens, "temperature": self.temperature, "logprobs": 0}
        payload = {"model": self.model_name, "token_ids": prompt_ids, "sampling_params": sampling}
        answer = await self._post("/inference/v1/generate", payload, self.request_timeout, max_retries=30)
        live.append(self.model_version)
        choice = answer["choices"][0]
        logprobs = [place["logprob"] for place in choice["logprobs"]["content"]]
        spans = choice["weight_versions"]
        rollout = {
            "live": live,  # the versions that TRL took for live, before and after
            "prompt": prompt_ids,
            "tokens": choice["token_ids"],
            "logprobs": logprobs,
            "spans": [
                (span["start"], span["end"], stamp(self._root, int(span["version"]))) for span in spans
            ],
        }
        with self._record.open("a") as file:
            file.write(json.dumps(rollout) + "\n")
        return choice["token_ids"], logprobs


class StampedWorker(AsyncRolloutWorker):  # type: ignore[misc]
    """Runs the loop above."""

    _loop_cls = StampedLoop


@cache
def stamp(root: str, version: int) -> dict[str, Any]:
    """The stamp of a version that an engine named."""
    return Stamp.of(StreamReader.open(open_store(root)).position(version)).to_dict()


def main(model: str, server: str, root: str, folder: Path, steps: int) -> None:
    """Train."""
    torch.cuda.get_device_name = lambda device=None: "cpu"  # asked for its FLOPs
    packing._flash_attn = Attention
    async_rollout_worker.is_vllm_available = lambda *_: True  # not here: rollouts only talk HTTP
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = qwen3_chat_template
    arguments = AsyncGRPOConfig(
        output_dir=str(folder / "run"),
        max_steps=steps,
        learning_rate=4e-3,  # versions that can be told apart by what they say
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        max_staleness=0,  # each step needs rollouts of the version before it
        queue_maxsize=8,
        token_budget=0,  # a fixed count of samples a step
        vllm_server_base_url=server,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    prompts = [f"the sum of {i} and {i + 1} is" for i in range(16)]
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in prompts])
    with Publisher(root, PublisherSettings(threads=1, cast={"*": "BF16"})) as publisher:

        def reached(version: int) -> None:
            publisher.wait_for(version, subscribers=1, timeout=HELD_S)
            own = {name: p.detach().to(torch.bfloat16) for name, p in trainer.model.named_parameters()}
            save_file(own, folder / "writing")
            (folder / "writing").rename(folder / f"{version}.safetensors")
            until = time.monotonic() + HELD_S
            while not (folder / f"{version}.go").exists():
                if time.monotonic() > until:
                    raise TimeoutError(f"nobody looked at version {version} within {HELD_S} s")
                time.sleep(0.05)

        worker = StampedWorker(
            model_name="m",
            dataset=dataset,
            reward_funcs=[reward],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=arguments.num_generations,
            max_inflight_tasks=8,
            queue_maxsize=arguments.queue_maxsize,
            score_queue_maxsize=1,  # what waits there for long would be too old
            vllm_server_url=server,
            max_tokens=arguments.max_completion_length,
            root=root,
            record=str(folder / "rollouts.jsonl"),
        )
        trainer = AsyncGRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=dataset,
            processing_class=tokenizer,
            rollout_worker=worker,
            weight_transfer=WeightTransfer(
                publisher,
                step=lambda: trainer.state.global_step,
                reached=reached,
                files=lambda: companions(trainer.model, tokenizer),
            ),
        )
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
