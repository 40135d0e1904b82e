"""No framework is imported before its hook is used."""

from __future__ import annotations

import subprocess
import sys

FRAMEWORKS = ("accelerate", "datasets", "nemo_rl", "ray", "slime", "transformers", "trl", "verl")
WITHOUT = ("accelerate", "exchange", "optimizer", "outlet", "slime", "trl", "whole")
"""Hooks whose frameworks hand over all that they need."""


def test_hooks_import_no_framework() -> None:
    lines = [
        "import sys, weightcast.publisher, weightcast.publisher.hooks",
        *(f"import weightcast.publisher.hooks.{name}" for name in WITHOUT),
        f"print([name for name in {FRAMEWORKS!r} if name in sys.modules])",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
