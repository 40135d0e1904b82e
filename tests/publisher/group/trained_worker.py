"""Four gloo ranks that train and publish, then two that go on: STORE OUT.

For each way to shard and each model, 20 AdamW steps on four ranks and 3 on two. OUT/KIND-RANK.json has what a rank saw;
rank 0's also whether a subscriber had exactly the whole state dict, gathered by torch itself, after each version.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.publisher.group.kit import keep_stores, warm
from tests.publisher.hooks.kit import tiny_qwen3
from weightcast.benchmarks.lab.traffic import CountedMessenger, traffic
from weightcast.publisher.group import GroupPublisher
from weightcast.schemas.settings import PublisherSettings
from weightcast.subscriber import Subscriber, Tensors

STEPS, MORE_STEPS = 20, 3
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dense() -> Any:
    """A small Qwen3 whose rows neither 2 nor 4 ranks divide evenly everywhere, with a tied head."""
    return tiny_qwen3(
        vocab_size=131, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2
    )


def experts() -> Any:
    """A small mixture of experts."""
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, moe_intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=6, num_experts_per_tok=2,
        max_position_embeddings=64, tie_word_embeddings=False, experts_implementation="eager",
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def sharded(model: Any, kind: str, ranks: int) -> tuple[Any, Any, int]:
    """The model as `kind` shards it; the mesh of a tensor-parallel dimension, if any; which data this rank has."""
    tensor_parallel = None
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
        data = mesh
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        data = mesh
    else:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        data, tensor_parallel = mesh["data"], mesh["tensor"]
        for layer in model.model.layers:
            attention = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
            plan = attention | {"self_attn.o_proj": RowwiseParallel()}
            if hasattr(layer.mlp, "up_proj"):
                plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
                plan |= {"mlp.down_proj": RowwiseParallel()}
            parallelize_module(layer, tensor_parallel, plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=data)
    return fully_shard(model, mesh=data), tensor_parallel, dist.get_rank() // (2 if tensor_parallel else 1)


def step(model: Any, optimizer: Any, data: int, tensor_parallel: Any, number: int) -> None:
    """One step; norms of heads see other heads on each tensor-parallel rank, so their gradients are added up."""
    ids = (torch.arange(16)[None] * (number + 3) + data) % 96
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    if tensor_parallel is not None:
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                dist.all_reduce(parameter.grad.to_local(), group=tensor_parallel.get_group())
    optimizer.step()


def whole(model: Any) -> dict[str, torch.Tensor]:
    """The state dict, gathered: for comparison only."""
    return {
        n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
        for n, v in model.state_dict().items()
    }


def run(kind: str, root: str, out: Path, ranks: int, start: Path | None) -> None:
    """Train and publish one model in one way."""
    way, _, size = kind.partition("-")
    model = dense() if size == "dense" else experts()
    model.to(torch.bfloat16)
    if start is not None:
        model.load_state_dict(torch.load(start))
    model, tensor_parallel, data = sharded(model, way, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False)
    messenger, collectives = CountedMessenger(30), 0
    publisher = GroupPublisher(root, messenger, PublisherSettings(threads=1, snapshot_every=0))
    said: dict[str, Any] = {"versions": [], "equal": [], "changed": [], "elements": 0}
    engine, subscriber, before = {}, None, None
    for number in range(STEPS if start is None else MORE_STEPS):
        if number or start is None:
            step(model, optimizer, data, tensor_parallel, number)
        with traffic() as counted:
            pending = publisher.publish(
                model.state_dict(), step=number, files={} if number else {"config.json": b"{}"}
            )
            assert pending is not None
            said["versions"].append(pending.wait(60).version)
        collectives += counted.calls
        expected = whole(model)
        if dist.get_rank() == 0:
            if subscriber is None:
                engine = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
                subscriber = Subscriber(root, Tensors(engine))
            subscriber.once()
            said["equal"].append(_equal(engine, expected))
            said["changed"].append(None if before is None else _changes(before, expected))
            before = expected
    said |= {"collectives": collectives, "nbytes": messenger.nbytes, "longest": messenger.longest}
    said["elements"] = publisher.elements
    publisher.close()
    if subscriber is not None:
        subscriber.close()
        torch.save(before, out / f"{kind}.pt")
    (out / f"{kind}-{ranks}-{dist.get_rank()}.json").write_text(json.dumps(said))


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[n].view(BITS[t.element_size()]), t.view(BITS[t.element_size()]))
        for n, t in expected.items()
    )


def _changes(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> int:
    """Elements whose bits differ; a tied head counts once."""
    names = [n for n in after if n != "lm_head.weight" or not _tied(after)]
    width = {n: BITS[after[n].element_size()] for n in names}
    return sum(int((before[n].view(width[n]) != after[n].view(width[n])).sum()) for n in names)


def _tied(tensors: dict[str, torch.Tensor]) -> bool:
    return torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


def rank(number: int, ranks: int, port: int, root: str, out: Path, kinds: list[str]) -> None:
    """One process."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=ranks)
    for kind in kinds:
        run(kind, f"{root}/{kind}", out, ranks, out / f"{kind}.pt" if ranks == 2 else None)
    dist.destroy_process_group()


def main(root: str, out: Path, kinds: list[str]) -> None:
    """Forked, so that torch is imported once. Ends with the number of ranks that failed."""
    context = multiprocessing.get_context("fork")
    dense(), experts()  # so that what they need is imported once
    warm()
    for ranks, port in zip((4, 2), keep_stores(2), strict=True):
        crew = [
            context.Process(target=rank, args=(n, ranks, port, root, out, kinds), daemon=True)
            for n in range(ranks)
        ]
        for process in crew:
            process.start()
        for process in crew:
            process.join()
        failed = sum(process.exitcode != 0 for process in crew)
        if failed:
            sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
