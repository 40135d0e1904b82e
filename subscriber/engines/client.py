"""Requests to the plugin inside an engine's server, and its answers as values or as this package's errors."""

from __future__ import annotations

import http.client
import json
import os
from contextlib import closing
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, ValidationError

from weightcast.schemas.engine import (
    PREFIX,
    PROTOCOL,
    TOKEN_VARIABLE,
    AdoptRequest,
    AttachReport,
    AttachRequest,
    Fault,
    InstallReport,
    InstallRequest,
    LoadRequest,
    Pulse,
    ReadReport,
    ReadRequest,
    ServerState,
    VerifyReport,
    VerifyRequest,
)
from weightcast.schemas.errors import (
    KINDS,
    Conflict,
    StorageError,
    Unsupported,
    Untrusted,
    UsageError,
    WeightcastError,
)

STATE_S: Final = 10.0
"""Seconds for a question that costs the server nothing; also for connecting."""
READ_S: Final = 180.0
"""For what costs as much as the changes of a version, and may wait for an install."""
WHOLE_S: Final = 1800.0
"""For what reads or writes all weights, or waits for requests in flight to finish."""

_MAX_ANSWER_BYTES: Final = (
    256 << 20
)  # a report names every tensor once at most; a layout has millions at most

A = TypeVar("A", bound=BaseModel)


class EngineClient:
    """Speaks to one server. Holds no connection between two requests: a server that restarted is just asked again.

    Every method raises:
        StorageError: it cannot be reached, does not answer in time, or says that it failed for now.
        UsageError: there is no plugin, or it does not take the token; says what to do.
        Conflict: another subscriber has taken it over.
        Corrupt: it says that weights are not what they must be.
        Untrusted: it answers something else.

    Args:
        url: `http://HOST:PORT` of the server.
        token: the secret that both share; from `WEIGHTCAST_TOKEN` if not given.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._parts = _parse(self.url)
        self._token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
        if not self._token or not self._token.isascii() or not self._token.isprintable():
            raise UsageError(
                f"there is no usable token for {self.url}",
                hint=f"set {TOKEN_VARIABLE} to the same secret here and for the server",
            )

    def state(self) -> ServerState:
        """What it serves."""
        state = self._ask("state", None, ServerState, STATE_S)
        if state.protocol != PROTOCOL:
            raise self._other_protocol(state.protocol)
        return state

    def pulse(self) -> Pulse:
        """See Pulse."""
        return self._ask("pulse", None, Pulse, STATE_S)

    def attach(self, request: AttachRequest) -> AttachReport:
        """See AttachRequest."""
        return self._ask("attach", request, AttachReport, WHOLE_S)

    def adopt(self, request: AdoptRequest) -> ServerState:
        """See AdoptRequest."""
        return self._ask("adopt", request, ServerState, READ_S)

    def read(self, request: ReadRequest) -> ReadReport:
        """See ReadRequest."""
        return self._ask("read", request, ReadReport, READ_S)

    def install(self, request: InstallRequest) -> InstallReport:
        """See InstallRequest."""
        return self._ask("install", request, InstallReport, WHOLE_S)

    def load(self, request: LoadRequest) -> InstallReport:
        """See LoadRequest."""
        return self._ask("load", request, InstallReport, WHOLE_S)

    def verify(self, request: VerifyRequest) -> VerifyReport:
        """See VerifyRequest."""
        return self._ask("verify", request, VerifyReport, WHOLE_S)

    def _ask(self, route: str, request: BaseModel | None, answer: type[A], timeout_s: float) -> A:
        status, body = self._exchange(route, request, timeout_s)
        if status != http.client.OK:
            raise self._refusal(route, status, body)
        try:
            return answer.model_validate_json(body)
        except ValidationError as error:
            raise self._misunderstood(route, body, error) from error

    def _exchange(self, route: str, request: BaseModel | None, timeout_s: float) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        body = None
        if request is not None:
            headers["Content-Type"] = "application/json"
            body = request.model_dump_json().encode()
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=min(timeout_s, STATE_S))
        with closing(connection):
            try:
                connection.connect()
                connection.sock.settimeout(timeout_s)
                path = f"{self._parts.path}{PREFIX}/{route}"
                connection.request("GET" if body is None else "POST", path, body, headers)
                response = connection.getresponse()
                return response.status, response.read(_MAX_ANSWER_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise StorageError(
                    f"the engine at {self.url} does not answer {route}: {error or type(error).__name__}",
                    hint="start it if it is down; a sidecar that runs on asks again",
                ) from error

    def _refusal(self, route: str, status: int, body: bytes) -> WeightcastError:
        """The error that an answer other than 200 stands for."""
        try:
            fault = Fault.model_validate_json(body)
        except ValidationError:
            fault = None
        told = f"the engine at {self.url} refuses {route}"
        if status == http.client.UNAUTHORIZED:
            return UsageError(
                f"{told}: it does not take the token",
                hint=f"set {TOKEN_VARIABLE} to the same secret here and for the server",
            )
        if fault is not None and fault.kind == Conflict.kind:
            return taken_over(self.url)
        if fault is not None:
            kind = KINDS.get(fault.kind, StorageError if status >= 500 else UsageError)
            paused = "; it is paused" if fault.paused else ""
            return kind(f"{told}: {fault.message}{paused}", hint=fault.hint)
        if status in (http.client.NOT_FOUND, http.client.METHOD_NOT_ALLOWED):
            return UsageError(
                f"the server at {self.url} has no route {PREFIX}/{route} (HTTP {status})",
                hint="install weightcast into the server's environment and start it with VLLM_PLUGINS=weightcast",
            )
        what = f"{told} with HTTP {status}: {body[:200].decode('utf-8', 'replace')!r}"
        return StorageError(what) if status >= 500 or status == 429 else UsageError(what)

    def _misunderstood(self, route: str, body: bytes, error: ValidationError) -> WeightcastError:
        found = _protocol_in(body)
        if found is not None and found != PROTOCOL:
            return self._other_protocol(found)
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "answer"
        return Untrusted(
            f"the engine at {self.url} answers {route} with something else: {where}: {first['msg']}",
            hint="install the same release of weightcast beside the engine and inside its server",
        )

    def _other_protocol(self, found: object) -> WeightcastError:
        return Unsupported(
            f"the engine at {self.url} speaks protocol {found}, this release {PROTOCOL}",
            hint="install the same release of weightcast beside the engine and inside its server",
        )


def taken_over(url: str) -> Conflict:
    """What a subscriber ends with when its session is no longer the engine's, however it finds that out."""
    return Conflict(
        f"another subscriber has taken over the engine at {url}",
        hint="one subscriber drives an engine: stop one of them",
    )


def _parse(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is not the URL of a server: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"{url!r} is not the URL of a server", hint="for example http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise UsageError(
            "the URL of the server holds a password", hint=f"the secret belongs into {TOKEN_VARIABLE}"
        )
    return parts


def _protocol_in(body: bytes) -> Any:
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return raw.get("protocol") if isinstance(raw, dict) else None
