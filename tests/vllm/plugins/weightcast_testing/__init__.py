"""A vLLM plugin for the tests alone: kernels that leave weights where they are, and faults on demand.

vLLM loads it in every process of a server whose `PYTHONPATH` has this folder and whose `VLLM_PLUGINS` names it.

    WEIGHTCAST_TESTING_LAYOUT   all: linears and experts stay as loaded, as with CUDA's default kernels
                                linears: experts are still repacked, into the same shape
                                none: CPU kernels as they are
    WEIGHTCAST_TESTING_FAULTS   folder with a file for each fault that is armed (see `faults`)
"""

from __future__ import annotations

import os


def register() -> None:
    """Change what the environment asks for. May be called more than once in a process."""
    layout = os.environ.get("WEIGHTCAST_TESTING_LAYOUT", "none")
    if layout in ("all", "linears"):
        from .plain import keep_linears

        keep_linears()
    if layout == "all":
        from .plain import keep_experts

        keep_experts()
    from . import methods

    methods.install()
    methods.spin_less()
    if "WEIGHTCAST_TESTING_FAULTS" in os.environ:
        from .faults import install

        install()
