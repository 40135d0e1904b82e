"""Processes that are forks of one which has imported what takes seconds.

Each is as separate as any other: it has an environment, a folder and streams of its own, can be stopped and killed,
and leaves by the normal way.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_START = "import sys; sys.path.append(sys.argv[1]); from tests.nursery import main; main(*sys.argv[2:])"


class Born:
    """A process from a nursery."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._code: int | None = None

    def wait(self) -> int:
        """Wait for its end; the exit code, or the signal that ended it as a negative number."""
        if self._code is None:
            self._code = self._nursery.ask(wait=self.pid)
        return self._code

    def end(self) -> None:
        """Kill it, if it was not waited for."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


class Nursery:
    """The process that others are forks of. Used by one thread.

    Args:
        modules: that it imports; of `module:function`, the function is run, too. None may leave a thread behind.
        variables: beside those of this process, of the environment that they are imported in.
    """

    def __init__(self, *modules: str, **variables: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(ROOT), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **variables},
            text=True,
        )

    def start(
        self,
        run: str,
        *arguments: object,
        out: Path,
        err: Path,
        environment: Mapping[str, str],
        folder: Path = ROOT,
    ) -> Born:
        """Run `module:function` in a fork, with these arguments in `sys.argv`; when it returns the process ends.

        Args:
            out, err: files for its streams.
            environment: in place of the one here.
            folder: that it runs in.
        """
        argv = [run, *map(str, arguments)]
        where = {"out": str(out), "err": str(err), "folder": str(folder)}
        return Born(self, self.ask(argv=argv, environment=dict(environment), **where))

    def ask(self, **request: object) -> int:
        """One request, one number."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it; those born of it are left alone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def main(*modules: str) -> None:
    """Serve until nobody can ask any more; in a fork, run what was asked for."""
    for name in modules:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    if _serve():
        module, _, function = sys.argv[0].partition(":")
        sys.exit(getattr(importlib.import_module(module), function)())


def _serve() -> bool:
    """Whether this is a fork; False at the end."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            for descriptor, path in enumerate([os.devnull, request["out"], request["err"]]):
                opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                os.dup2(opened, descriptor)
                os.close(opened)
            os.environ.clear()
            os.environ.update(request["environment"])
            os.chdir(request["folder"])
            sys.argv = request["argv"]
            return True
        print(pid, flush=True)
    return False
