"""Weights that cannot be patched in place are found at attach, by name; a server that is refused is as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import sidecar
from .conftest import Live, Spec

REFUSED = [
    # experts packed into the same shape: only their bits tell
    (Spec("moe", layout="linears"), "model.layers.0.mlp.experts.0.down_proj.weight"),
    # vLLM's Qwen3 has no o_proj.bias and drops it without a word
    (Spec("biased"), "model.layers.0.self_attn.o_proj.bias"),
    # kernels that pack linears into a handle and drop the parameter
    (Spec("dense", layout="none"), "model.layers.0.mlp.down_proj.weight"),
]


def answers_as(live: Live, before: list[Any]) -> bool:
    """Whether a probe is answered as one of those before, bit for bit.

    The last bits of stock kernels depend on which requests meet in one batch; so a busy machine gets a few tries.
    """
    return any(live.probe() in before for _ in range(5))


@pytest.mark.parametrize(("spec", "name"), [pytest.param(*r, id=r[0].name) for r in REFUSED])
def test_a_model_that_cannot_be_kept_at_a_version_is_refused_by_name(
    serve: Callable[..., Live], spec: Spec, name: str
) -> None:
    """Nothing is written, and the server answers on as before."""
    live = serve(spec)
    before = [live.probe() for _ in range(3)]
    live.feed.reveal(1)
    ended = sidecar.once(live.feed.root, live.server)
    assert ended.returncode != 0
    assert name in ended.stderr
    assert "Traceback" not in ended.stderr
    state = live.server.state()
    assert (state.held, state.paused) == (None, False)
    assert answers_as(live, before)


def test_stock_cpu_kernels_follow_through_a_mirror(serve: Callable[..., Live], tmp_path: Path) -> None:
    """Linears that the kernel packed are reloaded whole, through the engine's own layerwise reload."""
    live = serve(Spec("dense", layout="none"))
    with live.sidecar("--mirror", str(tmp_path / "mirror")) as running:
        for _ in range(2):
            live.feed.reveal(live.feed.head + 1)
            running.wait_applied(live.feed.head)
            live.assert_fresh(live.feed.head)
