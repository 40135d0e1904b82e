"""An HTTP proxy that fails on demand, for tests: one thread, one event loop, faults set and counted from
outside.

with FaultProxy("127.0.0.1", 8333) as proxy:
    proxy.add(Fault("lost", match=r"^PUT .*versions", times=1))
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

Action = Literal["status", "reset", "truncate", "stall", "lost", "flip", "replace", "endless"]
CHUNK = 256 << 10


@dataclass
class Fault:
    """What to do to a request whose head matches.

    Attributes:
        action: "status" answers by itself, nothing is forwarded. "lost" forwards and drops the answer. The
            others forward the head of the answer and then, after `after` bytes of its body: "reset" the
            connection, "truncate" (close it in order), "stall" for ever, "flip" the lowest bit of byte
            `after`. "replace" sends `body` as if it were the object, "endless" never ends the body.
        match: regular expression, searched in the request's head (request line and headers, lines ending in
            LF).
        times: how many requests are hit; None: all of them.
        every: hit only each n-th request that matches.
    """

    action: Action
    match: str = ""
    times: int | None = None
    every: int = 1
    after: int = 0
    status: int = 503
    code: str = "SlowDown"
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    seen: int = 0
    hits: int = 0

    def claims(self, head: str) -> bool:
        """Whether this request is to fail; counts it."""
        if (self.times is not None and self.hits >= self.times) or not re.search(
            self.match, head, re.M | re.I
        ):
            return False
        self.seen += 1
        if self.seen % self.every:
            return False
        self.hits += 1
        return True


class FaultProxy:
    """Listens on a free port of 127.0.0.1 and forwards to one upstream. `requests` holds the request lines
    seen, `callers` the client's port of each.
    """

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self.requests: list[str] = []
        self.callers: list[int] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="fault-proxy", daemon=True)

    @property
    def endpoint_url(self) -> str:
        """What a client is pointed to."""
        return f"http://127.0.0.1:{self.port}"

    def add(self, fault: Fault) -> Fault:
        """Arm a fault. The first armed one that claims a request acts."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Disarm all, forget the requests."""
        with self._lock:
            self._faults.clear()
            self.requests.clear()
            self.callers.clear()

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the fault proxy did not start")
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._client, "127.0.0.1", 0, limit=1 << 20)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _fault(self, head: str, caller: int) -> Fault | None:
        with self._lock:
            self.callers.append(caller)
            self.requests.append(head.split("\n", 1)[0])
            return next((fault for fault in self._faults if fault.claims(head)), None)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client connection, any number of requests."""
        upstream: asyncio.StreamWriter | None = None
        caller = int(writer.get_extra_info("peername")[1])
        try:
            source: asyncio.StreamReader | None = None
            while (head := await _head(reader)) is not None:
                fault = self._fault(head.decode("latin-1").replace("\r\n", "\n"), caller)
                if re.search(rb"(?i)\r\nexpect:\s*100-continue", head):
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    head = re.sub(rb"(?i)\r\nexpect:\s*100-continue", b"", head)
                if fault and fault.action == "status":
                    async for _ in _body(reader, head):
                        pass
                    await _answer(writer, fault, b"" if head.startswith(b"HEAD") else _error_body(fault.code))
                    continue
                if source is None or upstream is None:
                    source, upstream = await asyncio.open_connection(*self._upstream, limit=1 << 20)
                upstream.write(head)
                async for chunk in _body(reader, head):
                    upstream.write(chunk)
                    await upstream.drain()
                if not await self._respond(source, writer, head, fault):
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            for side in (writer, upstream):
                if side is not None:
                    side.close()

    @staticmethod
    async def _respond(
        source: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, fault: Fault | None
    ) -> bool:
        """Pass one answer on, spoilt as asked. False: the connection is over."""
        head = await _head(source)
        while head is not None and head.startswith(b"HTTP/1.1 100"):
            head = await _head(source)
        if head is None:
            return False
        if fault and fault.action == "lost":
            async for _ in _body(source, head, answer_to=request):
                pass
            _reset(writer)
            return False
        if fault and fault.action in ("replace", "endless"):
            return await _substitute(source, writer, request, head, fault)
        writer.write(head)
        seen = 0
        async for chunk in _body(source, head, answer_to=request):
            cut = fault.after - seen if fault else len(chunk)
            if fault is None or not 0 <= cut < len(chunk):
                writer.write(chunk)
            elif fault.action == "flip":
                writer.write(chunk[:cut] + bytes([chunk[cut] ^ 1]) + chunk[cut + 1 :])
            else:
                writer.write(chunk[:cut])
                await writer.drain()
                await asyncio.sleep(0.05)  # let the client have what was sent before the end comes
                if fault.action == "stall":
                    await asyncio.sleep(3600)
                if fault.action == "reset":
                    _reset(writer)
                return False
            seen += len(chunk)
            await writer.drain()
        return not re.search(rb"(?i)\r\nconnection:\s*close", head)


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _body(
    reader: asyncio.StreamReader, head: bytes, answer_to: bytes | None = None
) -> AsyncIterator[bytes]:
    """The raw body after `head`, by Content-Length or chunked."""
    if answer_to is not None and (answer_to.startswith(b"HEAD") or head[9:12] in (b"204", b"304")):
        return
    if re.search(rb"(?i)\r\ntransfer-encoding:\s*chunked", head):
        size = -1
        while size:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line + await reader.readexactly(size + 2)
        return
    length = re.search(rb"(?i)\r\ncontent-length:\s*(\d+)", head)
    left = int(length[1]) if length else 0
    while left:
        chunk = await reader.read(min(left, CHUNK))
        if not chunk:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(chunk)
        yield chunk


def _error_body(code: str) -> bytes:
    error = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
    return f'<?xml version="1.0" encoding="UTF-8"?>{error}'.encode()


async def _answer(writer: asyncio.StreamWriter, fault: Fault, body: bytes) -> None:
    lines = [
        f"HTTP/1.1 {fault.status} Injected",
        "Content-Type: application/xml",
        f"Content-Length: {len(body)}",
    ]
    lines += [f"{name}: {value}" for name, value in fault.headers.items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    await writer.drain()


async def _substitute(
    source: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, head: bytes, fault: Fault
) -> bool:
    """Another body under the head of the real answer, without the checksums of the real one."""
    async for _ in _body(source, head, answer_to=request):
        pass
    head = re.sub(
        rb"(?i)\r\n(content-length|etag|x-amz-checksum-[a-z0-9]*|transfer-encoding):[^\r]*", b"", head
    )
    if fault.action == "replace":
        writer.write(head[:-2] + b"Content-Length: %d\r\n\r\n" % len(fault.body) + fault.body)
        await writer.drain()
        return True
    writer.write(head[:-2] + b"Connection: close\r\n\r\n")
    while True:
        writer.write(b"\x00" * 65536)
        await writer.drain()
        fault.after += 65536


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
