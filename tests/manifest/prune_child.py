"""Pruners that kill themselves: `python prune_child.py KEEP before|after FOLDER...`.

The pruner of the n-th folder dies right before or after its n-th deletion. Each is a process of its own,
forked from one
that has no threads, which is much quicker than a new interpreter. Prints how each of them ended (-9: killed).
"""

from __future__ import annotations

import os
import signal
import sys

from weightcast.manifest.retention import prune
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader


def prune_until(folder: str, keep: int, n: int, when: str) -> None:
    """Prune, and be killed at the n-th deletion."""
    store = open_store(folder)
    delete, left = store.delete, n

    def counted(key: str) -> None:
        nonlocal left
        if key.startswith("probe/"):  # the clock's own
            return delete(key)
        left -= 1
        if left == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        delete(key)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    store.delete = counted  # type: ignore[method-assign]
    prune(StreamReader.open(store), keep=keep, grace_s=0, orphan_age_s=0)


def main(keep: str, when: str, *folders: str) -> None:
    """One pruner after the other."""
    for n, folder in enumerate(folders, 1):
        pid = os.fork()
        if pid == 0:
            try:
                prune_until(folder, int(keep), n, when)
            finally:
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
