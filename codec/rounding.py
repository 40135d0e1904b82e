"""From fp32 bits to bf16 bits: to nearest even, as torch does for all numbers; a NaN becomes 0x7FC0."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .jit import kernel

_HALF: Final = 0x7FFF
_NAN: Final = 0x7FC0


@kernel
def rounded(word: np.uint32) -> np.uint32:
    """The bf16 bits of the number with these fp32 bits, which is no NaN."""
    return (word + np.uint32(_HALF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@kernel
def round_all(words: npt.NDArray[np.uint32], bits: npt.NDArray[np.uint16]) -> None:
    """Round numbers, given as their fp32 bits, to bf16 bits. Both contiguous, of one length."""
    for i in range(words.size):
        word = words[i]
        is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        bits[i] = np.uint16(_NAN) if is_nan else np.uint16(rounded(word))
