"""What gcsfs uses of Google Cloud Storage's JSON API, in memory, with the generation precondition."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class FakeGcs(ThreadingHTTPServer):
    """Objects by name.

    `fail` holds statuses to answer next, one a request; `lose` counts answers to uploads to be dropped.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.bodies: dict[str, bytes] = {}
        self.sessions: dict[str, tuple[str, bytearray]] = {}
        self.lock = threading.Lock()
        self.fail: list[int] = []
        self.lose = 0

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def store(
        self, name: str, body: bytes, metadata: dict[str, Any], only_if_absent: bool
    ) -> dict[str, Any] | None:
        """None: the precondition failed."""
        with self.lock:
            if only_if_absent and name in self.objects:
                return None
            now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"
            found = {
                "name": name,
                "bucket": "bucket",
                "size": str(len(body)),
                "updated": now,
                "timeCreated": now,
            }
            self.objects[name] = {**metadata, **found, "generation": "1"}
            self.bodies[name] = body
            return self.objects[name]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeGcs

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def _reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _json(self, status: int, value: object) -> None:
        self._reply(status, json.dumps(value).encode(), Content_Type="application/json")

    def _begin(self) -> tuple[str, dict[str, str], bytes] | None:
        """(path, query, body), or None if the request is to fail."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.fail:
            status = self.server.fail.pop(0)
            self._json(status, {"error": {"code": status, "message": "injected"}})
            return None
        url = urlsplit(self.path)
        return url.path, {k: v[0] for k, v in parse_qs(url.query).items()}, body

    def do_GET(self) -> None:
        if (request := self._begin()) is None:
            return
        path, query, _ = request
        name = unquote(path.rsplit("/o/", 1)[1]) if "/o/" in path else None
        if name is None:
            prefix = query.get("prefix", "")
            items = [o for n, o in sorted(self.server.objects.items()) if n.startswith(prefix)]
            self._json(200, {"items": items})
        elif name not in self.server.objects:
            self._json(404, {"error": {"code": 404, "message": "No such object"}})
        elif query.get("alt") != "media":
            self._json(200, self.server.objects[name])
        else:
            body, asked = (
                self.server.bodies[name],
                re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")),
            )
            if asked and int(asked[1]) >= len(body):
                self._json(416, {"error": {"code": 416, "message": "Requested range not satisfiable"}})
            elif asked:
                self._reply(206, body[int(asked[1]) : int(asked[2] or len(body)) + 1])
            else:
                self._reply(200, body)

    def do_POST(self) -> None:
        if (request := self._begin()) is None:
            return
        path, query, body = request
        if path.startswith("/session/"):
            self._piece(path, body)
            return
        absent = query.get("ifGenerationMatch") == "0"
        if query["uploadType"] == "resumable":
            session = str(len(self.server.sessions))
            self.server.sessions[session] = (json.loads(body)["name"], bytearray())
            self._reply(200, Location=f"{self.server.endpoint_url}/session/{session}")
            return
        (_, described), (media, data) = self._parts(body)
        kind = re.search(rb"(?i)content-type: *([^\r\n]+)", media)
        metadata = {"contentType": kind[1].decode() if kind else "", **json.loads(described)}
        found = self.server.store(metadata.pop("name"), data, metadata, absent)
        self._settle(found)

    def _parts(self, body: bytes) -> list[tuple[bytes, bytes]]:
        """The two parts of a multipart body: header and content, byte for byte."""
        boundary = re.search(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])
        assert boundary
        parts = []
        for part in body.split(b"--" + boundary[1].encode())[1:3]:
            header, content = re.split(rb"\r?\n\r?\n", part, maxsplit=1)
            parts.append((header, re.sub(rb"\r?\n$", b"", content)))
        return parts

    def _piece(self, path: str, body: bytes) -> None:
        """A piece of a resumable upload."""
        name, held = self.server.sessions[path.rsplit("/", 1)[1]]
        held += body
        total = self.headers["Content-Range"].rsplit("/", 1)[1]
        if total != "*" and len(held) == int(total):
            self._settle(self.server.store(name, bytes(held), {}, False))
        else:
            self._reply(308, Range=f"bytes=0-{len(held) - 1}")

    def do_DELETE(self) -> None:
        if (request := self._begin()) is None:
            return
        name = unquote(request[0].rsplit("/o/", 1)[-1])
        if request[0].startswith("/session/"):
            self._reply(499)
        elif self.server.objects.pop(name, None) is None:
            self._json(404, {"error": {"code": 404, "message": "No such object"}})
        else:
            self._reply(204)

    def _settle(self, found: dict[str, Any] | None) -> None:
        """Answer an upload, or drop the answer."""
        if self.server.lose:
            self.server.lose -= 1
            self.close_connection = True
            self.connection.close()
        elif found is None:
            self._json(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        else:
            self._json(200, found)


@contextmanager
def fake_gcs() -> Iterator[FakeGcs]:
    """Run one on a free port."""
    with FakeGcs() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
