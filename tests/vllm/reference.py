"""Fresh engines, one process each: what a server says that was started on a checkpoint and never changed.

Run as a program it imports vLLM once and forks for each request line {"model", "options", "environment", "result"} of standard
input; the child builds an engine on that checkpoint, answers the probe, writes the result and ends. So a fresh process costs no imports.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any, Final

PROMPTS: Final = (
    "the sum of 3 and 4 is",
    "w12 the sum of",
    "is 7 w1 w2",
    " ".join(f"w{i}" for i in range(70)),  # some blocks of 32 tokens: the prefix cache holds it
)
TOKENS: Final = 20
LOGPROBS: Final = 5

ENGINE: Final[dict[str, Any]] = {
    "max_model_len": 384,
    "max_num_seqs": 32,
    "block_size": 32,
    "enforce_eager": True,
    "max_logprobs": 20,
    "seed": 0,
}

_MODULES: Final = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""Imported before the first fork; what is missing here only costs time."""


def answer(model: str, options: dict[str, Any]) -> list[Any]:
    """Token ids, and the log-probabilities of the five best at each place, for each prompt."""
    from vllm import LLM, SamplingParams

    engine = LLM(model, **(ENGINE | options))
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=LOGPROBS, ignore_eos=True)
    return [_row(engine.generate([prompt], greedy, use_tqdm=False)[0].outputs[0]) for prompt in PROMPTS]


def _row(output: Any) -> list[Any]:
    tops = [sorted((p.logprob for p in place.values()), reverse=True) for place in output.logprobs]
    chosen = [place[token].logprob for token, place in zip(output.token_ids, output.logprobs, strict=True)]
    return [list(output.token_ids), chosen, tops]


def _child(request: dict[str, Any]) -> None:
    import multiprocessing

    import vllm.v1.executor.multiproc_executor as executor

    executor.get_mp_context = lambda: multiprocessing.get_context("fork")  # ranks need no imports, either
    os.environ.update(request["environment"])  # vLLM and the plugin look when an engine is made
    rows = answer(request["model"], request["options"])
    temporary = request["result"] + ".tmp"
    with open(temporary, "w") as file:
        json.dump(rows, file)
    os.replace(temporary, request["result"])


def main() -> None:
    """Serve requests until standard input ends; a line "pid status" for each child that ended."""
    for name in _MODULES:
        importlib.import_module(name)
    # The protocol has standard output for itself; what engines print goes where errors go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            failed = True
            try:
                _child(request)
                failed = False
            finally:  # whatever happens, a child does not come back into this loop
                if failed:
                    traceback.print_exc()
                os._exit(failed)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": status}), file=answers, flush=True)


if __name__ == "__main__":
    main()
