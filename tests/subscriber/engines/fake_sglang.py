"""A server with the routes and the rules of SGLang 0.5.23, as far as an update of its weights goes, over real HTTP.

It reads checkpoints itself, by the files' own format, and keeps its tensors in another shape than the files do. What
it generates is a hash of the weights, and the part that stands for the cache is remembered per prompt, so that stale
caches and mixed answers are seen. Faults are attributes. `calls` lists what was asked, in order.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ...versions import Bits
from ..kit import loaded

_TOKEN_S: Final = 0.005
_GET: Final = ("/model_info", "/server_info")
_POST: Final = (
    "/update_weights_from_disk", "/pause_generation", "/continue_generation", "/flush_cache", "/weights_checker",
    "/begin_weight_update", "/end_weight_update", "/update_weight_version", "/release_memory_occupation",
    "/resume_memory_occupation", "/generate", "/hicache/storage-backend/clear",
)  # fmt: skip
_BOTH: Final = ("/flush_cache", "/weights_checker")


class _Died(Exception):
    """The process is gone in the middle of a call."""


@dataclass
class _Request:
    kv: str | None = None
    aborted: bool = False


@dataclass
class FakeSglang:
    """A server on a free port of 127.0.0.1, started with the checkpoint `base`. Every start is a new process.

    Attributes:
        missing: status by route, of routes that it has not.
        key: its --admin-api-key.
        fail_loads: this many loads answer 500 before they begin.
        torn_loads: this many stop half way and are refused.
        deadly_loads: in this many the process dies half way.
        load_s: seconds that a load takes.
        refuse_flush_until: by time.monotonic; refused until then, as if requests ran.
        stub: loads answer success, move the label, and do nothing.
        careless: an update without a path is answered with success.
        mute: loads work and do not move the label.
        storage: a cache outside its memory, by prompt; None: it has none.
        needs_session: also a load from disk must be inside begin and end.
    """

    base: Path
    missing: dict[str, int] = field(default_factory=dict)
    key: str | None = None
    fail_loads: int = 0
    torn_loads: int = 0
    deadly_loads: int = 0
    load_s: float = 0.0
    refuse_flush_until: float = 0.0
    stub: bool = False
    careless: bool = False
    mute: bool = False
    needs_session: bool = False
    storage: dict[str, str] | None = None
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    most_loads_open: int = 0

    def __post_init__(self) -> None:
        self.port = 0
        self._http: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        """Of the server, across restarts."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """A new process: the base model, nothing cached, not paused."""
        weights = loaded(self.base)
        assert weights is not None
        self._shapes = {name: found.shape for name, found in weights.items()}
        self._weights = {name: _turned(found) for name, found in weights.items()}
        self.label, self.path = "default", str(self.base)
        self._seen: dict[str, dict[str, Bits]] = {}  # by path: a loader that remembers
        self._cache: dict[str, str] = {}  # by prompt
        self._requests: list[_Request] = []
        self.paused: str | None = None
        self.asleep = self._session = False
        self._loads_open = 0
        self._changed = threading.Condition()
        self._scheduler = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._http.daemon_threads = True
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """The port closes."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def restart(self) -> None:
        """Stop and start."""
        self.stop()
        self.start()

    def serves(self) -> dict[str, Bits]:
        """The bits it would compute with, in the shapes of the files."""
        return {name: _turned(found) for name, found in self._weights.items()}

    def routes(self, *, of: str = "") -> list[str]:
        """Which routes were called, in order, of those that change something; probes left out."""
        quiet = ("/model_info", "/server_info", "/generate", "/weights_checker")
        return [
            r for r, body in self.calls if r not in quiet and not (r == _POST[0] and not body) and of in r
        ]

    def loads(self) -> list[dict[str, Any]]:
        """The bodies of the calls that loaded something."""
        return [body for route, body in self.calls if route == _POST[0] and body]

    def answer(self, method: str, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """One request. Raises _Died."""
        if route in self.missing:
            return self.missing[route], {"detail": "Not Found"}
        if route not in _GET + _POST:
            return 404, {"detail": "Not Found"}
        if (method == "GET") != (route in _GET) and route not in _BOTH:
            return 405, {"detail": "Method Not Allowed"}
        self.calls.append((route, body))
        status, found = getattr(self, "_do" + route.replace("/", "_").replace("-", "_"))(body)
        return int(status), dict(found)

    def _do_model_info(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"model_path": self.path, "weight_version": self.label, "is_generation": True}

    def _do_server_info(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._scheduler:
            return 200, {
                "version": "0.5.23",
                "hicache_storage_backend": None if self.storage is None else "file",
            }

    def _do_pause_generation(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return 400, {"message": f"Input should be 'abort', 'retract' or 'in_place': {mode}"}
        with self._changed:
            self.paused = mode
            for request in self._requests:
                request.aborted |= mode == "abort"
                request.kv = None if mode == "retract" else request.kv
            self._changed.notify_all()
            self._changed.wait_for(lambda: mode != "abort" or not self._requests)
        return 200, {"status": "ok", "message": "Generation paused successfully."}

    def _do_continue_generation(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._changed:
            self.paused = None
            self._changed.notify_all()
        return 200, {"status": "ok", "message": "Generation continued successfully."}

    def _do_flush_cache(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        return (200, {}) if self._flushed() else (400, {"message": "Flush cache failed."})

    def _flushed(self) -> bool:
        with self._changed:
            running = bool(self._requests) and self.paused != "retract"  # retracted ones only wait
            if running or time.monotonic() < self.refuse_flush_until:
                return False
            self._cache.clear()
            return True

    def _do_update_weights_from_disk(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        if "model_path" not in body:
            return (200, {"success": True}) if self.careless else (400, {"message": "Field required"})
        if self.fail_loads:
            self.fail_loads -= 1
            return 500, {"message": "Internal Server Error"}
        if self.needs_session and not self._session:
            return _refused("must run between begin_weight_update() and end_weight_update()")
        with self._changed:
            if not self.paused:  # the writer lock: requests finish first
                self._changed.wait_for(lambda: not self._requests)
        self._loads_open += 1
        self.most_loads_open = max(self.most_loads_open, self._loads_open)
        try:
            with self._scheduler:
                return self._load(body)
        finally:
            self._loads_open -= 1

    def _load(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        time.sleep(self.load_s)
        path = str(body["model_path"])
        found = None if self.stub else self._read(Path(path))
        if self.asleep:
            raise _Died  # weights that have no memory
        if found is None and not self.stub:
            return _refused(f"Failed to get weights iterator: Cannot find any model weights with `{path}`.")
        for count, (name, tensor) in enumerate((found or {}).items()):
            if count == len(self._shapes) // 2 and self.deadly_loads:
                self.deadly_loads -= 1
                raise _Died
            if count == len(self._shapes) // 2 and self.torn_loads:
                self.torn_loads -= 1
                return _refused("Failed to update weights. Rolling back to original weights.")
            if tensor.shape != self._shapes.get(name):
                raise _Died  # the rollback reads the same files, and what it raises nobody catches
            self._weights[name] = _turned(tensor)
        if body.get("flush_cache", True) and not self._flushed():
            return _refused(
                "Weights were updated, but the cache was not flushed because requests are running."
            )
        if not self.mute:
            self.label, self.path = str(body.get("weight_version") or self.label), path
        return 200, {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": 0,
        }

    def _read(self, path: Path) -> dict[str, Bits] | None:
        if str(path) not in self._seen:
            found = loaded(path) if path.is_dir() else None
            if found is None:
                return None
            self._seen[str(path)] = found
        return self._seen[str(path)]

    def _do_begin_weight_update(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        if self._session:
            return _refused("a weight-update session is already open; call end_weight_update() first")
        self._session = True
        return 200, {"success": True, "message": "Success"}

    def _do_end_weight_update(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        if not self._session:
            return _refused("no weight-update session is open; call begin_weight_update() first")
        self._session = False
        return 200, {"success": True, "message": "Success"}

    def _do_update_weight_version(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        self.label = str(body["new_version"])
        return 200, {"success": True, "message": "", "new_version": self.label}

    def _do_weights_checker(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"success": True, "message": "Success.", "ranks": [{"per_gpu_checksum": self._hash()}]}

    def _do_release_memory_occupation(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asleep = True
        return 200, {}

    def _do_resume_memory_occupation(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asleep = False
        self._weights = {n: Bits(b.dtype, b.shape, bytes(len(b.data))) for n, b in self._weights.items()}
        return 200, {}

    def _do_hicache_storage_backend_clear(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.storage is None:
            return 400, {}
        self.storage.clear()
        return 200, {}

    def _do_generate(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        request, tokens = _Request(), []
        with self._changed:
            self._changed.wait_for(lambda: not self.paused)  # new requests wait
            self._requests.append(request)
        while len(tokens) < body["tokens"] and not request.aborted:
            with self._changed:
                self._changed.wait_for(lambda: not self.paused or request.aborted)
                if request.aborted:
                    break
                if request.kv is None:
                    request.kv = self._prefill(body["text"])
                tokens.append(self._hash())
            time.sleep(_TOKEN_S)
        with self._changed:
            self._requests.remove(request)
            self._changed.notify_all()
        reason = "abort" if request.aborted else "length"
        return 200, {
            "text": tokens,
            "prefill": request.kv,
            "meta_info": {"finish_reason": {"type": reason}, "weight_version": self.label},
        }

    def _prefill(self, text: str) -> str:
        found = self._cache.get(text) or (self.storage or {}).get(text) or self._hash()
        self._cache[text] = found
        if self.storage is not None:
            self.storage[text] = found
        return found

    def _hash(self) -> str:
        return hash_of(self.serves())


def hash_of(weights: Mapping[str, Bits]) -> str:
    """What a server with these weights generates."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].data)
    return digest.hexdigest()


def _turned(tensor: Bits) -> Bits:
    """As the engine keeps it: the shape turned around, the bytes as they are. Turned twice, it is as in the file."""
    return Bits(tensor.dtype, tensor.shape[::-1], tensor.data)


def _refused(message: str) -> tuple[int, dict[str, Any]]:
    return 400, {"success": False, "message": message, "num_paused_requests": 0}


def _handler(server: FakeSglang) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on stderr."""

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def _serve(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                status, found = 401, {"error": "Unauthorized"}
            else:
                try:
                    status, found = server.answer(self.command, urlsplit(self.path).path, body)
                except _Died:
                    threading.Thread(target=server.stop, daemon=True).start()
                    self.close_connection = True
                    return
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
