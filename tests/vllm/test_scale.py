"""A model of 218 M parameters, 2 % changed: this install, the engine's own reload and its native sparse path, in one run."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import Live, Spec
from .models import VERSIONS

pytestmark = pytest.mark.alone

MIB = 1 << 20
CHANGED_BYTES = 40
"""Of one change: position and value, old and new, decoded and staged, each for a moment twice."""

LAST = VERSIONS["large"]

PAUSED = re.compile(r"was paused for ([0-9.]+) s: ([0-9.]+) s until it stood still")
"""Of the sidecar's log: seconds of the whole pause, and of the engine's own part of it."""


@pytest.fixture(scope="module")
def live(serve: Callable[..., Live]) -> Live:
    """On version 0, on all cores, as vLLM serves one rank if it is not told otherwise.

    The development routes are those of the engine's own ways, which are compared.
    """
    return serve(Spec("large"), threads="0-1", more={"VLLM_SERVER_DEV_MODE": "1"})


def reload(live: Live, checkpoint: Path) -> float:
    """Seconds of vLLM's `reload_weights`."""
    began = time.perf_counter()
    call(live, "reload_weights", weights_path=str(checkpoint))
    return time.perf_counter() - began


def native(live: Live, patch: Path, checkpoint: Path) -> float:
    """Seconds of vLLM's sparse path, with the patch in memory."""
    return float(call(live, "testing_native", path=str(patch), model=str(checkpoint)))


def call(live: Live, method: str, **arguments: str) -> Any:
    """What the one worker answers."""
    status, answer = live.server.ask("POST", "/collective_rpc", {"method": method, "kwargs": arguments})
    assert status == 200, answer
    return answer["results"][0]


def write_patch(live: Live, base: int, target: int, path: Path) -> Path:
    """The changes between two versions as the engine's native path takes them."""
    before, after = (load_weights(live.bed.checkpoint("large", version)) for version in (base, target))
    patch: dict[str, torch.Tensor] = {}
    for name, fresh in after.items():
        changed = np.flatnonzero(bits(before[name]) != bits(fresh)).astype(np.int32)
        if changed.size:
            patch[f"{name}#i"] = torch.from_numpy(changed)
            patch[f"{name}#v"] = fresh.view(-1)[torch.from_numpy(changed).long()].clone()
    save_file(patch, path)
    return path


def changed_elements(root: Path, version: int) -> int:
    """How many a version changed."""
    manifest = json.loads((root / "versions" / f"{version:012d}.json").read_text())
    return int(manifest["totals"]["changed"])


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder."""
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A bf16 tensor's bits, flat."""
    return tensor.view(torch.int16).view(-1).numpy()


def test_an_install_beside_reload_and_the_native_sparse_path(live: Live, tmp_path: Path) -> None:
    """Medians, printed for docs/benchmarks.md; what is asserted is that all ways lead to the same bits, and memory.

    An install is all that happens once the engine stands still: write, read back, prove, reset caches, resume. vLLM's own
    way to a standstill (`drain_s`) is told apart: the other two run in an engine that idles, and are not preceded by it.
    """
    with live.sidecar() as sidecar:
        live.server.wait_held(0, timeout_s=120)
        idle = sidecar.peak_bytes()
        for version in range(1, LAST + 1):
            live.feed.reveal(version)
            sidecar.wait_applied(version)
        peak = sidecar.peak_bytes()
        runs = [(float(a), float(b)) for a, b in PAUSED.findall(sidecar.log.read_text())]
    assert len(runs) == LAST
    assert live.server.verify().good
    changes = changed_elements(live.feed.root, LAST)
    checkpoint = live.bed.checkpoint("large", LAST)
    load_weights(checkpoint)  # into the page cache
    patch = write_patch(live, LAST - 1, LAST, tmp_path / "patch.safetensors")
    install = statistics.median(paused - drained for paused, drained in runs)
    pause = statistics.median(paused for paused, _ in runs)
    print(f"our install: {install:.3f} s, with the drain {pause:.3f} s; {changes} changes")
    reloading = statistics.median(reload(live, checkpoint) for _ in range(5))
    patching = statistics.median(native(live, patch, checkpoint) for _ in range(5))
    for name, other in (("reload_weights", reloading), ("native sparse path", patching)):
        print(f"{name}: {other:.3f} s, {other / install:.1f} x, with the drain {other / pause:.1f} x")
    print(f"sidecar: peak {peak / MIB:.0f} MiB, {(peak - idle) / MIB:.0f} MiB above an idle one")
    assert live.server.verify().good  # all ways lead to the same bits
    assert peak <= 256 * MIB + changes * CHANGED_BYTES
