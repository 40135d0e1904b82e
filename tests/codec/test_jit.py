"""Kernels compile where nothing can be cached, and where the package's folder cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from weightcast.codec.jit import kernel


def test_a_kernel_without_a_place_for_its_cache_still_runs() -> None:
    namespace: dict[str, object] = {}
    exec(compile("def double(x):\n    return 2 * x\n", "/nowhere/at/all.py", "exec"), namespace)
    double = kernel(namespace["double"])  # type: ignore[type-var]
    assert double(21) == 42  # type: ignore[operator]


def test_import_compiles_nothing_and_needs_no_torch() -> None:
    code = (
        "import sys, weightcast.codec.kernels_find as k, weightcast.codec as c\n"
        "assert 'torch' not in sys.modules\n"
        "print(len(k.find_interval.signatures))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_machine_code_is_kept_between_processes(tmp_path: Path) -> None:
    code = (
        "import numpy as np\n"
        "from weightcast.codec.kernels import ascends\n"
        "assert ascends(np.array([1, 2]), 3)\n"
        "print(sum(ascends.stats.cache_hits.values()))"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        )
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in runs] == ["0", "1"]
