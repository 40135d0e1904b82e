"""Trainer layouts and their converters, small re-creations of those of Megatron, GPT-2 and mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

Tensors = Mapping[str, torch.Tensor]
Pairs = Iterator[tuple[str, torch.Tensor]]


def random(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Any bits, NaNs among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed + count)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


@dataclass(frozen=True)
class Megatron:
    """A layer as Megatron keeps it on one of `ranks` tensor-parallel ranks.

    Rows of `qkv` are interleaved: for each group the heads of its queries, its key, its value. Rows of `gate_up` are the
    rank's gate rows, then its up rows. The vocabulary is padded to a multiple of 8 for each rank.
    """

    ranks: int = 1
    groups: int = 4
    heads: int = 8
    size: int = 6
    hidden: int = 10
    wide: int = 16
    vocabulary: int = 21

    @property
    def padded(self) -> int:
        return -(-self.vocabulary // (8 * self.ranks)) * 8 * self.ranks

    def whole(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The checkpoint."""
        shapes = {
            "embed.weight": (self.vocabulary, self.hidden),
            "q.weight": (self.heads * self.size, self.hidden),
            "k.weight": (self.groups * self.size, self.hidden),
            "v.weight": (self.groups * self.size, self.hidden),
            "q.bias": (self.heads * self.size,),
            "k.bias": (self.groups * self.size,),
            "v.bias": (self.groups * self.size,),
            "o.weight": (self.hidden, self.heads * self.size),
            "gate.weight": (self.wide, self.hidden),
            "up.weight": (self.wide, self.hidden),
            "down.weight": (self.hidden, self.wide),
            "norm.weight": (self.hidden,),
        }
        return {name: random(dtype, *shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}

    def held(self, whole: Tensors, rank: int) -> dict[str, torch.Tensor]:
        """What `rank` trains, made from the checkpoint by indices alone."""
        groups, each = self.groups // self.ranks, self.heads // self.groups

        def qkv(kind: str) -> torch.Tensor:
            rows = []
            for group in range(rank * groups, (rank + 1) * groups):
                q, k, v = whole[f"q.{kind}"], whole[f"k.{kind}"], whole[f"v.{kind}"]
                rows += [q[group * each * self.size : (group + 1) * each * self.size]]
                rows += [t[group * self.size : (group + 1) * self.size] for t in (k, v)]
            return torch.cat(rows)

        padding = random(whole["embed.weight"].dtype, self.padded - self.vocabulary, self.hidden, seed=99)
        wide = slice(rank * self.wide // self.ranks, (rank + 1) * self.wide // self.ranks)
        return {
            "embedding": torch.cat([whole["embed.weight"], padding]).chunk(self.ranks)[rank].clone(),
            "qkv": qkv("weight"),
            "qkv_bias": qkv("bias"),
            "proj": whole["o.weight"].chunk(self.ranks, 1)[rank].clone(),
            "fc1": torch.cat([whole["gate.weight"][wide], whole["up.weight"][wide]]),
            "fc2": whole["down.weight"][:, wide].clone(),
            "norm": whole["norm.weight"].clone(),
        }

    def convert(self, held: Tensors, rank: int = 0) -> Pairs:
        """To checkpoint names, as Megatron's bridges do it."""
        rows = self.padded // self.ranks
        yield "embed.weight", held["embedding"][: max(0, min(rows, self.vocabulary - rank * rows))]
        each, groups = self.heads // self.groups, self.groups // self.ranks
        for kind, tensor in (("weight", held["qkv"]), ("bias", held["qkv_bias"])):
            parts = tensor.reshape(groups * (each + 2), self.size, -1)
            start = torch.arange(groups) * (each + 2)
            q = (start[:, None] + torch.arange(each)).flatten()
            tail = (self.hidden,) if kind == "weight" else ()
            yield f"q.{kind}", parts[q].reshape(-1, *tail)
            yield f"k.{kind}", parts[start + each].reshape(-1, *tail)
            yield f"v.{kind}", parts[start + each + 1].reshape(-1, *tail)
        yield "o.weight", held["proj"]
        gate, up = held["fc1"].chunk(2)
        yield "gate.weight", gate
        yield "up.weight", up.contiguous()
        yield "down.weight", held["fc2"]
        yield "norm.weight", held["norm"]

    def parts(self, rank: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Where the outputs of a rank lie."""
        whole = {name: tuple(t.shape) for name, t in self.whole(torch.float32).items()}
        found = {}
        for name, shape in whole.items():
            if name == "norm.weight":
                continue
            dim = 1 if name in ("o.weight", "down.weight") else 0
            size = self.padded if name == "embed.weight" else shape[dim]
            start = [0] * len(shape)
            start[dim] = min(rank * size // self.ranks, shape[dim])
            found[name] = (shape, tuple(start))
        return found


def split_qkv(held: Tensors) -> Pairs:
    """Interleaved heads taken apart by split, not by numbers of rows."""
    q, k, v = held["qkv"].view(4, 4, 6, 10).split([2, 1, 1], dim=1)
    yield "q", q.reshape(-1, 10)
    yield "k", k.reshape(-1, 10)
    yield "v", v.reshape(-1, 10)


def conv1d(held: Tensors) -> Pairs:
    """GPT-2's: the checkpoint has [in, out], and queries, keys and values side by side."""
    yield "c_attn", torch.cat([held["q"].t(), held["k"].t(), held["v"].t()], dim=1).contiguous()
    yield "c_attn.bias", torch.cat([held["q_bias"], held["k_bias"], held["v_bias"]])
    yield "c_proj", held["o"].T


def conv1d_held(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {
        "q": (8, 6),
        "k": (4, 6),
        "v": (4, 6),
        "q_bias": (8,),
        "k_bias": (4,),
        "v_bias": (4,),
        "o": (6, 8),
    }
    return {name: random(dtype, *shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def stacked(held: Tensors) -> Pairs:
    """Experts that are single in the trainer: stacked, gate and up fused, transposed."""
    names = [f"{i}" for i in range(4)]
    gate_up = [torch.cat([held[f"{n}.gate"], held[f"{n}.up"]]) for n in names]
    yield "experts.gate_up", torch.stack(gate_up).transpose(1, 2).contiguous()
    yield "experts.down", torch.stack([held[f"{n}.down"] for n in names])


def single(held: Tensors) -> Pairs:
    """Experts that are stacked in the trainer, taken apart."""
    for i, (gate_up, down) in enumerate(zip(held["gate_up"].unbind(), held["down"].unbind(), strict=True)):
        gate, up = gate_up.chunk(2, dim=-1)
        yield f"{i}.gate", gate.t()
        yield f"{i}.up", up.t().contiguous()
        yield f"{i}.down", down.permute(1, 0)


def single_held(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"gate_up": random(dtype, 4, 6, 10), "down": random(dtype, 4, 5, 6)}


def stacked_held(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {"gate": (5, 6), "up": (5, 6), "down": (6, 5)}
    return {f"{i}.{n}": random(dtype, *s, seed=i) for i in range(4) for n, s in shapes.items()}


def rotary(held: Tensors) -> Pairs:
    """Rows of each head interleaved by pairs in the trainer, halves in the checkpoint; and back."""
    yield "halves", held["pairs"].view(3, 4, 2, 10).transpose(1, 2).reshape(24, 10)
    yield "pairs", held["halves"].view(3, 2, 4, 10).permute(0, 2, 1, 3).flatten(0, 2)


def odd(held: Tensors) -> Pairs:
    """What else only moves."""
    yield "reordered", held["a"].index_select(0, torch.tensor([3, 0, 1, 2, 7, 4]))
    yield "row", held["a"][2]
    yield "rows", held["a"][torch.tensor([[0, 1], [-2, -1]])]
    yield "columns", held["a"][:, torch.tensor([0, 2, 4])]
    yield "masked", held["a"][torch.tensor([True, False] * 4)]
    yield "second", held["a"][1::2, 1:]
    yield "expanded", held["b"].expand(3, 2, 6)
    yield "repeated", held["b"].repeat(2, 3)
    yield "doubled", held["a"].repeat_interleave(2, dim=0)
    yield "scalar", held["a"][3, 2]
    yield "bits", held["a"].view(torch.int16 if held["a"].element_size() == 2 else torch.int32)
    yield "empty", held["a"][:0]
    yield "twice", torch.hstack([held["a"], held["a"]]).unflatten(0, (2, 4)).movedim(0, 1)
    yield "clone", held["a"].clone().to(held["a"].dtype).t().clone(memory_format=torch.contiguous_format)
    yield "after nothing", torch.cat([torch.empty(0, dtype=held["a"].dtype), held["a"], held["b"]])
    yield "windows", held["a"].view(-1).unfold(0, 3, 2)
    yield "again", held["a"]


def odd_held(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"a": random(dtype, 8, 6), "b": random(dtype, 2, 6)}


def buffers(held: Tensors) -> Pairs:
    """Put together by writing into new memory, as older tools do it."""
    q, k, v = held["q"], held["k"], held["v"]
    fused = torch.empty(12, 6, dtype=q.dtype)
    fused[:6], fused[6:9], fused[9:] = q, k, v
    yield "fused", fused.clone()
    rows = fused.new_zeros(3, 4, 6)
    rows[:, :2] = q.view(3, 2, 6)
    rows[:, 2] = k
    rows.select(1, 3).copy_(v)
    yield "interleaved", rows.view(12, 6)
    yield "heads", rows[:, :2].reshape(6, 6)
    turned = torch.empty_like(q)
    for at in range(6):
        turned[:, at] = q[at]
    yield "turned", turned
    twice = torch.empty(2, 6, 6, dtype=q.dtype)
    twice.copy_(q)
    twice[1, :3].copy_(k)
    yield "twice", twice
    fused[6:9] = v
    yield "again", fused


def buffers_held(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        n: random(dtype, *s, seed=i)
        for i, (n, s) in enumerate({"q": (6, 6), "k": (3, 6), "v": (3, 6)}.items())
    }
