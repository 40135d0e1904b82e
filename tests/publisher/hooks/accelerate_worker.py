"""Two ranks of a run under accelerate, for each mode: FOLDER MODE...

In FOLDER/MODE, RANK.json has the versions that a rank published, whether its parameters are sharded, its error; rank 0
writes whole.pt, the state dict at the end, gathered by torch itself. The stream is in `store`. accelerate shards on
accelerators only, so FSDP2 is applied as it would. Ranks are forks, told what torch's launcher would tell them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from tests.faultstore import FaultStore, refuse
from tests.publisher.group.kit import warm
from tests.publisher.hooks import trainer_worker
from tests.publisher.hooks.kit import sharded, tiny_qwen3
from weightcast.manifest.store import open_store
from weightcast.publisher.group import GroupPublisher
from weightcast.publisher.hooks.accelerate import AcceleratePublisher
from weightcast.schemas.errors import WeightcastError

RANKS = 2


def rank(number: int, port: int, mode: str, out: Path) -> None:
    """One process."""
    told = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ |= {name: str(value) for name, value in told.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if mode == "trainer":
        trainer_worker.train(number, out)
    else:
        train(mode, out)


def train(mode: str, out: Path) -> None:
    """Train three steps and publish after each."""
    accelerator = Accelerator(cpu=True)
    model = tiny_qwen3(vocab_size=63, tie_word_embeddings=False)
    model = sharded(model) if mode.startswith("fsdp2") else accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    root = str(out / "store")
    store = FaultStore(open_store(root))
    broken = mode == "fsdp2-broken"
    group = GroupPublisher("", store=store) if broken else None
    publisher = AcceleratePublisher(accelerator, group if group is not None else root)
    versions: list[int] = []
    error = None
    for step in range(3):
        ids = torch.arange(8)[None] + accelerator.process_index
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        if broken and step == 1 and not accelerator.is_main_process:
            store.on("put", "data/*", refuse)
        try:
            versions.append(publisher.publish(model, step=step).wait().version)
        except WeightcastError as failure:
            error = str(failure)
            store.heal()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    publisher.close()
    if group is not None:
        group.close()
    parts = [p.to_local().numel() / p.numel() for p in model.parameters() if isinstance(p, DTensor)]
    said = {"versions": versions, "parts": parts, "error": error}
    (out / f"{accelerator.process_index}.json").write_text(json.dumps(said))
    if accelerator.is_main_process:
        torch.save({name.removeprefix("module."): tensor for name, tensor in whole.items()}, out / "whole.pt")
    accelerator.end_training()


def main(folder: Path, modes: list[str]) -> None:
    """One mode after the other. Ends with the number of ranks that failed."""
    context = multiprocessing.get_context("fork")
    torch.optim.AdamW(tiny_qwen3().parameters())  # so that what they need is imported once,
    warm()  # and the loops over elements are loaded once
    failed = 0
    for mode in modes:
        (folder / mode).mkdir()
        crew = [
            context.Process(target=rank, args=(number, port, mode, folder / mode))
            for port in [free_port()]
            for number in range(RANKS)
        ]
        for process in crew:
            process.start()
        for process in crew:
            process.join()
        failed += sum(process.exitcode != 0 for process in crew)
    sys.exit(failed)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
