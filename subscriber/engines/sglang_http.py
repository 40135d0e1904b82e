"""The HTTP routes of an SGLang server that an update of its weights goes through.

What each answer means is decided here; in which order they are called, and what a refusal leads to, in `sglang`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final, Literal
from urllib.parse import SplitResult, urlsplit

from weightcast.schemas.engine import TOKEN_VARIABLE
from weightcast.schemas.errors import StorageError, UsageError

PauseMode = Literal["abort", "retract"]
"""What happens to requests in flight: they end early; or they wait and go on under the new weights. SGLang's
`in_place` is no choice: under it the cache of the old weights cannot be flushed."""

_INFO_S: Final = 10.0  # of a question that the server's API process answers alone
_PAUSE_S: Final = 120.0  # pausing takes as long as the step under way, and one second a round of aborts
_REQUIRED: Final = ("/update_weights_from_disk", "/pause_generation", "/continue_generation", "/flush_cache")
_HINT: Final = (
    "give the URL of an SGLang server itself (python -m sglang.launch_server, HTTP, 0.5 or newer), "
    "not that of a router or a proxy that hides its administration routes"
)


@dataclass(frozen=True, slots=True)
class Served:
    """What the server says that it serves.

    Attributes:
        label: its `weight_version`; "default" after a start, unless it was given --weight-version.
        path: the checkpoint that it loaded last.
    """

    label: str
    path: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and a JSON object; `body` is empty where there was none."""

    status: int
    body: dict[str, Any]
    text: str

    @property
    def good(self) -> bool:
        """Both the status and the `success` field, where there is one, say so."""
        return self.status == 200 and self.body.get("success", True) is True

    @property
    def reason(self) -> str:
        """Why not, in the server's words."""
        return str(self.body.get("message") or self.text or f"status {self.status}").strip()[:500]


