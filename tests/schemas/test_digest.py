"""The digest as a value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.schemas.digest import Digest

words = st.integers(0, (1 << 64) - 1)
digests = st.builds(Digest, words, words)


@given(digests, digests, digests)
def test_it_is_a_group(a: Digest, b: Digest, c: Digest) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + b - b == a == a + Digest()


@given(digests)
def test_both_forms_come_back(a: Digest) -> None:
    assert Digest.from_hex(a.hex) == a == Digest.from_bytes(a.to_bytes())
    assert str(a) == a.hex


def test_the_order_of_bytes() -> None:
    a = Digest(1, 0x0203)
    assert a.hex == "0000000000000001" + "0000000000000203"
    assert a.to_bytes() == b"\1\0\0\0\0\0\0\0" + b"\3\2\0\0\0\0\0\0"
    assert Digest((1 << 64) - 1, 5) + Digest(1, 0) == Digest(0, 5)
    assert Digest() - Digest(1, 0) == Digest((1 << 64) - 1, 0)


@pytest.mark.parametrize(
    "text", ["", "0" * 31, "0" * 33, "A" * 32, "x" * 32, "0" * 31 + "\n", "+" + "0" * 31, " " * 32, "_" * 32]
)
def test_what_is_no_digest(text: str) -> None:
    with pytest.raises(ValueError, match="32 hex digits"):
        Digest.from_hex(text)
    with pytest.raises(ValueError, match="16 bytes"):
        Digest.from_bytes(b"x" * 15)
