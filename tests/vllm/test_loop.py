"""TRL's GRPO, a store, a sidecar and a vLLM server: training whose rollouts come from the weights that it published."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from weightcast.manifest.staleness import Stamp

from .conftest import Bed, Live, Spec, stop_all
from .loop import Run, train
from .models import make_checkpoint
from .references import pull
from .server import Server

STEPS: Final = 5

LONG: Final = 8
"""Tokens of which the mean tells versions apart."""

NOISE: Final = 0.03
"""Nats between the engine's bf16 and torch's fp32, on average over some tokens: 0.012 at most was seen, 0.1 at least under another version."""


@pytest.fixture(scope="module")
def run(bed: Bed, running: list[tuple[Spec, Live]], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Five steps, each with eight rollouts."""
    stop_all(running)
    folder = tmp_path_factory.mktemp("loop")
    model = make_checkpoint("dense", folder / "start")
    server = Server(model, folder / "server", ["--enable-scale-out"], threads=str(bed.core))
    try:
        return train(model, server, folder, STEPS)
    finally:
        server.stop()


def checkpoint(run: Run, version: int) -> Path:
    """What `weightcast pull` writes; no two runs have the same, and so their folders have other names."""
    return pull(
        run.root, version, run.trainer / f"pulled-{manifest(run, STEPS)['digest_after']}" / str(version)
    )


def manifest(run: Run, version: int) -> dict[str, Any]:
    """As it is stored."""
    document: dict[str, Any] = json.loads(manifest_path(run, version).read_text())
    return document


def manifest_path(run: Run, version: int) -> Path:
    """Where it is stored."""
    return run.root / "versions" / f"{version:012d}.json"


def load(path: Path) -> dict[str, torch.Tensor]:
    """The bf16 tensors of a checkpoint folder, or of one file."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    return found


def bits(path: Path) -> dict[str, torch.Tensor]:
    """Their bits."""
    return {name: tensor.view(torch.int16) for name, tensor in load(path).items()}


def test_each_version_has_the_bits_that_the_trainer_had(run: Run) -> None:
    states = [bits(run.trainer / f"{version}.safetensors") for version in range(STEPS + 1)]
    for before, after in pairwise(states):
        assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    for version, expected in enumerate(states):
        found = bits(checkpoint(run, version))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), version


def test_training_goes_on_only_when_the_server_holds_the_version_proved(run: Run) -> None:
    """At each step: what all ranks say, vLLM's own label, and a full reading of the live weights against the manifest."""
    for version, look in enumerate(run.looks):
        held = look.state.held
        assert held is not None
        assert (held.version, held.digest) == (version, manifest(run, version)["digest_after"])
        assert (look.state.weight_version, look.state.paused, look.verified) == (str(version), False, 0)
        assert manifest(run, version)["step"] == version


def test_rollouts_carry_stamps_of_what_was_published(run: Run) -> None:
    """Every token has one; none is older than the version that TRL took for live when it asked, or newer than the next."""
    known = {}
    for version in range(STEPS + 1):
        sha256 = hashlib.sha256(manifest_path(run, version).read_bytes()).hexdigest()
        known[version] = Stamp(manifest(run, version)["stream"], version, version, sha256)
    seen = set()
    for rollout in run.rollouts:
        ends = [0, *(end for _, end, _ in rollout.spans)]
        assert [start for start, _, _ in rollout.spans] == ends[:-1]
        assert ends[-1] == len(rollout.tokens)
        stamps = [Stamp.from_dict(values) for _, _, values in rollout.spans]
        assert stamps == [known[stamp.version] for stamp in stamps]
        asked, answered = (live - 1 for live in rollout.live)  # TRL's first is 1
        assert asked <= stamps[0].version <= stamps[-1].version <= answered + 1
        seen.update(stamp.version for stamp in stamps)
    assert seen >= set(range(STEPS))  # each step was made from the version before it


def test_the_stamped_weights_are_those_that_made_the_tokens(run: Run) -> None:
    """Log-probabilities that the server gave: only the stamped version's own model, in torch, says about the same."""
    distances = [distances_to(run, version) for version in range(STEPS + 1)]
    long = 0
    for n, rollout in enumerate(run.rollouts):
        for start, end, stamp in rollout.spans:
            found = [float(distance[n][start:end].mean()) for distance in distances]
            own = found.pop(stamp["version"])
            assert own < NOISE
            if end - start >= LONG:
                assert min(found) > 2 * NOISE
                long += 1
    assert long >= 8 * STEPS


def distances_to(run: Run, version: int) -> list[torch.Tensor]:
    """How far each token's log-probability under a version is from what the server said, for each rollout."""
    config = Qwen3Config.from_pretrained(run.root.parent / "start")
    model = Qwen3ForCausalLM(config).float()
    model.load_state_dict(load(checkpoint(run, version)))
    rows = [torch.tensor(rollout.prompt + rollout.tokens) for rollout in run.rollouts]
    ids_BT = pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        logprobs_BT = model(ids_BT).logits[:, :-1].log_softmax(-1).gather(2, ids_BT[:, 1:, None])[:, :, 0]
    found = []
    for rollout, logprobs_T in zip(run.rollouts, logprobs_BT, strict=True):
        first = len(rollout.prompt) - 1
        own_T = logprobs_T[first : first + len(rollout.tokens)]
        found.append((own_T - torch.tensor(rollout.logprobs)).abs())
    return found


def test_the_last_version_answers_as_a_fresh_server_does(bed: Bed, run: Run) -> None:
    """Tokens and log-probabilities, bit for bit."""
    assert run.last == bed.references.of(checkpoint(run, STEPS))
    assert run.last != run.first
