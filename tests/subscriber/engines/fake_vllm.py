"""A server that follows the rules of the plugin inside vLLM, over real HTTP: weights in numpy, parts of them per rank.

It keeps no secret of what it did: `steps` is the order of everything that an install does, `violations` says whether it
ever generated with weights that are no version. Faults are ordered by step: `fail("write 1", times=2)`.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from weightcast.codec import Geometry, Memory, digest_all
from weightcast.manifest.tensorfile import mapped, read_header
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.engine import (
    PREFIX,
    PROTOCOL,
    AdoptRequest,
    AttachReport,
    AttachRequest,
    Fault,
    Held,
    InstallReport,
    InstallRequest,
    LoadRequest,
    Pulse,
    RankRow,
    ReadReport,
    ReadRequest,
    ServerState,
    VerifyReport,
    VerifyRequest,
)
from weightcast.schemas.errors import Conflict, Corrupt, StorageError, UsageError, WeightcastError
from weightcast.schemas.layout import Layout
from weightcast.subscriber.engines.staging import map_positions, map_values, read_layout, read_staged

from ...versions import Bits, bits_of

TOKEN = "a-token-for-tests"
_STATUS = {"usage": 422, "conflict": 409}
_REQUESTS: dict[str, type[BaseModel]] = {
    "attach": AttachRequest,
    "adopt": AdoptRequest,
    "read": ReadRequest,
    "install": InstallRequest,
    "load": LoadRequest,
    "verify": VerifyRequest,
}


@dataclass
class Part:
    """Elements [begin, end) of a tensor, on one rank."""

    begin: int
    end: int
    bits: Any  # unsigned [end - begin]


@dataclass
class Rank:
    """One worker process."""

    name: str
    parts: dict[str, Part]
    process: str = field(default_factory=lambda: uuid.uuid4().hex)
    session: str | None = None
    held: Held | None = None
    layout: str | None = None
    whole: bool = True

    def row(self) -> RankRow:
        """What it says of itself."""
        return RankRow(
            rank=self.name,
            process=self.process,
            session=self.session,
            held=self.held,
            layout=self.layout,
            whole=self.whole,
        )


class Engine:
    """The model on its ranks, and the ops of the plugin."""

    def __init__(self, model: Mapping[str, torch.Tensor], ranks: int = 2) -> None:
        self.model = {name: bits_of(tensor) for name, tensor in model.items()}
        self.count = ranks
        self.refused: dict[str, str] = {}
        self.stub = False
        self.blind = False  # to bits that somebody else wrote: what is proved at an install are its changes
        self.steps: list[str] = []
        self.calls: list[str] = []
        self.violations: list[str] = []
        self.delay: dict[str, float] = {}
        self.at_step: dict[str, threading.Event] = {}
        self._faults: dict[str, list[WeightcastError]] = {}
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """As a process that was started anew: base weights, nothing known."""
        self.paused = self.sleeping = False
        self.process = uuid.uuid4().hex
        self.label: str | None = None
        self.layout: Layout | None = None
        self.ranks = [Rank(f"dp0-pp0-tp{i}", self._parts(i)) for i in range(self.count)]

    def _parts(self, rank: int) -> dict[str, Part]:
        """Large tensors are split over the ranks, small ones are on each."""
        found = {}
        for name, bits in self.model.items():
            flat = np.frombuffer(bits.data, f"u{WIDTHS[bits.dtype]}").copy()
            if len(flat) % self.count == 0 and len(flat) >= 64:
                size = len(flat) // self.count
                found[name] = Part(rank * size, (rank + 1) * size, flat[rank * size : (rank + 1) * size])
            else:
                found[name] = Part(0, len(flat), flat)
        return found

    def sleep(self) -> None:
        """Level 2: the weights are given back."""
        self.sleeping = True
        for rank in self.ranks:
            rank.session, rank.held, rank.layout = None, None, None
            for part in rank.parts.values():
                part.bits[:] = 0

    def fail(self, step: str, times: int = 1, kind: type[WeightcastError] = StorageError) -> None:
        """Let the next `times` runs of a step fail before it does anything."""
        self._faults.setdefault(step, []).extend(kind(f"{step} was told to fail") for _ in range(times))

    def heal(self) -> None:
        """No more faults."""
        self._faults.clear()

    def serving(self) -> dict[str, Bits]:
        """What it generates with, put together from the ranks; they must agree where they have the same part."""
        whole: dict[str, Any] = {}
        for name, bits in self.model.items():
            width = WIDTHS[bits.dtype]
            flat = np.zeros(len(bits.data) // width, f"u{width}")
            for rank in self.ranks:
                part = rank.parts[name]
                flat[part.begin : part.end] = part.bits
            assert all(
                np.array_equal(flat[r.parts[name].begin : r.parts[name].end], r.parts[name].bits)
                for r in self.ranks
            ), f"ranks differ in {name}"
            whole[name] = Bits(bits.dtype, bits.shape, flat.tobytes())
        return whole

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name in self.at_step:
            self.at_step[name].set()
        time.sleep(self.delay.get(name, 0))
        if self._faults.get(name):
            raise self._faults[name].pop(0)

    # What the routes do.

    def pulse(self) -> Pulse:
        """GET pulse."""
        return Pulse(process=self.process, resting=self.paused or self.sleeping)

    def state(self) -> ServerState:
        """GET state."""
        return ServerState(
            protocol=PROTOCOL,
            weightcast="0",
            engine="fake 1",
            model="model",
            weight_version=self.label,
            paused=self.paused,
            sleeping=self.sleeping,
            ranks=[rank.row() for rank in self.ranks],
        )

    def run(self, route: str, request: Any) -> BaseModel:
        """POST: one at a time."""
        with self._lock:
            self._step(route)
            if self.sleeping:
                raise StorageError("asleep")
            session = request.session
            if route != "attach" and session is not None:
                if any(rank.session is None for rank in self.ranks):
                    raise StorageError("no plan in this process: attach first")
                if any(rank.session != session for rank in self.ranks):
                    raise Conflict("another session drives the engine")
                if route != "adopt" and any(
                    rank.layout != getattr(request, "layout_sha256", rank.layout) for rank in self.ranks
                ):
                    raise Corrupt("a plan for another layout: attach again")
            answer: BaseModel = getattr(self, f"_{route}")(request)
            return answer

    def _attach(self, request: AttachRequest) -> AttachReport:
        self.layout = read_layout(Path(request.layout), request.layout_sha256)
        refused = dict(self.refused)
        for spec in self.layout.stored:
            bits = self.model.get(spec.name)
            if bits is None or (bits.dtype, bits.shape) != (spec.dtype, spec.shape):
                refused.setdefault(spec.name, "no rank of the engine has a place for it")
        for rank in self.ranks:
            rank.session, rank.layout = request.session, request.layout_sha256
        digest, apart = ("f" * 32, []) if refused else self._digest()
        if apart:
            digest = uuid.uuid4().hex  # of no version
        return AttachReport(
            tensors=len(self.layout.stored),
            dense={},
            refused=refused,
            digest=digest,
            seconds=0.0,
            ranks=[rank.row() for rank in self.ranks],
        )

    def _digest(self) -> tuple[str, list[str]]:
        """Of the live bits; and where holders differ."""
        assert self.layout is not None
        try:
            served = self.serving()
        except AssertionError as error:
            return "0" * 32, [str(error)]
        geometry = Geometry(self.layout)
        memory = Memory.over(
            geometry, {s.name: np.frombuffer(served[s.name].data, np.uint8) for s in self.layout.stored}
        )
        return digest_all(geometry, memory).hex, []

    def _adopt(self, request: AdoptRequest) -> ServerState:
        digest, faults = self._digest()
        if faults or digest != request.held.digest:
            raise Corrupt("these bits are another version")
        if self.paused and not all(rank.whole for rank in self.ranks):
            self._settle(request.held)
            self._commit(request.held)
            self._resume()
        else:
            self._commit(request.held)
        return self.state()

    def _read(self, request: ReadRequest) -> ReadReport:
        if not all(rank.whole for rank in self.ranks):
            raise Corrupt("torn")
        positions = map_positions(Path(request.positions), request.counts)
        values = map_values(Path(request.values), request.counts, writable=True)
        for dtype, at in positions.items():
            assert np.all(np.diff(at) > 0)
            for name, found, mine in self._spread(dtype, at):
                for rank in self.ranks:
                    part = rank.parts[name]
                    here = (found >= part.begin) & (found < part.end)
                    values[dtype][mine[here]] = part.bits[found[here] - part.begin]
        return ReadReport(seconds=0.0)

    def _spread(self, dtype: str, at: Any) -> list[tuple[str, Any, Any]]:
        """Flat positions as (tensor, elements of it, indices into `at`)."""
        assert self.layout is not None
        space = Geometry(self.layout)[dtype]
        cuts = np.searchsorted(at, space.starts)
        return [
            (name, at[cuts[i] : cuts[i + 1]] - space.starts[i], np.arange(cuts[i], cuts[i + 1]))
            for i, name in enumerate(space.names)
        ]

    def _install(self, request: InstallRequest) -> InstallReport:
        whole = all(rank.whole for rank in self.ranks)
        if whole and all(rank.held == request.target for rank in self.ranks):
            if self.paused:
                self._settle(request.target)
                self._resume()
            return self._report(request.target, 0)
        if whole and any(rank.held != request.base for rank in self.ranks):
            raise Corrupt("the ranks hold another version: attach again")
        if self.stub:
            return self._report(request.target, 0)
        changes = read_staged(Path(request.staged))
        self._step("pause")
        self.paused = True
        for number, rank in enumerate(self.ranks):
            rank.whole = False
            self._step(f"write {number}")
            for dtype, found in changes.items():
                for name, at, mine in self._spread(dtype, found.positions):
                    part = rank.parts[name]
                    here = (at >= part.begin) & (at < part.end)
                    part.bits[at[here] - part.begin] = found.values[mine[here]]
        return self._finish(request.target)

    def _load(self, request: LoadRequest) -> InstallReport:
        sources = {}
        for name in request.files:
            if not Path(name).is_file():
                raise UsageError(f"{name} is no file")
            with mapped(Path(name)) as view:
                sources.update(
                    {e.spec.name: bytes(view[e.begin : e.end].data) for e in read_header(Path(name))}
                )
        self._step("pause")
        self.paused = True
        for number, rank in enumerate(self.ranks):
            rank.whole = False
            self._step(f"write {number}")
            for name, part in rank.parts.items():
                if self.layout is not None and name in self.layout.stored_by_name:
                    part.bits[:] = np.frombuffer(sources[name], part.bits.dtype)[part.begin : part.end]
        return self._finish(request.target)

    def _finish(self, target: Held) -> InstallReport:
        self._step("confirm")
        digest, faults = self._digest()
        if not self.blind and (faults or digest != target.digest):
            raise Corrupt("the ranks do not hold the target")
        self._settle(target)
        self._commit(target)
        self._resume()
        return self._report(target, 1)

    def _settle(self, target: Held) -> None:
        self._step("label")
        self.label = str(target.version)
        self._step("caches")

    def _commit(self, target: Held) -> None:
        self._step("commit")
        for rank in self.ranks:
            rank.held, rank.whole = target, True

    def _resume(self) -> None:
        self._step("resume")
        self.paused = False
        digest, faults = self._digest()
        held = self.ranks[0].held
        faults = [] if self.blind else faults
        if faults or held is None or any(r.held != held or not r.whole for r in self.ranks):
            self.violations.append("resumed with ranks apart")
        elif digest != held.digest and not self.blind:
            self.violations.append(f"resumed as version {held.version} with other bits")

    def _report(self, target: Held, written: int) -> InstallReport:
        return InstallReport(
            held=target,
            written=written,
            drain_s=0.0,
            write_s=0.0005,
            paused_s=0.001,
            ranks=[rank.row().model_copy(update={"held": target}) for rank in self.ranks]
            if self.stub
            else [rank.row() for rank in self.ranks],
        )

    def _verify(self, request: VerifyRequest) -> VerifyReport:
        if self.layout is None:
            raise StorageError("no plan yet: attach first")
        digest, faults = self._digest()
        held = self.state().held
        if held is None:
            faults.append("the ranks hold no version")
        elif digest != held.digest:
            faults.append("the live bits are another version")
        rows = [rank.row() for rank in self.ranks]
        return VerifyReport(digest=digest, held=held, good=not faults, faults=faults, seconds=0.0, ranks=rows)


class FakeServer:
    """An engine at a port of its own, which stays the same however often it goes down and up.

    Attributes:
        absent: HTTP status of every route below /weightcast, as of a server without the plugin; 0: they are there.
        hang_up: routes whose answers are lost: "before" or "after" the work was done; how often.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.absent = 0
        self.hang_up: dict[str, tuple[str, int]] = {}
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.up()

    @property
    def url(self) -> str:
        """Of the server."""
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        """Listen."""
        handler = type("Handler", (_Handler,), {"fake": self})
        server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        server.daemon_threads = True
        self.port = server.server_port
        self._server = server
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def down(self) -> None:
        """Connections are refused from here on."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self) -> None:
        """State."""
        self._answer(None)

    def do_POST(self) -> None:
        """All else."""
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes | None) -> None:
        fake, route = self.fake, self.path.removeprefix(f"{PREFIX}/")
        fake.engine.calls.append(route)
        if fake.absent:
            self._send(fake.absent, {"detail": "Not Found"})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, Fault(kind="usage", message="no token, or a wrong one").model_dump())
        else:
            when, times = fake.hang_up.get(route, ("", 0))
            if times:
                fake.hang_up[route] = (when, times - 1)
            if times and when == "before":
                self.close_connection = True
                return
            status, document = self._work(route, body)
            if times and when == "after":
                self.close_connection = True
                return
            self._send(status, document)

    def _work(self, route: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
        engine = self.fake.engine
        try:
            if route == "pulse":
                return 200, engine.pulse().model_dump()
            if body is None:
                return 200, engine.state().model_dump()
            request = _REQUESTS[route].model_validate_json(body)
            return 200, engine.run(route, request).model_dump()
        except WeightcastError as error:
            fault = Fault(kind=error.kind, message=error.message, hint=error.hint, paused=engine.paused)
            return _STATUS.get(error.kind, 500), fault.model_dump()

    def _send(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # the client was killed

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""