class SglangApi:
    """Talks to one server, with one connection a request.

    Every method raises:
        StorageError: the server cannot be reached, is starting, or did not answer in time.
        UsageError: it has no such route, or the key is not its own.

    Args:
        url: the server's own, "http://127.0.0.1:30000".
        key: its --admin-api-key, or its --api-key if it has no other.
        load_s: how long a load of the weights may take, in seconds.
    """

    def __init__(self, url: str, key: str | None, *, load_s: float) -> None:
        parts = _split(url)
        self.url = url.rstrip("/")
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._secure = parts.scheme == "https"
        self._key = key
        self._load_s = load_s
        self._info_route = "/model_info"

    def probe(self) -> None:
        """See that all routes are there and the key fits, without doing anything.

        Raises:
            UsageError: names the route.
        """
        self.served()
        for route in _REQUIRED[1:-1]:  # asked with the wrong method, a route that exists answers 405
            if self._send("GET", route, None, _INFO_S).status == 404:
                raise self._missing(route, 404)
        # An update without a path is refused before anything happens: the one way to see that the route takes a POST.
        answer = self._call(_REQUIRED[0], {}, _INFO_S)
        if answer.status == 200:
            raise UsageError(
                f"{self.url}{_REQUIRED[0]} answers a request without a path with success, so it loads nothing",
                hint=_HINT,
            )

    def served(self) -> Served:
        """What it says that it serves. Asks its API process alone, so it is cheap."""
        answer = self._send("GET", self._info_route, None, _INFO_S)
        if answer.status == 404 and self._info_route == "/model_info":
            self._info_route = "/get_model_info"  # its name before 0.5.5
            answer = self._send("GET", self._info_route, None, _INFO_S)
        if answer.status in (404, 405):
            raise self._missing(self._info_route, answer.status)
        if answer.status != 200:
            raise StorageError(f"{self.url}{self._info_route} answers {answer.status}: {answer.reason}")
        if "weight_version" not in answer.body:
            raise UsageError(
                f"{self.url}{self._info_route} says no weight_version, so no update could be confirmed",
                hint=_HINT,
            )
        return Served(str(answer.body["weight_version"]), str(answer.body.get("model_path")))

    def wait_idle(self) -> bool:
        """Return once no load is under way, also none whose caller has gone: it is answered in turn, behind them.

        Returns:
            Whether the server has a cache that a flush leaves alone, on disks or on other hosts.
        """
        answer = self._send("GET", "/server_info", None, self._load_s)
        if answer.status == 404:
            answer = self._send("GET", "/get_server_info", None, self._load_s)
        return bool(answer.body.get("hicache_storage_backend") or answer.body.get("enable_lmcache"))

    def pause(self, mode: PauseMode) -> Answer:
        """Stop generating. New requests wait."""
        return self._call("/pause_generation", {"mode": mode}, _PAUSE_S)

    def resume(self) -> Answer:
        """Generate again."""
        return self._call("/continue_generation", {}, _PAUSE_S)

    def flush(self) -> Answer:
        """Drop all cached keys and values; refused (400) while requests run."""
        return self._call("/flush_cache", {}, _PAUSE_S)

    def clear_storage(self) -> Answer:
        """Drop what is cached outside the server's memory."""
        return self._call("/hicache/storage-backend/clear", {}, self._load_s)

    def load(self, path: str, label: str, *, load_format: str | None, abort: bool) -> Answer:
        """Read all weights from `path`. A refusal leaves them old, new or torn; the answer does not tell which."""
        body: dict[str, Any] = {
            "model_path": path,
            "weight_version": label,
            "flush_cache": True,
            "abort_all_requests": abort,
        }
        if load_format is not None:
            body["load_format"] = load_format
        return self._call("/update_weights_from_disk", body, self._load_s)

    def begin(self) -> Answer:
        """Open a session for updates."""
        return self._call("/begin_weight_update", {}, self._load_s)

    def end(self) -> Answer:
        """Close it."""
        return self._call("/end_weight_update", {}, self._load_s)

    def checksum(self) -> str | None:
        """Something that differs if the live weights do; None if the server does not offer it."""
        answer = self._send("POST", "/weights_checker", {"action": "checksum"}, self._load_s)
        found = answer.body.get("ranks") or answer.body.get("per_engine_checksum")
        return json.dumps(found, sort_keys=True) if answer.good and found else None

    def _call(self, route: str, body: dict[str, Any], timeout_s: float) -> Answer:
        answer = self._send("POST", route, body, timeout_s)
        if answer.status in (404, 405):
            raise self._missing(route, answer.status)
        if answer.status == 503:
            raise StorageError(f"{self.url}{route} is not ready: {answer.reason}")
        return answer

    def _send(self, method: str, route: str, body: dict[str, Any] | None, timeout_s: float) -> Answer:
        connect = HTTPSConnection if self._secure else HTTPConnection
        connection = connect(self._host, self._port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request(
                method, self._prefix + route, None if body is None else json.dumps(body), headers
            )
            response = connection.getresponse()
            status, data = response.status, response.read()
        except (OSError, HTTPException) as error:
            raise StorageError(
                f"the SGLang server at {self.url} does not answer {route}: {error or type(error).__name__}",
                hint="it is asked again",
            ) from error
        finally:
            connection.close()
        if status in (401, 403):
            raise UsageError(
                f"{self.url}{route} refuses the key: {status}",
                hint=f"{TOKEN_VARIABLE} must be the server's --admin-api-key, or its --api-key if it has no other",
            )
        return _answer(status, data)

    def _missing(self, route: str, status: int) -> UsageError:
        return UsageError(f"{self.url} has no {route}: it answers {status}", hint=_HINT)


def _answer(status: int, data: bytes) -> Answer:
    text = data.decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        body = {}
    return Answer(status, body if isinstance(body, dict) else {}, text)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is no URL of a server: {error}") from error
    if parts.username or parts.password:
        raise UsageError(
            "the URL of the server holds a password", hint=f"the key belongs into {TOKEN_VARIABLE}"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"{url!r} is no URL of a server", hint="as in http://127.0.0.1:30000")
    return parts
