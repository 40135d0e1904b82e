"""slime's disk weight sync: publishes each checkpoint that slime writes for its engines.

    --update-weight-mode full --update-weight-transport disk --update-weight-disk-dir DIR
    --custom-update-weight-post-write-path weightcast.publisher.hooks.slime.publish_version

Written against slime 0.3.1 (commit 624b824). The stream is named by WEIGHTCAST_ROOT in the environment of the training
processes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from weightcast.schemas.errors import UsageError

from .outlet import Outlet, is_main

ROOT_VARIABLE: Final = "WEIGHTCAST_ROOT"


def publish_version(args: Any, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """Publish the checkpoint in `version_dir`, and wait for the commit. slime calls it on every rank; rank 0 publishes.

    Raises:
        UsageError: no stream is named, or slime writes deltas, which are not a checkpoint.
        WeightcastError: the checkpoint is not whole, or was not committed.
    """
    if getattr(args, "update_weight_mode", "full") != "full":
        raise UsageError(
            f"slime writes in mode {args.update_weight_mode!r}, and only whole checkpoints can be published",
            hint="set --update-weight-mode full: the stream carries the changes alone",
        )
    if not is_main():
        return
    root = os.environ.get(ROOT_VARIABLE)
    if not root:
        raise UsageError(f"no stream is named: {ROOT_VARIABLE} is not set")
    outlet = outlet_for(root)
    outlet.publish_folder(Path(version_dir), metadata={"weight_version": Path(version_dir).name})
    outlet.wait()


@cache
def outlet_for(root: str) -> Outlet:
    """The outlet of this process for a stream: slime's hook is a bare function, which must find it again."""
    return Outlet(root)
