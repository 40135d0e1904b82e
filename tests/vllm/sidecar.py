"""`weightcast subscribe --engine vllm` as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final, Self

from .server import TOKEN, TOKEN_VARIABLE, Server, free_port, wait_for

COMMAND: Final = str(Path(sys.executable).parent / "weightcast")


def command(root: Path, server: Server, *options: str) -> list[str]:
    """The command line that keeps `server` at the head of `root`."""
    given = ["--engine", "vllm", "--url", server.url, "--poll", "0.1", "--json", "--json-logs"]
    return [COMMAND, "subscribe", str(root), *given, *options]


def environment(server: Server) -> dict[str, str]:
    """Of a process that talks to `server`'s plugin."""
    return os.environ | {TOKEN_VARIABLE: TOKEN, "WEIGHTCAST_STAGE": str(server.stage)}


def once(root: Path, server: Server, *options: str) -> subprocess.CompletedProcess[str]:
    """Go to the head and end."""
    return subprocess.run(
        command(root, server, "--once", *options),
        env=environment(server),
        capture_output=True,
        text=True,
        timeout=120,
    )


class Sidecar:
    """A sidecar from its start until it is stopped or killed.

    Attributes:
        log: file of its standard error.
    """

    def __init__(self, root: Path, server: Server, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self.log = folder / "applied.jsonl", folder / "sidecar.log"
        self._http = f"127.0.0.1:{free_port()}"
        with self._out.open("ab") as out, self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command(root, server, "--http", self._http, *options),
                env=environment(server),
                stdout=out,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def applied(self) -> list[dict[str, Any]]:
        """A document for each version that it brought the server to."""
        return [json.loads(line) for line in self._out.read_text().splitlines()]

    def wait_applied(self, version: int, timeout_s: float = 60) -> dict[str, Any]:
        """The document of `version`, once it is there."""

        def found() -> dict[str, Any] | None:
            if self.process.poll() is not None:
                raise RuntimeError(f"the sidecar ended with {self.process.returncode}: {self.tail()}")
            return next((row for row in self.applied() if row.get("version") == version), None)

        try:
            return wait_for(found, timeout_s, f"version {version}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.tail()}") from None

    def ready(self) -> bool:
        """Whether /readyz says so."""
        try:
            with urllib.request.urlopen(f"http://{self._http}/readyz", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.HTTPError, OSError):
            return False

    def peak_bytes(self) -> int:
        """The most memory it had resident at once, without pages of files."""
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        )
        return int(fields["VmHWM"].split()[0]) * 1024

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL, as by an out-of-memory killer."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM, and wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
