"""fp32 bits to bf16 bits, beside torch's."""

from __future__ import annotations

import numpy as np
import torch

from weightcast.codec.rounding import round_all


def test_rounds_to_nearest_even() -> None:
    every = np.arange(0, 2**32, 65_537, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(0, 2**16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    words = np.concatenate([every, ties, ties - np.uint32(1), ties + np.uint32(1)])
    bits = np.empty(len(words), np.uint16)
    round_all(words, bits)
    numbers = torch.from_numpy(words.view(np.float32))
    expected, nan = numbers.bfloat16().view(torch.uint16).numpy(), numbers.isnan().numpy()
    assert (bits[~nan] == expected[~nan]).all()
    assert (bits[nan] == 0x7FC0).all()
