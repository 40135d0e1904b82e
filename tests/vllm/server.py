"""Real `vllm serve` processes on loopback, and what the tests ask of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from weightcast.schemas.engine import PREFIX, TOKEN_VARIABLE, ServerState, VerifyReport

from .reference import ENGINE, LOGPROBS, PROMPTS, TOKENS

TOKEN: Final = "0b5c-for-tests"
MODEL: Final = "m"
PLUGINS: Final = Path(__file__).parent / "plugins"
START_S: Final = 400.0
"""A start takes about 25 s on two quiet cores; much more on busy ones."""

T = TypeVar("T")

Rows = list[Any]
"""Of a probe: token ids, log-probabilities of the chosen ones, of the best ones, for each prompt."""


def environment(layout: str = "all", *, threads: str = "0") -> dict[str, str]:
    """Of every process with an engine: CPU, offline, quiet, with the test's plugin.

    Args:
        layout: of the plugin (see plugins/weightcast_testing).
        threads: cores of each rank, as vLLM writes them: "0", "0|1". One core a rank: so results do not depend on
            how many ranks there are besides.
    """
    return os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": threads,
        "OMP_WAIT_POLICY": "PASSIVE",  # or idle ranks take the cores of those that work
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(PLUGINS),
        "VLLM_PLUGINS": "weightcast,weightcast_testing",
        "WEIGHTCAST_TESTING_LAYOUT": layout,
        TOKEN_VARIABLE: TOKEN,
    }


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process and its children, from its start until `stop`.

    Args:
        model: checkpoint folder.
        folder: for the log, the stage and armed faults.
        options: more options of `vllm serve`.
        threads: cores of each rank (see `environment`).
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        options: Sequence[str] = (),
        *,
        layout: str = "all",
        threads: str = "0",
        more: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.stage = folder / "stage"
        self.faults = folder / "faults"
        self.faults.mkdir(exist_ok=True)
        self.environment = environment(layout, threads=threads) | {
            "WEIGHTCAST_STAGE": str(self.stage),
            "WEIGHTCAST_TESTING_FAULTS": str(self.faults),
            **(more or {}),
        }
        self._command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model)]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL]
        for name, value in ENGINE.items():
            self._command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        self._command += options
        self._begin()

    def _begin(self) -> None:
        self._began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )

    def wait_ready(self) -> Self:
        """Return once it answers."""
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.tail()}")
            if self.healthy():
                break
            if time.monotonic() - self._began > START_S:
                self.stop()
                raise RuntimeError(f"the server did not start within {START_S:g} s: {self.tail()}")
            time.sleep(0.1)
        print(f"{self.log.parent.name}: started in {time.monotonic() - self._began:.1f} s")
        return self

    def restart(self) -> None:
        """Stop it, if it runs, and start it anew on the same port and model."""
        self.stop()
        self._begin()
        self.wait_ready()

    def stop(self) -> None:
        """End the server and its children."""
        for number, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def healthy(self) -> bool:
        """Whether its health route answers 200."""
        try:
            return self.ask("GET", "/health", timeout_s=5)[0] == 200
        except OSError:
            return False

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 120,
    ) -> tuple[int, Any]:
        """Status and JSON document of an answer; of a failed one, too."""
        data = None if body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=given)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, _parse(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _parse(error.read())

    def complete(
        self, prompt: str, tokens: int = TOKENS, *, replica: int | None = None, **more: Any
    ) -> dict[str, Any]:
        """The one choice of a greedy completion."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        status, answer = self.ask("POST", "/v1/completions", body | more, headers)
        if status != 200:
            raise RuntimeError(f"a completion failed with {status}: {answer}")
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def probe(self, replica: int | None = None, prompts: Sequence[str] = PROMPTS) -> Rows:
        """As `reference.answer`, over HTTP; of one replica, if there are several."""
        more = {"logprobs": LOGPROBS, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return [_row(self.complete(prompt, replica=replica, **more)) for prompt in prompts]

    def plugin(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """A route of the plugin, with the token."""
        return self.ask(method, PREFIX + path, body, {"Authorization": f"Bearer {TOKEN}"})

    def state(self) -> ServerState:
        """What the plugin says of all ranks."""
        status, answer = self.plugin("GET", "/state")
        if status != 200:
            raise RuntimeError(f"state failed with {status}: {answer}")
        return ServerState.model_validate(answer)

    def verify(self) -> VerifyReport:
        """A digest of all live weights."""
        status, answer = self.plugin("POST", "/verify", {})
        if status != 200:
            raise RuntimeError(f"verify failed with {status}: {answer}")
        return VerifyReport.model_validate(answer)

    def held(self) -> int | None:
        """The version that every rank holds whole."""
        held = self.state().held
        return None if held is None else held.version

    def wait_held(self, version: int, timeout_s: float = 60) -> ServerState:
        """Return once every rank holds `version` whole and the engine generates."""

        def there() -> ServerState | None:
            state = self.state()
            at = state.held is not None and state.held.version == version
            return state if at and not state.paused else None

        return wait_for(there, timeout_s, f"version {version} on every rank")

    def arm(self, point: str, rank: str, action: str, *, times: int = 1, seconds: float = 0) -> None:
        """Arm a fault (see plugins/weightcast_testing/faults.py)."""
        for number in range(times):
            (self.faults / f"{point}.{rank}.{action}.{number}").write_text(str(seconds))

    def disarm(self) -> None:
        """Disarm all faults."""
        for path in self.faults.iterdir():
            path.unlink(missing_ok=True)

    def wait_struck(self, point: str, timeout_s: float = 60) -> None:
        """Return once an armed fault of `point` strikes; forgets it."""
        mark = self.faults / f"struck.{point}"
        wait_for(mark.exists, timeout_s, f"the fault at {point}")
        mark.unlink()


class Load:
    """Requests in flight, `width` at any moment, while inside.

    Args:
        tokens: length of every answer.
        prompt: of all of them; different ones if not given.

    Attributes:
        errors: what went wrong, of any request.
        done: requests that ended.
    """

    def __init__(self, server: Server, width: int, tokens: int = 64, prompt: str = "") -> None:
        self.errors: list[str] = []
        self.done = 0
        self._server = server
        self._tokens = tokens
        self._prompt = prompt
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(width)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            try:
                prompt = self._prompt or f"w{number} the sum of {turn}"
                choice = self._server.complete(prompt, self._tokens, return_token_ids=True)
                fault = "" if len(choice["token_ids"]) == self._tokens else f"short: {choice}"
            except (OSError, RuntimeError) as error:
                fault = repr(error)
            with self._lock:
                self.done += 1
                if fault:
                    self.errors.append(fault)


def wait_for(look: Callable[[], T], timeout_s: float, what: str) -> T:
    """Return what `look` says once that is something."""
    until = time.monotonic() + timeout_s
    while True:
        if found := look():
            return found
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.05)


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except json.JSONDecodeError:
        return body.decode(errors="replace")


def _row(choice: dict[str, Any]) -> list[Any]:
    found = choice["logprobs"]
    tops = [sorted(place.values(), reverse=True) for place in found["top_logprobs"]]
    return [choice["token_ids"], found["token_logprobs"], tops]
