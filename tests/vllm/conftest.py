"""Streams, live servers and fresh engines for the tests with a real vLLM. `make test-vllm` runs them.

Workers of one run share streams, pulled checkpoints and the answers of fresh engines; a live server belongs to one worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling

from .feed import Feed
from .models import Kind, make_stream
from .references import References, made, pull
from .server import Rows, Server
from .sidecar import Sidecar


@dataclass(frozen=True)
class Spec:
    """A kind of model and how it is served."""

    kind: Kind
    ranks: int = 1
    replicas: int = 1
    experts: bool = False  # expert parallel
    layout: str = "all"

    @property
    def name(self) -> str:
        """For folders and test ids."""
        parts = [self.kind, f"tp{self.ranks}", f"dp{self.replicas}" if self.replicas > 1 else ""]
        parts += ["ep" if self.experts else "", "" if self.layout == "all" else self.layout]
        return "-".join(filter(None, parts))

    @property
    def options(self) -> list[str]:
        """Of `vllm serve`."""
        tp = ["--tensor-parallel-size", str(self.ranks)] if self.ranks > 1 else []
        dp = ["--data-parallel-size", str(self.replicas)] if self.replicas > 1 else []
        return [*tp, *dp, *(["--enable-expert-parallel"] if self.experts else [])]


class Bed:
    """What the tests of one worker work with."""

    def __init__(self, shared: Path, own: Path, core: int) -> None:
        self._shared = shared
        self._own = own
        self.core = core
        self._served = 0
        self.references = References(shared / "answers", core)

    def stream(self, kind: Kind) -> Path:
        """The root of the published stream of a kind of model."""
        folder = self._shared / "streams" / kind
        return made(folder / "stream", lambda: _make(kind, folder))

    def checkpoint(self, kind: Kind, version: int) -> Path:
        """What `weightcast pull` writes."""
        return pull(self.stream(kind), version, self._shared / "pulled" / kind / str(version))

    def fresh(self, spec: Spec, version: int, nth: int) -> Rows:
        """The answers of the nth fresh engine on that checkpoint. Replicas are alike: one is asked."""
        more = {"enable_expert_parallel": True} if spec.experts else {}
        model = self.checkpoint(spec.kind, version)
        return self.references.of(model, layout=spec.layout, ranks=spec.ranks, nth=nth, **more)

    def live(self, spec: Spec, *, threads: str | None = None, **more: Any) -> Live:
        """A starting server on version 0, and a feed whose head that is. Threads: the cores, if not those of its ranks."""
        self._served += 1
        folder = self._own / f"{self._served}-{spec.name}"
        feed = Feed(self.stream(spec.kind), folder / "root")
        ranks = spec.ranks * spec.replicas
        cores = "|".join(map(str, range(ranks))) if ranks > 1 else str(self.core)
        model = self.checkpoint(spec.kind, 0)
        server = Server(model, folder, spec.options, layout=spec.layout, threads=threads or cores, **more)
        return Live(self, spec, server, feed, folder)


class Live:
    """A server, the stream it follows, and sidecars between the two."""

    def __init__(self, bed: Bed, spec: Spec, server: Server, feed: Feed, folder: Path) -> None:
        self.bed = bed
        self.spec = spec
        self.server = server
        self.feed = feed
        self._folder = folder
        self._sidecars = 0

    def sidecar(self, *options: str) -> Sidecar:
        """Start a sidecar between them."""
        self._sidecars += 1
        return Sidecar(self.feed.root, self.server, self._folder / f"sidecar-{self._sidecars}", *options)

    def probe(self) -> list[Rows]:
        """The answers of each replica."""
        if self.spec.replicas == 1:
            return [self.server.probe()]
        return [self.server.probe(replica) for replica in range(self.spec.replicas)]

    def assert_fresh(self, version: int, answers: list[Rows] | None = None) -> None:
        """What `probe` says, or said, is what a fresh engine says at `version`.

        Up to three fresh engines are asked: on a host at half its speed one was seen, twice in some hundred, to differ
        from all others on the same files by the last bit of log-probabilities. Other weights differ from each of them.
        """
        answers = answers or self.probe()
        for nth in range(_FRESH):
            expected = [self.bed.fresh(self.spec, version, nth)] * self.spec.replicas
            if answers == expected:
                return
            print(f"not as fresh engine {nth} at version {version}: {answers} and not {expected}")
        assert answers == expected


def _make(kind: Kind, folder: Path) -> None:
    """Publish beside the place, and rename: a stream is there whole, or not at all."""
    make_stream(kind, folder / "making")
    (folder / "making" / "stream").rename(folder / "stream")


def pytest_configure(config: pytest.Config) -> None:
    """The mark of these tests."""
    config.addinivalue_line("markers", "alone: measures; nothing else may run on the machine")


_FRESH: Final = 3

_GUESTS: Final = {"test_kills.py": "dense-tp1]", "test_ranks.py": "dense-tp2]"}
"""Files that go on with a server of test_follow.py: its parameter."""


class ByServer(LoadScopeScheduling):  # type: ignore[misc,unused-ignore]
    """Tests that share a server run in one worker: those of a file; in test_follow.py, those of a parameter."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        name = file.rpartition("/")[2]
        return _GUESTS.get(name) or (test.partition("[")[2] if name == "test_follow.py" else file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServer:
    """Who runs which test, whatever --dist says."""
    return ByServer(config, log)


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Shared with the other workers of this run."""
    base = tmp_path_factory.getbasetemp()
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    shared = Path(os.environ.get("WEIGHTCAST_TESTING_SHARED", base.parent if worker else base))
    bed = Bed(shared, base / "own", int(worker[2:]) % 2 if worker else 0)
    yield bed
    bed.references.close()


@pytest.fixture(scope="session")
def running() -> Iterator[list[tuple[Spec, Live]]]:
    """The servers of this worker that run on between tests: one at most."""
    found: list[tuple[Spec, Live]] = []
    yield found
    stop_all(found)


@pytest.fixture(scope="session")
def serve(bed: Bed, running: list[tuple[Spec, Live]]) -> Callable[..., Live]:
    """Serves a spec on version 0. The server runs on for the next test that asks for the same, and ends before another."""

    def start(spec: Spec, **more: Any) -> Live:
        if running and running[0][0] == spec and not more:
            return running[0][1]
        stop_all(running)
        running.append((spec, bed.live(spec, **more)))
        running[0][1].server.wait_ready()
        return running[0][1]

    return start


def stop_all(running: list[tuple[Spec, Live]]) -> None:
    """Make room for another server."""
    while running:
        running.pop()[1].server.stop()
