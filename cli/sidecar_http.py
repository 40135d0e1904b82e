"""Health and metrics of a sidecar over HTTP."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from weightcast.schemas.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 10.0
"""A client that sends nothing for so long is dropped."""


class Health:
    """Whether the process works (live) and does its job (ready). May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead: str | None = None
        self._obstacles: dict[str, str] = {"start": "starting"}

    def obstacle(self, part: str, reason: str | None) -> None:
        """Say why `part` keeps the process from its job; None: it no longer does."""
        with self._lock:
            self._obstacles.pop(part, None)
            if reason is not None:
                self._obstacles[part] = reason

    def started(self) -> None:
        """The start is over."""
        self.obstacle("start", None)

    def die(self, reason: str) -> None:
        """The process cannot do its job any more, and a restart may help."""
        with self._lock:
            self._dead = reason

    @property
    def live(self) -> bool:
        """Whether the process works."""
        return self._dead is None

    @property
    def ready(self) -> bool:
        """Whether it does its job."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why it is not ready."""
        with self._lock:
            return ([self._dead] if self._dead is not None else []) + list(self._obstacles.values())


class HttpServer(ThreadingHTTPServer):
    """`/healthz`, `/readyz`, `/metrics`; a thread for each request, none of which waits for anything."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], health: Health, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.health = health
        self.registry = registry
        super().__init__(address, _Handler)

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body for a path."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        text = "text/plain; charset=utf-8"
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self.registry)
        if path not in ("/healthz", "/readyz"):
            return 404, text, b"/healthz, /readyz, /metrics\n"
        reasons = self.health.reasons
        good = self.health.live if path == "/healthz" else not reasons
        return (200, text, b"ok\n") if good else (503, text, ("\n".join(reasons) + "\n").encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""
        log.debug("request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    timeout = REQUEST_TIMEOUT_S
    server_version = "weightcast"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer."""
        status, kind, body = self.server.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        """The same without the body."""
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds: only for debugging."""
        log.debug(format, *args)


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, with an IPv6 host in brackets; an empty host is 127.0.0.1.

    Raises:
        UsageError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if (
        not colon
        or not port.isascii()
        or not port.isdigit()
        or int(port) > 65_535
        or (":" in host and host[0] != "[")
    ):
        raise UsageError(f"{text!r} is not HOST:PORT", hint="for example 127.0.0.1:9464 or [::]:9464")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def serve_http(host: str, port: int, health: Health, registry: CollectorRegistry) -> HttpServer:
    """Serve in a daemon thread; port 0 takes a free one (`server_port`). `shutdown`, `server_close` end it.

    Raises:
        UsageError: the address cannot be listened on.
    """
    try:
        server = HttpServer((host, port), health, registry)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}") from error
    threading.Thread(target=server.serve_forever, args=(0.1,), name="weightcast-http", daemon=True).start()
    return server


@contextmanager
def serving(http: str | None, health: Health, registry: CollectorRegistry) -> Iterator[HttpServer | None]:
    """Serve at HOST:PORT, if given, for as long as the context lasts."""
    if http is None:
        yield None
        return
    server = serve_http(*parse_address(http), health, registry)
    log.info("serving http://%s", "{}:{}".format(*server.server_address[:2]))
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
