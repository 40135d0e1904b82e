"""The loops, against torch's own steps and plain Python."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from weightcast.publisher.detectors import kernels
from weightcast.publisher.detectors.steps import Rates, reach

from .training import IMPLEMENTATIONS

N = 40_000


def floats(random: np.random.Generator) -> torch.Tensor:
    """Weights of all sizes, among them zeros of both signs and numbers on and beside boundaries of bf16."""
    values = (random.standard_normal(N) * 10.0 ** random.uniform(-7, 1, N)).astype(np.float32)
    bits = values.view(np.uint32)
    bits[: N // 4] = (bits[: N // 4] & 0xFFFF0000) + 0x8000 + random.integers(-6, 7, N // 4).astype(np.uint32)
    values[:50], values[50:100] = 0.0, -0.0
    return torch.from_numpy(values)


def bf16_bits(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    return tensor.detach().bfloat16().view(torch.uint16).numpy().copy()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.5])
def test_old_bits_are_exact_or_open_and_what_is_open_was_near(implementation: str, decay: float) -> None:
    options = IMPLEMENTATIONS[implementation]
    settings = product((1e-7, 1e-5, 1e-3), ((0.9, 0.999), (0.9, 0.95), (0.5, 0.6)), (1e-8, 1e-15))
    for seed, (lr, betas, eps) in enumerate(settings):
        random = np.random.default_rng(seed)
        parameter = torch.nn.Parameter(floats(random))
        optimizer = torch.optim.AdamW([parameter], lr=lr, betas=betas, eps=eps, weight_decay=decay, **options)
        group = optimizer.param_groups[0]
        for step in range(1, 4):
            old = parameter.detach().clone()
            near = looked(old, Rates.of(group), reach(group))
            sizes = 10.0 ** random.uniform(-9, 2, N) * (random.random(N) > 0.1)
            parameter.grad = torch.from_numpy((random.standard_normal(N) * sizes).astype(np.float32))
            optimizer.step()
            found, opened = undone(parameter, Rates.of(group), optimizer.state[parameter], step)
            closed = np.ones(N, bool)
            closed[opened] = False
            assert (found[closed] == bf16_bits(old)[closed]).all()
            assert set(opened) <= set(near)
            assert len(opened) < 0.4 * N  # a quarter of all lie on a boundary


def looked(values: torch.Tensor, rates: Rates, moves: float) -> list[int]:
    olds, nears = np.empty(N, np.uint16), np.empty(N, np.uint32)
    count = kernels.look(values.numpy(), 1 / rates.decay, moves, olds, nears)
    assert (olds == bf16_bits(values)).all()
    return list(nears[:count])


def undone(
    parameter: torch.Tensor, rates: Rates, state: dict[str, Any], number: int
) -> tuple[npt.NDArray[np.uint16], list[int]]:
    step = rates.step(number, state)
    olds, opens, nears = np.empty(N, np.uint16), np.empty(N, np.uint32), np.empty(N, np.uint32)
    opened, _ = kernels.invert(
        parameter.detach().numpy(), step.mean.numpy(), step.square.numpy(), step.decay,
        np.float32(step.size), np.float32(step.root), np.float32(step.eps), 0.0, olds, opens, nears,
    )  # fmt: skip
    return olds, list(opens[:opened])


@pytest.mark.parametrize("fp32", [False, True])
def test_replaced_bits_are_listed(fp32: bool) -> None:
    random = np.random.default_rng(0)
    for density in (0.0, 0.001, 0.3, 1.0):
        old = random.integers(0, 2**14, 5_000).astype(np.uint16)  # no NaNs
        fresh = np.where(random.random(5_000) < density, old ^ np.uint16(0x100), old)
        bits, places, olds = old.copy(), np.empty(5_000, np.uint32), np.empty(5_000, np.uint16)
        if fp32:
            words = (fresh.astype(np.uint32) << np.uint32(16)) + random.integers(0, 2**15, 5_000, np.uint32)
            count = kernels.round_over(words, bits, 70, places, olds)
        else:
            count = kernels.replace_bits(fresh, bits, 70, places, olds)
        assert (bits == fresh).all()
        assert (places[:count] == np.flatnonzero(old != fresh) + 70).all()
        assert (olds[:count] == old[old != fresh]).all()


def test_the_first_bits_of_two_lists_win() -> None:
    random = np.random.default_rng(0)
    for sizes in product((0, 1, 40), (0, 1, 40)):
        lists = [np.sort(random.choice(60, size, replace=False)).astype(np.uint32) for size in sizes]
        values = [random.integers(0, 2**16, size).astype(np.uint16) for size in sizes]
        places, bits = np.empty(80, np.uint32), np.empty(80, np.uint16)
        count = kernels.first_of_both(lists[0], values[0], lists[1], values[1], places, bits)
        expected = dict(zip(lists[1], values[1], strict=True)) | dict(zip(lists[0], values[0], strict=True))
        assert dict(zip(places[:count], bits[:count], strict=True)) == expected
        assert list(places[:count]) == sorted(expected)


def test_open_elements_take_what_was_noted() -> None:
    olds = np.zeros(10, np.uint16)
    places, bits = np.array([1, 4, 7], np.uint32), np.array([11, 44, 77], np.uint16)
    assert kernels.settle(np.array([0, 4, 7, 9], np.uint32), places, bits, olds) == 2
    assert olds.tolist() == [0, 0, 0, 0, 44, 0, 0, 77, 0, 0]
